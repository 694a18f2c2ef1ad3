"""The three ends of an epoch: pad fills up, drop cuts off, carry continues."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Mixing, Packing
from streampack.plan.lane_ends import LaneEndFinder, count_slots
from streampack.plan.lane_stream import LaneStream
from streampack.plan.recipe import Recipe
from streampack.types import LENGTH, PASS, SAMPLE, TOTAL
from tests.helpers.examples import examples
from tests.helpers.planning import (
    all_packs,
    device_batches,
    global_batches,
    recipe,
    world_views,
)

METHODS = ["random", "stratified", "per_stream", "device_per_stream"]
LENGTHS = [np.random.default_rng(n).integers(1, top, n) for n, top in [(500, 60), (250, 200)]]


def make(method: str, epoch_end: str, num_lanes: int = 1, size: int = 12, **mixing) -> Recipe:
    return recipe(
        mixing.pop("lengths", LENGTHS),
        mixing=Mixing(batching_method=method, epoch_end=epoch_end, **mixing),
        packing=Packing(max_seq_len=64, buffer_tokens=512),
        num_lanes=num_lanes,
        lane_turn=2,
        global_batch_size=size,
    )


worlds = st.sampled_from([(1, 12), (1, 1), (2, 2), (3, 2), (4, 3), (6, 2), (12, 1)])


@pytest.mark.thorough
@examples(12, many=25)
@given(
    method=st.sampled_from(["random", "stratified"]),  # the others: test_last_batches
    num_lanes=st.sampled_from([1, 2, 3]),
    world=worlds,
    epoch_end=st.sampled_from(["pad", "drop"]),
)
def test_pad_fills_the_last_global_batch_up_and_drop_leaves_it_out(
    method, num_lanes, world, epoch_end
):
    num_devices, batch_size = world
    size = num_lanes * 12
    r = make(method, epoch_end, num_lanes, size)
    every = all_packs(make(method, "pad", num_lanes, size), world_views(1, 1))
    whole = len(every) // size * size
    assert whole < len(every), "choose lengths that leave a remainder"
    slots = whole + size if epoch_end == "pad" else whole

    kept = every if epoch_end == "pad" else every[:whole]
    assert all_packs(r, world_views(num_devices, batch_size)) == kept
    for view in world_views(num_devices, batch_size):
        batches = device_batches(r, view)
        assert len(batches) == slots // view.stride
        assert all(batch.num_rows == batch_size for batch in batches)


@examples(10, many=20)
@given(method=st.sampled_from(METHODS), world=worlds)
def test_positions_count_slots_over_all_ranks_and_never_go_back(method, world):
    num_devices, batch_size = world
    r = make(method, "pad", size=24)
    num_packs = count_slots(r, 0)  # packs, and padding where streams end
    view = world_views(num_devices, batch_size)[0]
    positions = [batch.position for batch in device_batches(r, view)]

    for step, position in enumerate(positions, start=1):
        end = step * view.stride
        # Even steps of only padding have their own position, so that each can be resumed from.
        assert position == (min(end, num_packs) if end - view.stride < num_packs else end)


def test_carry_fills_packs_across_epochs_so_no_pack_is_flushed():
    r = make("random", "carry", lengths=[np.random.default_rng(1).integers(1, 30, 900)])
    packs = [p for epoch in range(3) for batch, _ in global_batches(r, epoch) for p in batch]

    assert sum(row[LENGTH] for pack in packs for row in pack) >= 0.999 * 64 * len(packs)


def test_a_pad_epoch_smaller_than_one_global_batch_is_one_step_of_every_rank():
    r = make("random", "pad", lengths=[np.array([30, 20])])
    batches = [device_batches(r, view) for view in world_views(6, 2)]

    assert [len(own) for own in batches] == [1] * 6
    assert [len(own[0].packs) for own in batches] == [1, 0, 0, 0, 0, 0]
    assert batches[0][0].packs[0][:, TOTAL].tolist() in ([30, 20], [20, 30])


def test_carry_mixed_lane_without_samples_is_left_out():
    """One sample has nearly all the bytes, so the lanes that begin inside it get no samples."""
    r = make("random", "carry", num_lanes=4, size=4, lengths=[np.full(449, 16)])
    raw_bytes = r.streams[0].raw_bytes.copy()
    raw_bytes[-1] = 10**9
    r = replace(r, streams=(replace(r.streams[0], raw_bytes=raw_bytes),))
    empty = [LaneStream(r, 0, lane).is_empty for lane in range(4)]
    assert sum(empty) > 1
    epochs = [all_packs(r, world_views(1, 4), epoch) for epoch in range(2)]
    assert [len(packs) for packs in epochs] == [r.packs_per_carry_epoch] * 2
    samples = {(row[PASS], row[SAMPLE]) for e in epochs for p in e for row in p}
    assert len(samples) > 890


def test_the_first_bound_of_a_queue_needs_no_lengths():
    r = make("random", "pad", num_lanes=2, lengths=[np.full(5000, 20)])
    [stream] = r.streams
    asked: list[int] = []

    def lengths_of(shard: int) -> np.ndarray:
        asked.append(shard)
        return stream.lengths_of(shard)

    finder = LaneEndFinder(replace(r, streams=(replace(stream, lengths_of=lengths_of),)), 0)
    num_packs, is_exact = finder.refine(1, 0)
    assert num_packs > 0
    assert not is_exact
    assert asked == []
    finder.refine(1, 0)
    assert asked != []


def test_the_thread_that_counts_the_packs_of_other_lanes_has_ended_once_it_is_closed():
    lengths = [np.random.default_rng(0).integers(1, 60, 2_000_000)]
    finder = LaneEndFinder(make("random", "pad", num_lanes=2, lengths=lengths), 0)
    while not finder._least or not finder._least[1, 0].is_final:
        finder.refine(1, 0)
    finder.look_ahead(np.full((2, 1), 10**9))
    assert "streampack-lane-ends" in [thread.name for thread in threading.enumerate()]
    finder.close()
    assert "streampack-lane-ends" not in [thread.name for thread in threading.enumerate()]
