"""How much of a stream a run may use: `Stream(max_passes=...)`.

::

    web    100 tokens in a lane, max_passes=4    400 tokens, 100 packs of 4
    next chapter, packs of 8                     40 packs used: 240 tokens, 30 packs of 8

Packs are at most full, so a queue that serves so many never begins another pass. Where packs mix
streams, each lane counts the samples that it draws.

Cost: O(streams x lanes).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np

from streampack.errors import ConfigError
from streampack.plan.lane_stream import LaneStream
from streampack.plan.recipe import Recipe
from streampack.plan.slots import ENDLESS
from streampack.types import Int64Array

LANE_SPREAD = 8  # choices of a stream by which lanes may differ, see mix/schedule.py


def choice_tokens(recipe: Recipe) -> int:
    """Return the token slots of one choice of the schedule."""
    return recipe.choice_slots * recipe.row_tokens


def first_limits(recipe: Recipe) -> Int64Array:
    """Return the packs that each queue may serve from the run's start, (num_lanes, num_queues).

    ENDLESS where none applies, or where packs mix streams.
    """
    limits = np.full((recipe.num_lanes, recipe.num_queues), ENDLESS)
    if recipe.is_mixed:
        return limits
    for number, stream in enumerate(recipe.streams):
        if stream.max_passes is None:
            continue
        for lane in range(recipe.num_lanes):
            tokens = LaneStream(recipe, number, lane).most_tokens
            limits[lane, number] = tokens // recipe.row_tokens
    return limits


def limits_after(
    limits: Int64Array, served: Int64Array, before: Recipe, after: Recipe
) -> Int64Array:
    """Return the limits in the chapter `after`; its packs may have another length.

    `limits` are those of the chapter before. `served` are the packs that each queue served before
    `after`, of the same shape.
    """
    old, new = before.row_tokens, after.row_tokens
    packs = limits.copy()
    if old == new:
        return packs
    for lane, queue in np.argwhere(limits < ENDLESS).tolist():
        # Packs are at most full, so at least these tokens are left.
        left = int(limits[lane, queue] - served[lane, queue]) * old
        if before.packing.overflow != "split":
            held = [LaneStream(recipe, queue, lane).most_tokens for recipe in (before, after)]
            left = _least_left(left, *held, before=before, after=after)
        # Limits count from the run's start, whatever the length of packs was.
        packs[lane, queue] = served[lane, queue] + left // new
    return packs


def _least_left(left: int, whole: int, held: int, *, before: Recipe, after: Recipe) -> int:
    """Return the least tokens left of a stream if samples are cut or dropped at another length.

    Which samples are left is unknown here. So no limit allows more than is left of any of them.
    `left` tokens at the length before are of `whole` tokens of all passes; `held` are those at the
    length after.
    """
    old, new = before.row_tokens, after.row_tokens
    if new > old:
        return left
    # A truncated sample keeps at least new / old of what it had.
    least = left * new // old if before.packing.overflow == "truncate" else 0
    return max(least, left - (whole - held))


def limits_at(recipes: Sequence[Recipe], chapter: int) -> Int64Array:
    """Return the limits in a chapter of queues that served nothing before, as `first_limits`."""
    limits = first_limits(recipes[0])
    for before, after in pairwise(recipes[: chapter + 1]):
        limits = limits_after(limits, np.zeros_like(limits), before, after)
    return limits


def token_share(recipe: Recipe, number: int, num_slots: int) -> Fraction:
    """Return the expected share of a stream in the tokens of a chapter's first slots."""
    plan = recipe.chapter
    if plan is None:
        return Fraction(0)
    share = plan.mean_share(number, num_slots)
    if recipe.target_unit == "tokens":
        return share
    means = [Fraction(stream.num_tokens, max(stream.num_samples, 1)) for stream in recipe.streams]
    whole = sum(plan.mean_share(n, num_slots) * mean for n, mean in enumerate(means))
    return share * means[number] / whole if whole else share


def exhausted_at(recipes: list[Recipe], number: int, *, margin: int = 0) -> tuple[int, int] | None:
    """Return the chapter and its step at which a stream reaches its max_passes, or None.

    The stream may get ahead of its share by `margin` tokens.
    """
    stream = recipes[0].streams[number]
    if stream.max_passes is None:
        return None
    left = Fraction(1)
    for chapter, recipe in enumerate(recipes):
        plan = recipe.chapter
        if plan is None or not plan.uses(number):
            continue
        # The lanes take turns, so the one with the least tokens counts. Less is left where samples
        # are cut or dropped.
        lanes = range(recipe.num_lanes)
        lane_tokens = [LaneStream(recipe, number, lane).most_tokens for lane in lanes]
        whole = recipe.num_lanes * min(filter(None, lane_tokens), default=1)
        if margin:
            left, margin = left - Fraction(margin, whole), 0
        used = partial(_used, recipe, number, whole)
        if plan.num_slots is None:
            return chapter, max(int(left / used(1)), 0)
        steps = plan.num_slots // recipe.global_batch_size
        if used(steps) > left:
            # What is used grows with the steps, also where shares ramp.
            return chapter, max(bisect_right(range(steps), left, key=used) - 1, 0)
        left -= used(steps)
    return None


