"""Laws 1, 2, 4 and 6: every chosen token once, in the same packs, in every world."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Mixing, Order, Packing
from streampack.errors import DataError
from streampack.plan.device_plan import DeviceView
from streampack.plan.lane_stream import LaneStream
from streampack.plan.recipe import Recipe
from streampack.plan.sequence import epoch_sequence
from streampack.types import LENGTH, SAMPLE, STREAM, TOTAL
from tests.helpers.examples import examples
from tests.helpers.planning import (
    all_packs,
    count_packs,
    covered,
    device_batches,
    recipe,
    world_views,
)

METHODS = ["random", "stratified", "per_stream", "device_per_stream"]
UNITS = ["samples", "tokens"]

methods, units = st.sampled_from(METHODS), st.sampled_from(UNITS)
lane_counts = st.sampled_from([1, 2, 3, 4, 7])
all_lengths = st.lists(
    st.tuples(st.integers(1, 900), st.integers(1, 150)), min_size=1, max_size=4
).map(
    lambda streams: [
        np.random.default_rng(num).integers(1, longest + 1, num) for num, longest in streams
    ]
)


def make(all_lengths: list, method: str, unit: str, num_lanes: int, run: int, **kwargs) -> Recipe:
    mixing = kwargs.pop("mixing", {})
    return recipe(
        all_lengths,
        mixing=Mixing(batching_method=method, weight_unit=unit, **mixing),
        num_lanes=num_lanes,
        lane_turn=run,
        # per_stream with several lanes requires a multiple of num_lanes * lane_turn.
        global_batch_size=kwargs.pop("global_batch_size", num_lanes * run * 2),
        **kwargs,
    )


def assert_covers_once(packs: list, all_lengths: list[np.ndarray]) -> None:
    """Check that every sample comes once, in pass 0, and that its pieces make up the whole."""
    for lengths, pieces in zip(all_lengths, covered(packs, len(all_lengths)), strict=True):
        assert sorted(pieces) == [(0, sample) for sample in range(len(lengths))]
        for (_, sample), own in pieces.items():
            starts = np.cumsum([0, *(length for _, length in own)])
            assert [start for start, _ in own] == starts[:-1].tolist()
            assert starts[-1] == lengths[sample]


@examples(60)
@given(
    all_lengths=all_lengths,
    method=methods,
    unit=units,
    num_lanes=lane_counts,
    run=st.integers(1, 4),
    packer=st.sampled_from(["exact_fit", "next_fit"]),
    seed=st.integers(0, 9),
)
def test_every_token_lies_in_one_pack_of_an_epoch_and_no_pack_holds_too_many(
    all_lengths, method, unit, num_lanes, run, packer, seed
):
    r = make(
        all_lengths,
        method,
        unit,
        num_lanes,
        run,
        packing=Packing(max_seq_len=64, method=packer),
        order=Order(seed=seed),
    )
    packs = all_packs(r, world_views(1, run))

    assert_covers_once(packs, all_lengths)
    assert all(0 < sum(row[LENGTH] for row in pack) <= 64 for pack in packs)
    assert all(row[TOTAL] == all_lengths[row[STREAM]][row[SAMPLE]] for p in packs for row in p)
    if method != "random":
        assert all(len({row[STREAM] for row in pack}) == 1 for pack in packs)


LENGTHS = [
    np.random.default_rng(n).integers(1, top, n) for n, top in [(500, 60), (250, 200), (9, 90)]
]


@pytest.mark.thorough
@examples(40)
@given(
    method=methods,
    unit=units,
    num_lanes=lane_counts,
    run=st.integers(1, 5),
    num_devices=st.integers(1, 9),
    batch_size=st.integers(1, 7),
    epoch=st.integers(0, 2),
    epoch_end=st.sampled_from(["pad", "drop", "carry"]),
    overflow=st.sampled_from(["split", "truncate", "drop"]),
    weights=st.sampled_from([None, [{"repeat": 0.6}, {"repeat": 1.7}, {"choose": 40}]]),
)
def test_any_world_reads_the_same_sequence(
    method, unit, num_lanes, run, num_devices, batch_size, epoch, epoch_end, overflow, weights
):
    if (epoch_end, overflow) == ("carry", "drop"):
        overflow = "truncate"  # leaves few samples of the smallest stream: correct, but slow
    r = make(
        LENGTHS,
        method,
        unit,
        num_lanes,
        run,
        weights=weights,
        mixing={"epoch_end": epoch_end},
        packing=Packing(max_seq_len=64, overflow=overflow),
    )

    expected = all_packs(r, world_views(1, run), epoch)
    assert all_packs(r, world_views(num_devices, batch_size), epoch) == expected


@pytest.mark.parametrize("method", METHODS)
def test_the_lanes_take_turns_of_lane_run_packs(method):
    r = make([np.full(4000, 16)], method, "samples", 4, 3, global_batch_size=24)
    lane_of = {}
    for lane in range(4):
        samples = LaneStream(r, 0, lane).take(0, 1000)[:, SAMPLE]
        lane_of.update(dict.fromkeys(samples.tolist(), lane))

    lanes = [lane_of[pack[0][SAMPLE]] for pack in all_packs(r, world_views(1, 24))[:600]]
    assert lanes == [q // 3 % 4 for q in range(600)]


@pytest.mark.parametrize("start", [0, 1, 6])
def test_a_node_reads_its_own_lanes_alone_also_after_a_resume(start):
    """Place p is on node p mod 2; with 4 lanes of runs of 2, batch k comes from lane k mod 4."""
    r = make([np.full(4000, 16)], "random", "samples", 4, 2)
    lane_of = {}
    for lane in range(4):
        samples = LaneStream(r, 0, lane).take(0, 1000)[:, SAMPLE]
        lane_of.update(dict.fromkeys(samples.tolist(), lane))

    for view in world_views(4, 2):
        batches = device_batches(r, view, position=2 * start)[:40]
        seen = {lane_of[row[SAMPLE]] for batch in batches for row in batch.packs.segments.tolist()}
        assert {lane % 2 for lane in seen} == {view.place % 2}


def test_lanes_of_no_sample_are_passed_over():
    """Seven lanes, six samples: at least one lane is empty, and the sequence continues."""
    lengths = [np.array([5, 6, 7, 8, 9, 10])]
    for method in METHODS:
        assert_covers_once(
            all_packs(make(lengths, method, "samples", 7, 1), world_views(2, 1)), lengths
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("overflow", ["truncate", "drop"])
def test_truncated_and_dropped_samples_are_left_out_as_asked_and_counted(method, overflow):
    r = make(LENGTHS, method, "samples", 1, 2, packing=Packing(max_seq_len=64, overflow=overflow))
    (batches,) = [device_batches(r, view) for view in world_views(1, 2)]
    packs = [b.packs[i].tolist() for b in batches for i in range(len(b.packs))]

    for number, pieces in enumerate(covered(packs, 3)):
        lengths = LENGTHS[number]
        kept = lengths if overflow == "truncate" else np.where(lengths > 64, 0, lengths)
        expected = {(0, i): [(0, min(int(n), 64))] for i, n in enumerate(kept) if n}
        assert pieces == expected


@pytest.mark.parametrize("overflow", ["truncate", "drop", "split"])
def test_samples_that_are_left_out_are_counted_per_stream(overflow):
    r = make(LENGTHS, "random", "samples", 1, 2, packing=Packing(max_seq_len=64, overflow=overflow))
    sequence = epoch_sequence(r, DeviceView(batch_size=2))
    while sequence.next() is not None:
        pass

    long = [int((lengths > 64).sum()) for lengths in LENGTHS]
    assert sequence.totals.dropped.tolist() == (long if overflow == "drop" else [0, 0, 0])


@pytest.mark.parametrize("method", METHODS)
def test_overflow_error_names_the_stream_and_the_sample(method):
    r = make(LENGTHS, method, "samples", 1, 2, packing=Packing(max_seq_len=64, overflow="error"))

    with pytest.raises(DataError, match=r"stream 's\d', sample \d+ of \d+ tokens .*max_seq_len=64"):
        all_packs(r, world_views(1, 2))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_lanes", [1, 4])
def test_counting_packs_without_reading_them_gives_the_length_of_the_epoch(method, num_lanes):
    r = make(LENGTHS, method, "samples", num_lanes, 2)
    counted = sum(sum(count_packs(r, 1, lane)) for lane in range(num_lanes))

    assert counted == len(all_packs(r, world_views(1, 2), 1))


@pytest.mark.parametrize("method", METHODS)
def test_lanes_of_which_nearly_all_is_dropped_are_bounded_by_what_is_left(method):
    lengths = [np.where(np.arange(3000) % 50, 90, 30), np.where(np.arange(900) % 9, 70, 64)]
    r = make(lengths, method, "samples", 3, 2, packing=Packing(max_seq_len=64, overflow="drop"))

    expected = all_packs(r, world_views(1, 2))
    assert [len(pieces) for pieces in covered(expected, 2)] == [60, 100]
    assert all_packs(r, world_views(3, 2)) == expected
