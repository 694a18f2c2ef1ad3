"""Every chosen token once, in the same packs, in every world."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Mixing, Order, Packing
from streampack.plan.lane_stream import LaneStream
from streampack.plan.recipe import Recipe
from streampack.types import LENGTH, SAMPLE, STREAM, TOTAL
from tests.helpers.examples import examples
from tests.helpers.planning import (
    all_packs,
    covered,
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


@examples(25, many=60)
@given(
    all_lengths=all_lengths,
    method=methods,
    unit=units,
    num_lanes=lane_counts,
    run=st.integers(1, 4),
    packer=st.sampled_from([None, "next_fit"]),
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


@pytest.mark.parametrize("method", METHODS)
def test_the_lanes_take_turns_of_lane_run_packs(method):
    r = make([np.full(4000, 16)], method, "samples", 4, 3, global_batch_size=24)
    lane_of = {}
    for lane in range(4):
        samples = LaneStream(r, 0, lane).take(0, 1000)[:, SAMPLE]
        lane_of.update(dict.fromkeys(samples.tolist(), lane))

    lanes = [lane_of[pack[0][SAMPLE]] for pack in all_packs(r, world_views(1, 24))[:600]]
    assert lanes == [q // 3 % 4 for q in range(600)]


@pytest.mark.parametrize("method", METHODS)
def test_lanes_of_which_nearly_all_is_dropped_are_bounded_by_what_is_left(method):
    lengths = [np.where(np.arange(3000) % 50, 90, 30), np.where(np.arange(900) % 9, 70, 64)]
    r = make(lengths, method, "samples", 3, 2, packing=Packing(max_seq_len=64, overflow="drop"))

    expected = all_packs(r, world_views(1, 2))
    assert [len(pieces) for pieces in covered(expected, 2)] == [60, 100]
    assert all_packs(r, world_views(3, 2)) == expected
