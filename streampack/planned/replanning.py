"""What it costs to plan lanes again that a state has no snapshot of, and the refusal of that.

::

    snapshots    lane 0: pack 4096      lane 1: none, and 4100 of its packs are delivered
    costs        lane 1 from its start: lengths of its samples, which may have to be tokenized

Cost: about 10 ns a slot of the run, only where learning a length means tokenizing a text; and where
lanes are replanned, a `stat` of each shard up to the first that is not in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from streampack.errors import ResumeError
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress
from streampack.streams import TokenStream


def costs_tokenizing(stream: TokenStream) -> bool:
    """Return whether a length that is not known is learnt by tokenizing a text."""
    return stream.shards.length_cost == "tokenize"


def lanes_to_replan(run: RunPlan, progress: Progress) -> list[tuple[int, int, int]]:
    """Return rows (lane, queue, slots delivered) of what this device plans from the start again."""
    walker = run.walker(progress.epoch, progress.position, lambda *_: None)
    walker.end_at(None)  # as if no queue ended
    walker.walk_over(progress.position - walker.slot)
    known = {(each["lane"], each["queue"]) for each in progress.snapshots}
    lanes = run.lanes(progress.epoch, progress.position)
    return [
        (lane, queue, int(walker.served[lane, queue]))
        for lane, queue in np.argwhere(walker.served).tolist()
        if lane in lanes and (lane, queue) not in known
    ]


def check_replanning(run: RunPlan, streams: Sequence[TokenStream], progress: Progress) -> None:
    """Refuse a place if, to plan on, this device would tokenize again what came before it.

    What is in the cache costs nothing, nor does the shuffle block that the place is in.
    """
    costly = [number for number, stream in enumerate(streams) if costs_tokenizing(stream)]
    missing = lanes_to_replan(run, progress) if costly else []
    if not missing:
        return
    costly = [n for n in costly if not all(map(streams[n].is_here, range(streams[n].num_shards)))]
    recipe, num_tokens, lanes = run.recipe(progress.epoch), 0, set()
    for lane, queue, num_slots in missing:
        for number in set(costly).intersection(recipe.streams_in(queue)):
            stream = recipe.streams[number]
            tokens = num_slots * recipe.row_tokens * _mean_share(run, progress, number)
            # A pass over the lane's part of the stream at most.
            part = min(tokens / max(stream.num_tokens, 1), Fraction(1, recipe.num_lanes))
            block = Fraction(streams[number].block_samples or 1, stream.num_samples)
            if part >= block:
                num_tokens += int(part // block * block * stream.num_tokens)
                lanes.add(lane)
    if lanes:
        names = ", ".join(repr(recipe.names[number]) for number in costly)
        raise ResumeError(
            f"no snapshot is known of {len(lanes)} of {recipe.num_lanes} lanes at position "
            f"{progress.position} of epoch or chapter {progress.epoch}: to plan them from their "
            f"start, about {num_tokens} tokens of {names} would be tokenized again; load "
            "what loader.gather_state() returned on all ranks at or before it, or allow it with "
            "load_state_dict(state, replan=True)"
        )


def _mean_share(run: RunPlan, progress: Progress, stream: int) -> Fraction:
    """Return the share of a stream in its queue, in the slots before a place."""
    recipe = run.recipe(progress.epoch)
    if not recipe.is_mixed:
        return Fraction(1)
    if recipe.chapter is None:
        return Fraction(recipe.streams[stream].chosen_tokens, max(recipe.chosen_tokens, 1))
    slots = [each.num_slots or 0 for each in run.chapters[: progress.epoch]] + [progress.position]
    shares = [each.mean_share(stream, num) for each, num in zip(run.chapters, slots, strict=False)]
    total = sum(map(Fraction.__mul__, shares, map(Fraction, slots)), Fraction(0))
    return total / max(sum(slots), 1)
