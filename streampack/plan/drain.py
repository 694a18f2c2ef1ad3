"""How the last chapter of a run drains: a stream with on_exhausted="end" is delivered to its end.

::

    lane 0    a b c d          each lane to the end of its part; lanes that are dry are skipped
    lane 1    e f
    chapter   a e b f c d . .  the last global batch is padded

Cost: planning the lanes and streams that end from the start of the run, about 1 us a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from streampack.errors import ConfigError
from streampack.plan.lane_stream import LaneStream
from streampack.plan.pack_queues import PackQueues
from streampack.plan.recipe import Recipe
from streampack.plan.slots import SlotWalker
from streampack.plan.spans import RunPlan
from streampack.types import Int64Array

MOST_SLOTS = 1 << 50


def drained(recipes: Sequence[Recipe], ended_by: str) -> RunPlan:
    """Return a run with a last chapter that ends with a stream.

    `ended_by` of the run is None if the chapter ends before, as it is written.
    """
    last = len(recipes) - 1
    plan = recipes[last].chapter
    if plan is None:
        return RunPlan(recipes)
    recipe = replace(recipes[last], chapter=replace(plan, drains=True))
    run = RunPlan([*recipes[:last], recipe])
    start = run.start(last)
    start = replace(start, limits=_limits(run, start.limits, start.served))
    most = MOST_SLOTS if plan.num_slots is None else plan.num_slots
    missing = SlotWalker(recipe, 0, start=start).walk_over(most)
    if not missing:
        return RunPlan([*recipes[:last], recipe], None, start.limits)
    if missing == most and last:
        return RunPlan(recipes[:last], ended_by)
    if missing == most:
        raise ConfigError(
            f"stream {ended_by!r} has on_exhausted='end', and its max_passes leaves no sample, so "
            "the run ends before its first step; raise max_passes"
        )
    num_slots = -(-(most - missing) // recipe.global_batch_size) * recipe.global_batch_size
    recipe = replace(recipe, chapter=replace(plan, drains=True, num_slots=num_slots))
    return RunPlan([*recipes[:last], recipe], ended_by, start.limits)


def _limits(run: RunPlan, limits: Int64Array, served: Int64Array) -> Int64Array:
    """Return the packs that each queue has in all, where a stream ends it."""
    last = len(run) - 1
    recipe = run.recipes[last]
    queues = PackQueues(run, last, [], range(0))
    limits = limits.copy()
    for lane, queue in np.ndindex(*limits.shape):
        ends = [n for n in recipe.streams_in(queue) if recipe.ends_with(n)]
        if not ends:
            continue
        limits[lane, queue] = served[lane, queue]
        if any(LaneStream(recipe, n, lane).is_empty for n in ends):
            continue  # another lane serves it
        pack_queue = queues.get(lane, queue)
        while not pack_queue.is_complete:
            pack_queue.extend()
            pack_queue.release(pack_queue.num_known)
        limits[lane, queue] = pack_queue.num_known
    return limits
