"""Streams that state a shuffle block: few shards before the first batch, and the same packs.

::

    shards     | 0 | 1 | 2 | 3 | 4 | 5 ...      20 samples each
    block      |<------------->|                80 samples: 4 shards, 5 where it is cut
    windows    |<----->|<----->|                40 samples at most
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from streampack.chapters import Chapter
from streampack.config import Mixing, Order
from streampack.mix.draw import CHUNK
from streampack.plan.chapter_recipes import chapter_recipes
from streampack.plan.lane_stream import LaneStream
from streampack.plan.sequence import PackSequence
from streampack.plan.spans import RunPlan, run_of
from streampack.types import PASS, SAMPLE, START, STREAM
from tests.helpers.examples import crossed
from tests.helpers.planning import plan_stream, recipe, world_views

METHODS = ["random", "stratified", "device_per_stream", "per_stream"]
SHARD, BLOCK = 20, 80
SIZES = (4000, 2000, 600)
LENGTHS = [np.random.default_rng(n).integers(0, 60, size) for n, size in enumerate(SIZES)]


def run_plan(
    num_lanes: int, *, unit: str, method: str, chapters: bool, block: int | None = BLOCK
) -> tuple[RunPlan, set[tuple[int, int]]]:
    """Return a run of three streams, and the shards of which it knows the lengths."""
    opened: set[tuple[int, int]] = set()

    def lazily(number: int) -> Any:
        stream = plan_stream(LENGTHS[number], number, SHARD)

        def lengths_of(shard: int) -> Any:
            opened.add((number, shard))
            return stream.lengths_of(shard)

        fetch: Any = lambda shards: opened.update((number, shard) for shard in shards.tolist())  # noqa: E731
        return replace(
            stream, lengths_of=lengths_of, prepare=fetch, block_samples=block, may_be_empty=True
        )

    size = 16 * num_lanes
    mixing = Mixing(batching_method=method, weight_unit=unit, global_batch_size=size)
    total = sum(int(lengths.sum()) for lengths in LENGTHS)
    if not chapters:
        epoch_size = total if unit == "tokens" else None
        mixing = replace(mixing, epoch_end="carry", epoch_size=epoch_size)
    plain = recipe(LENGTHS, mixing=mixing, num_lanes=num_lanes, lane_turn=2, global_batch_size=size)
    streams = [replace(lazily(number), quota=own.quota) for number, own in enumerate(plain.streams)]
    own = replace(plain, streams=tuple(streams))
    if not chapters:
        return RunPlan([own]), opened
    return run_of(
        chapter_recipes(
            streams,
            [
                Chapter(weights={"s0": 3, "s1": 2, "s2": 1}, steps=3),
                Chapter(weights={"s0": 1, "s2": 2}, steps=3),
            ],
            packing=plain.packing,
            mixing=mixing,
            order=plain.order,
            num_lanes=num_lanes,
            lane_turns=[2, 2],
        )
    ), opened


def packs_of(run: RunPlan, num_devices: int, num_batches: int) -> list[list[list[int]]]:
    """Return the packs of the first batches of all devices, in order of their slots."""
    size = run.recipes[0].lane_turn
    sequences = [PackSequence(run.seen([v] * len(run))) for v in world_views(num_devices, size)]
    packs = []
    for _ in range(num_batches // num_devices):
        for sequence in sequences:
            plan = sequence.next()
            packs += (
                [] if plan is None else [plan.packs[n].tolist() for n in range(len(plan.packs))]
            )
    return packs


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("num_lanes", "unit_and_chapters"),
    crossed([1, 2, 8], list(product(["samples", "tokens"], [False, True]))),
)
def test_the_first_batch_needs_a_block_of_each_stream_in_each_lane(
    num_lanes, method, unit_and_chapters
):
    unit, chapters = unit_and_chapters
    run, opened = run_plan(num_lanes, unit=unit, method=method, chapters=chapters)
    [view] = world_views(1, run.recipes[0].global_batch_size)

    assert PackSequence(run.seen([view] * len(run))).next() is not None

    assert len(opened) <= len(LENGTHS) * num_lanes * (BLOCK // SHARD + 1)


@pytest.mark.parametrize(("method", "chapters"), crossed(METHODS, [True, False]))
def test_packs_are_equal_in_every_world_and_each_pass_has_each_sample_once(method, chapters):
    run, _ = run_plan(4, unit="samples", method=method, chapters=chapters)
    num_batches = 16 * 32
    wanted = packs_of(run, 1, num_batches)
    for num_devices in (2, 4):
        again, _ = run_plan(4, unit="samples", method=method, chapters=chapters)
        assert packs_of(again, num_devices, num_batches) == wanted
    rows = np.array([row for pack in wanted for row in pack])
    assert len(np.unique(rows[:, [STREAM, PASS, SAMPLE, START]], axis=0)) == len(rows)


def test_a_window_never_has_more_than_half_a_block_and_chunks_divide_it():
    for block in (1, 2, 5, 80, 81, 20_000):
        run, _ = run_plan(1, unit="samples", method="random", chapters=False, block=block)
        [own] = run.recipes
        most = max(int(block / 2 * sum(SIZES) / SIZES[0]), 1)
        sizes = own.sizes(0, 0)
        assert sizes.max_samples == sizes.packed == min(most, sum(SIZES))
        assert sizes.chunk <= min(most, CHUNK)
        assert -(-most // sizes.chunk) * sizes.chunk < most + -(-most // CHUNK)


def test_lanes_that_share_a_stream_take_its_blocks_together():
    run, _ = run_plan(8, unit="samples", method="stratified", chapters=False)
    [own] = run.recipes
    assert [own.most_drawn(queue) for queue in range(3)] == [BLOCK // 2, BLOCK // 2, BLOCK // 16]


def test_a_rare_stream_of_small_blocks_makes_no_small_windows():
    run, _ = run_plan(1, unit="samples", method="random", chapters=False)
    [own] = run.recipes
    streams = [replace(stream, block_samples=None) for stream in own.streams]
    streams[2] = replace(streams[2], block_samples=8)
    mixed = replace(own, streams=tuple(streams))
    assert mixed.most_drawn(0) == 4 * sum(SIZES) // SIZES[2]


def test_a_smaller_block_of_the_order_holds_too_and_other_streams_keep_theirs():
    run, _ = run_plan(1, unit="samples", method="random", chapters=False)
    streams = (run.recipes[0].streams[0], replace(run.recipes[0].streams[1], block_samples=None))
    order = Order(shuffle_block_size=BLOCK // 2)
    sizes = [
        [replace(run.recipes[0], streams=streams, order=each).block_size(n) for n in (0, 1)]
        for each in (Order(), order)
    ]
    assert sizes == [[BLOCK, 262_144], [BLOCK // 2, BLOCK // 2]]


def test_a_small_lane_needs_the_shards_of_its_first_block_alone():
    opened: list[int] = []
    lengths = LENGTHS[0][:100]
    whole = recipe([lengths])
    plain = plan_stream(lengths, 0, 2, block_samples=8)
    plain = replace(plain, quota=whole.streams[0].quota)

    def lengths_of(shard: int) -> Any:
        opened.append(shard)
        return plain.lengths_of(shard)

    lazily = replace(plain, lengths_of=lengths_of, prepare=lambda _: None)
    first, other = (
        LaneStream(replace(whole, streams=(stream,)), 0, 0).take(0, 8).tolist()
        for stream in (lazily, plain)
    )

    assert first == other
    assert len(set(opened)) == 4


def test_the_cache_has_room_for_the_shards_of_two_blocks_and_two_windows():
    run, _ = run_plan(2, unit="samples", method="random", chapters=False)
    lane = LaneStream(run.recipes[0], 0, 0)
    most = lane.most_bytes(np.full(len(LENGTHS[0]) // SHARD, 1))
    assert most <= 5 * BLOCK // SHARD + 2 < len(LENGTHS[0]) // SHARD // 2
