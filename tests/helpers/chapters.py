"""Runs of chapters over made-up lengths, and the packs of their sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from streampack.chapters import Chapter, Ramp
from streampack.config import Mixing, Order, Packing
from streampack.plan.chapter_recipes import chapter_recipes
from streampack.plan.device_plan import DevicePlan, DeviceView
from streampack.plan.sequence import PackSequence
from streampack.plan.spans import RunPlan, run_of
from tests.helpers.planning import Int64Array, plan_stream, world_views

RNG = np.random.default_rng(0)
SIZES = {"web": (400, 150), "code": (150, 300), "math": (90, 60), "other": (50, 100)}
LENGTHS = {name: RNG.integers(1, most, num) for name, (num, most) in SIZES.items()}


@st.composite
def some_weights(draw, names: Sequence[str] = tuple(SIZES)) -> dict[str, int | Ramp]:
    used = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    return {name: draw(st.integers(1, 5)) for name in used}


@st.composite
def some_chapters(
    draw, names: Sequence[str] = tuple(SIZES), *, may_be_open: bool = False
) -> list[Chapter]:
    """Up to three chapters with different weights, streams, lengths and sizes."""
    made: list[Chapter] = []
    num = draw(st.integers(1, 3))
    for number in range(num):
        own, steps = draw(some_weights(names)), draw(st.integers(1, 6))
        if len(own) > 1 and draw(st.booleans()):
            first, last = list(own)[:2]
            own |= {first: Ramp(own[first], own[last]), last: Ramp(own[last], own[first])}
        elif may_be_open and number == num - 1 and draw(st.booleans()):
            steps = None
        made.append(
            Chapter(
                weights=own,
                steps=steps,
                packing=draw(st.sampled_from([None, None, Packing(max_seq_len=128)])),
                global_batch_size=draw(st.sampled_from([None, None, 8])),
                batch_size=draw(st.sampled_from([None, None, 1])) if may_be_open else None,
            )
        )
    return made


def run_plan(
    lengths: dict[str, Int64Array],
    chapters: Sequence[Chapter],
    *,
    method: str = "stratified",
    unit: str = "samples",
    packing: Packing | None = None,
    order: Order | None = None,
    num_lanes: int = 1,
    lane_turn: int = 1,
    global_batch_size: int = 8,
    shard_size: int = 64,
    max_repeats: float | dict[str, float] | None = None,
) -> RunPlan:
    streams = [
        replace(
            plan_stream(own, number, shard_size),
            name=name,
        )
        for number, (name, own) in enumerate(lengths.items())
    ]
    return run_of(
        chapter_recipes(
            streams,
            chapters,
            packing=packing or Packing(max_seq_len=64),
            mixing=Mixing(
                batching_method=method,
                weight_unit=unit,
                global_batch_size=global_batch_size,
                max_repeats=max_repeats,
            ),
            order=order or Order(seed=3, pack_shuffle=16),
            num_lanes=num_lanes,
            lane_turns=[chapter.batch_size or lane_turn for chapter in chapters],
        )
    )


def views_of(batch_sizes: Sequence[int], num_devices: int) -> list[list[DeviceView]]:
    worlds = [world_views(num_devices, size) for size in batch_sizes]
    return [[world[place] for world in worlds] for place in range(num_devices)]


def run_packs(
    run: RunPlan, batch_sizes: Sequence[int], num_devices: int = 1, most: int = 1, **kwargs
) -> list[tuple[int, int, list]]:
    packs = []
    for views in views_of(batch_sizes, num_devices):
        sequence = PackSequence(run.seen(views), **kwargs)
        packs += device_packs(sequence, views, most)
        sequence.close()
    return sorted(packs, key=lambda pack: pack[:2])


def device_packs(sequence: PackSequence, views: Sequence[DeviceView], most: int = 1) -> list:
    packs = []
    while (plan := sequence.next(most)) is not None:
        packs += plan_packs(plan, views[plan.epoch])
    return packs


def plan_packs(plan: DevicePlan, view: DeviceView) -> list[tuple[int, int, list]]:
    """The packs of a plan: (chapter, slot, rows)."""
    packs = []
    for number, position in enumerate(plan.positions):
        first = view.first_slot(position - view.stride)
        batch = plan.slice(number, number + 1).packs
        packs += [(plan.epoch, first + row, batch[row].tolist()) for row in range(len(batch))]
    return packs


def drawn_segments(sequence: PackSequence, views: Sequence[DeviceView]) -> Int64Array:
    """All segments that a device's lanes draw until the run ends, including those not delivered."""
    rows = [np.array(pack) for _, _, pack in device_packs(sequence, views, most=8)]
    sequence._at.note_delivered()
    queues = sequence._queues
    for lane, queue in list(queues._loaded):  # queues that are paused
        queues.get(lane, queue)
    queues.know_delivered()
    for pack_queue in queues:
        delivered = int(queues.delivered[pack_queue.windows._lane, pack_queue._queue])
        rest = pack_queue._packs.slice(delivered - pack_queue.first_known, len(pack_queue._packs))
        rows += [rest.segments, pack_queue.windows.packer.buffered]
        if (again := pack_queue.windows.arrivals.undelivered) is not None:
            rows.append(again.segments)
    return np.concatenate(rows)
