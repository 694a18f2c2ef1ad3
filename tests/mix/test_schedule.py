"""Shares of slots are accurate at all times, and the same everywhere."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.mix.schedule import FARTHEST, LinearShares, Schedule, ScheduleState
from streampack.mix.schedule_kernels import SCALE, _most_owed
from tests.helpers.examples import examples


def streams(amounts: list[int], block: int, seed: int, num: int) -> np.ndarray:
    schedule = Schedule(amounts, block=block, seed=seed, seed_path=("epoch", 0))
    return np.concatenate(list(islice(schedule.blocks(), -(-num // block))))[:num]


def drift(order: np.ndarray, amounts: list[int]) -> np.ndarray:
    """Count minus share after every slot, shape (slots, streams)."""
    counts = np.cumsum(order[:, None] == np.arange(len(amounts)), axis=0)
    shares = np.array([amount / sum(amounts) for amount in amounts])
    return counts - np.arange(1, len(order) + 1)[:, None] * shares


def test_the_order_differs_between_seeds_and_not_between_runs():
    first, again, other = (streams([5, 3, 2], 1, seed, 200) for seed in (1, 1, 2))

    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.parametrize("first", [0, 1])
def test_where_none_is_due_soon_the_open_stream_that_is_due_first_is_served(first):
    order = [first, 1 - first]
    opens, deadlines = np.array([1, 0])[order], np.array([90, 95])[order]

    assert _most_owed(opens, deadlines, np.zeros(2, np.int64), 2, 64) == first
    assert _most_owed(opens, deadlines, np.array([1, 2])[order], 2, 95) == 1 - first


LANE_BOUND = 8  # units of a stream by which two lanes may differ; usually at most 5


def lane_spread(shares, *, block, num_lanes, lane_turn, seed):
    """The most units of a stream by which lanes differ, in 6,000 slots; drift is checked, too."""
    schedule = Schedule(
        shares, block=block, seed=seed, seed_path=("run",), num_lanes=num_lanes, lane_turn=lane_turn
    )
    order = np.concatenate(list(islice(schedule.blocks(), -(-6000 // block))))
    assert np.abs(drift(order, shares)[block - 1 :: block]).max() < 1 + 1e-6

    lanes = np.arange(len(order)) // lane_turn % num_lanes
    most = 0
    for stream in np.flatnonzero(shares):
        counts = np.cumsum((order == stream)[:, None] & (lanes[:, None] == range(num_lanes)), 0)
        # After every round of the lanes.
        counts = counts[lane_turn * num_lanes - 1 :: lane_turn * num_lanes]
        most = max(most, (counts.max(axis=1) - counts.min(axis=1)).max(initial=0))
    return most


@pytest.mark.parametrize("seed", range(60))
def test_lanes_get_each_stream_alike_and_blocks_keep_their_promise(seed):
    rng = np.random.default_rng(seed)
    shares = rng.integers(0, 1001, rng.integers(1, 13)).tolist()
    shares[0] += 1
    block, num_lanes, lane_turn = map(int, rng.integers([1, 2, 1], [71, 17, 9]))
    spread = lane_spread(shares, block=block, num_lanes=num_lanes, lane_turn=lane_turn, seed=seed)
    assert spread <= LANE_BOUND


# Their units have to be served at the same places of each period, which may all belong to one lane.
@pytest.mark.parametrize(
    ("shares", "block", "num_lanes"),
    [
        ([1, 1, 253], 1, 3),
        ([1, 1, 254], 1, 4),
        ([1, 1, 1, 252], 4, 3),
        ([2, 2, 4, 2, 1, 3, 1, 293], 7, 7),
        ([2, 1, 4, 1, 1, 1, 4, 364], 2, 9),
    ],
)
def test_lanes_get_small_streams_of_equal_shares_alike(shares, block, num_lanes):
    assert lane_spread(shares, block=block, num_lanes=num_lanes, lane_turn=1, seed=0) <= LANE_BOUND


def test_streams_that_are_rarer_than_deadlines_are_known_are_spread_too():
    shares = [1, 1, 1, FARTHEST + 1000]
    schedule = Schedule(shares, block=1, seed=0, seed_path=("run",), num_lanes=4)
    order = np.concatenate(list(islice(schedule.chunks(), 80))).ravel()
    lanes = np.arange(len(order)) % 4
    for stream in range(3):
        counts = np.bincount(lanes[order == stream], minlength=4)
        assert counts.sum() > 60
        assert np.ptp(counts) <= 3


@examples(40, many=80)
@given(
    ends=st.integers(2, 7).flatmap(
        lambda num: st.tuples(
            *[st.lists(st.integers(0, 20), min_size=num, max_size=num).filter(any)] * 2
        )
    ),
    block=st.sampled_from([1, 2, 8, 32]),
    num_blocks=st.sampled_from([7, 50, 500]),
    num_lanes=st.sampled_from([1, 2, 8]),
    lane_turn=st.sampled_from([1, 4]),
)
def test_shares_that_change_are_met_by_their_running_integral(
    ends, block, num_blocks, num_lanes, lane_turn
):
    begin, end = ([Fraction(n, sum(own)) for n in own] for own in ends)
    num_slots = num_blocks * block
    start = ScheduleState(
        lags=np.zeros(len(begin), np.int64), owed=np.zeros((num_lanes, len(begin)), np.int64)
    )
    schedule = Schedule(
        LinearShares(begin, end, num_slots),
        block=block,
        seed=1,
        seed_path=("run",),
        num_lanes=num_lanes,
        lane_turn=lane_turn,
        start=start,
    )
    order = np.concatenate([blocks.ravel() for blocks in schedule.chunks()])
    assert len(order) == num_slots
    counts = np.cumsum(order[:, None] == np.arange(len(begin)), axis=0)
    slots = np.arange(1, num_slots + 1)[:, None]
    first, last = (np.array([float(share) for share in shares]) for shares in (begin, end))
    due = first * slots + (last - first) * slots**2 / (2 * num_slots)
    assert np.abs(counts - due)[block - 1 :: block].max() < 1 + 1e-6


def test_the_order_over_lanes_stays_that_of_its_seed():
    """It depends on how far ahead deadlines are seen, and must not change between releases."""
    schedule = Schedule(
        [997, 613, 211, 101, 53, 11],
        block=32,
        seed=17,
        seed_path=("run",),
        num_lanes=4,
    )
    order = np.concatenate(list(islice(schedule.blocks(), 8)))
    assert crc32(order.astype("<i8").tobytes()) == 1152533509


def test_a_schedule_resumes_from_a_state_far_into_a_run():
    """Nothing grows with the run: after 2**42 slots, shares are as accurate as at the start."""
    shares = LinearShares(
        [Fraction(99, 100), Fraction(1, 100)], [Fraction(99, 100), Fraction(1, 100)], None
    )
    for slot in (0, 1 << 42):
        state = ScheduleState(
            slot=slot, lags=np.zeros(2, np.int64), owed=np.zeros((8, 2), np.int64)
        )
        schedule = Schedule(
            shares, block=8, seed=3, seed_path=("run",), num_lanes=8, lane_turn=8, start=state
        )
        order = np.concatenate(list(islice(schedule.blocks(), 5000)))
        counts = np.cumsum(order == 1)[7::8]
        assert np.abs(counts - np.arange(8, len(order) + 1, 8) / 100).max() < 1 + 1e-6


@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("block", [1, 12])
@pytest.mark.parametrize("lane_turn", [1, 2])
@pytest.mark.parametrize("is_ramp", [False, True])
def test_slots_do_not_depend_on_where_the_schedule_ends(num_lanes, block, lane_turn, is_ramp):
    begin = [Fraction(5, 8), Fraction(2, 8), Fraction(1, 8)]
    end = begin[::-1] if is_ramp else begin

    def slots(num_slots: int) -> tuple[np.ndarray, np.ndarray]:
        shares = LinearShares(begin, end, num_slots, ramp_slots=1200)
        owed = np.zeros((num_lanes, 3), np.int64)
        schedule = Schedule(
            shares,
            block=block,
            seed=3,
            seed_path=("chapter", 0),
            num_lanes=num_lanes,
            lane_turn=lane_turn,
            start=ScheduleState(lags=np.zeros(3, np.int64), owed=owed),
        )
        return np.concatenate(list(schedule.blocks())), schedule.now.lags

    whole, _ = slots(1200)
    for num_slots in range(12, 1200, 132):
        got, lags = slots(num_slots)
        np.testing.assert_array_equal(got, whole[:num_slots])
        due = LinearShares(begin, end, 1200).due(0, num_slots)
        np.testing.assert_array_equal(lags, due - np.bincount(got, minlength=3) * SCALE)