def _used(recipe: Recipe, number: int, whole: int, steps: int) -> Fraction:
    """Return the part of `whole` tokens that a stream is due in the first steps of a chapter."""
    slots = steps * recipe.global_batch_size
    if not slots:
        return Fraction(0)
    return token_share(recipe, number, slots) * slots * recipe.row_tokens / whole


def check_limits(recipes: list[Recipe]) -> tuple[int, int, str] | None:
    """Return the chapter and step at which a stream ends the run, and its name, or None.

    Raises a ConfigError if a stream must not be exhausted and would be, or if a chapter has only
    streams that are.
    """
    ends = []
    for number, stream in enumerate(recipes[0].streams):
        if stream.max_passes is None:
            continue
        is_end = stream.on_exhausted == "end"
        margin = _margin(recipes[0]) if is_end else 0
        at = exhausted_at(recipes, number, margin=margin)
        if at is None:
            continue
        if stream.on_exhausted == "error":
            raise ConfigError(
                f"stream {stream.name!r} reaches max_passes={float(stream.max_passes):g} at step "
                f"{at[1]} of chapters[{at[0]}], and has on_exhausted='error'; lower its "
                "weight, end the run before, or set on_exhausted to 'substitute' or 'end'"
            )
        if is_end:
            ends.append((*at, stream.name))
    end = min(ends, default=None)
    _check_enough(recipes if end is None else recipes[: end[0]])
    return end


def _margin(recipe: Recipe) -> int:
    """Return the tokens by which a stream may get ahead in one lane, over all lanes."""
    return LANE_SPREAD * recipe.num_lanes * choice_tokens(recipe)


def _check_enough(recipes: list[Recipe]) -> None:
    """Refuse chapters that could begin or end without packs, as all their streams are limited."""
    for number, recipe in enumerate(recipes):
        plan, used = recipe.chapter, set(recipe.used)
        if plan is None or any(recipe.streams[n].max_passes is None for n in used):
            continue
        if plan.num_slots is None:
            raise ConfigError(
                f"chapters[{number}] has no end, and each of its streams has max_passes; set its "
                "until or steps, or give one of them on_exhausted='end'"
            )
        needed = plan.num_slots * recipe.row_tokens
        spent = sum(_most_spent(recipes, before, used) for before in range(number))
        left = max(_held(recipes[: number + 1], used) - spent, 0)
        if needed > left:
            raise ConfigError(
                f"chapters[{number}] takes {needed} tokens, and its streams all have max_passes: "
                f"whole packs of {left} are sure to be left of them; shorten it, raise max_passes, "
                "or give a weight to a stream without it"
            )


def _held(recipes: list[Recipe], streams: set[int]) -> int:
    """Return the least tokens that limited streams give in the last of some chapters, if unused."""
    first, last = recipes[0], recipes[-1]
    row_tokens, num_lanes = last.row_tokens, last.num_lanes
    if last.is_mixed:  # lanes take turns, so the one with the least counts
        least = min(
            sum(LaneStream(first, number, lane).most_tokens for number in streams)
            for lane in range(num_lanes)
        )
        return num_lanes * (least - last.lane_turn * row_tokens)
    limits = limits_at(recipes, len(recipes) - 1)[:, sorted(streams)]
    # Less than a turn is left in each lane, or less than a global batch in all.
    whole = limits // last.shapes.slots_together * last.shapes.slots_together
    rest = 0
    if last.mixing.batching_method == "per_stream":
        rest = len(streams) * (last.global_batch_size - 1)
    return max(int(whole.sum()) - rest, 0) * row_tokens


def _most_spent(recipes: list[Recipe], number: int, streams: set[int]) -> int:
    """Return the most tokens that a chapter takes of some streams."""
    recipe = recipes[number]
    plan, used = recipe.chapter, set(recipe.used)
    if plan is None or not used & streams:
        return 0
    slots = plan.num_slots or 0
    whole = slots * recipe.row_tokens
    until, margin = recipes[: number + 1], _margin(recipes[0])
    if used <= streams or any(exhausted_at(until, n, margin=margin) for n in used):
        return whole
    share = sum(token_share(recipe, n, slots) for n in used & streams)
    return min(math.ceil(share * whole) + _margin(recipe), whole)
