"""Lanes: every sample in one lane, about equal bytes in each, neighbours together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.order.lanes import Extents, assign_to_lanes, stretch_of_lane

shards = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=12
).filter(lambda shards: sum(samples for samples, _ in shards) > 0)


def samples_of(extents: Extents, first_sample: np.ndarray) -> list[int]:
    """Sample numbers that some extents hold, in their order."""
    return [
        int(first_sample[shard] + first + i)
        for shard, first, count in zip(extents.shards, extents.firsts, extents.counts, strict=True)
        for i in range(count)
    ]


def dealt(shards: list[tuple[int, int]], num_lanes: int, seed: int) -> list[list[int]]:
    samples = np.array([samples for samples, _ in shards])
    raw_bytes = np.array([samples * size for samples, size in shards])
    first_sample = np.append(0, np.cumsum(samples))
    lanes = assign_to_lanes(samples, raw_bytes, num_lanes, seed, (0,))
    assert len(lanes) == num_lanes
    return [samples_of(lane, first_sample) for lane in lanes]


@given(shards=shards, num_lanes=st.integers(1, 9), seed=st.integers(-1, 99))
def test_every_sample_is_dealt_to_one_lane_once(shards, num_lanes, seed):
    lanes = dealt(shards, num_lanes, seed)

    total = sum(samples for samples, _ in shards)
    assert sorted(sample for lane in lanes for sample in lane) == list(range(total))


@given(shards=shards, num_lanes=st.integers(1, 9), seed=st.integers(-1, 99))
def test_lanes_hold_equal_bytes_give_or_take_one_sample(shards, num_lanes, seed):
    lanes = dealt(shards, num_lanes, seed)

    size_of = np.repeat([size for _, size in shards], [samples for samples, _ in shards])
    for lane in lanes:
        assert abs(size_of[lane].sum() - size_of.sum() / num_lanes) <= size_of.max() + 1


@given(shards=shards, num_lanes=st.integers(1, 9), seed=st.integers(0, 99))
def test_stretches_are_contiguous_so_at_most_one_shard_is_cut_between_two(shards, num_lanes, seed):
    samples = np.array([samples for samples, _ in shards])
    raw_bytes = np.array([samples * size for samples, size in shards])
    lanes = assign_to_lanes(samples, raw_bytes, num_lanes, seed, (0,))
    stretches = [
        lanes[stretch_of_lane(lane, num_lanes)] for lane in range(num_lanes)
    ]  # any order of lanes

    assert sum(len(each.shards) for each in stretches) <= len(shards) + num_lanes - 1
    for each in stretches:
        # Only the first part may begin inside a shard, only the last may end inside one.
        assert all(first == 0 for first in each.firsts[1:])
        stops = each.firsts + each.counts
        assert all(stops[i] == samples[each.shards[i]] for i in range(len(stops) - 1))


def test_stored_order_is_dealt_in_stored_order():
    assert dealt([(6, 10), (6, 10)], 3, -1) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_the_deal_differs_between_seeds_and_streams_and_not_between_calls():
    samples, raw_bytes = np.full(20, 10), np.full(20, 100)
    orders = [
        assign_to_lanes(samples, raw_bytes, 2, seed, place)[0].shards.tolist()
        for seed, place in [(1, (0,)), (1, (0,)), (2, (0,)), (1, (1,))]
    ]
    assert orders[0] == orders[1]
    assert orders[0] not in orders[2:]


@pytest.mark.parametrize("num_lanes", range(1, 65))
def test_stretches_are_a_permutation_of_the_lanes(num_lanes):
    assert sorted(stretch_of_lane(lane, num_lanes) for lane in range(num_lanes)) == list(
        range(num_lanes)
    )


@pytest.mark.parametrize(
    ("num_lanes", "num_nodes"),
    [
        *((1 << lanes, 1 << nodes) for lanes in range(7) for nodes in range(lanes + 1)),
        *((3**lanes, 3**nodes) for lanes in range(4) for nodes in range(lanes + 1)),
        *((lanes, nodes) for lanes in (6, 10, 14) for nodes in (1, 2, lanes)),
        *((12, nodes) for nodes in (1, 2, 4, 12)),
        *((lanes, nodes) for lanes in (5, 7) for nodes in (1, lanes)),
    ],
)
def test_the_lanes_of_a_node_hold_neighbouring_stretches(num_lanes, num_nodes):
    for node in range(num_nodes):
        stretches = sorted(
            stretch_of_lane(lane, num_lanes) for lane in range(node, num_lanes, num_nodes)
        )
        assert stretches == list(range(stretches[0], stretches[0] + num_lanes // num_nodes))


@given(shards=shards, first=st.integers(0, 100), count=st.integers(0, 100))
def test_a_part_of_extents_holds_just_that_part_of_their_samples(shards, first, count):
    samples = np.array([samples for samples, _ in shards])
    first_sample = np.append(0, np.cumsum(samples))
    whole = assign_to_lanes(samples, samples, 1, 5, (0,))[0]

    part = whole.between(first, first + count)
    assert samples_of(part, first_sample) == samples_of(whole, first_sample)[first : first + count]
    assert (part.counts > 0).all()
