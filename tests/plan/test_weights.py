"""Over several epochs: exact counts, even use of the samples, and the meaning of "fixed"."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streampack.config import Mixing, Order, Packing
from streampack.plan.device_plan import DeviceView
from streampack.plan.lane_stream import LaneStream
from streampack.plan.recipe import PlanStream, Recipe
from streampack.plan.sample_order import SampleOrder
from streampack.types import SAMPLE, START, STREAM
from tests.helpers.examples import crossed, examples
from tests.helpers.planning import (
    covered,
    device_batches,
    global_batches,
    lane_samples,
    plan_stream,
    recipe,
)

METHODS = ["random", "stratified", "per_stream", "device_per_stream"]
WEIGHT = st.one_of(
    st.just({}),
    st.integers(0, 300).map(lambda percent: {"repeat": percent / 100}),
    st.integers(0, 700).map(lambda count: {"choose": count}),
)


def make(lengths: list, weights: list[dict], method: str, num_lanes: int, **mixing) -> Recipe:
    return recipe(
        lengths,
        weights=weights,
        mixing=Mixing(batching_method=method, **mixing),
        num_lanes=num_lanes,
        lane_turn=2,
        global_batch_size=4 * num_lanes,
    )


def taken(r: Recipe, epoch: int) -> list[dict]:
    """For each stream, the (pass, sample) pairs of an epoch, with their pieces."""
    packs = [pack for batch, _ in global_batches(r, epoch) for pack in batch]
    return covered(packs, len(r.streams))


@examples(12, many=40)
@given(
    nums=st.lists(st.integers(1, 500), min_size=1, max_size=3),
    weights=st.lists(WEIGHT, min_size=3, max_size=3),
    method=st.sampled_from(METHODS),
    num_lanes=st.sampled_from([1, 2, 3, 4, 7]),
)
def test_repeat_and_choose_are_exact_in_every_epoch_and_samples_are_used_evenly(
    nums, weights, method, num_lanes
):
    lengths = [np.random.default_rng(num).integers(1, 40, num) for num in nums]
    weights = [weights[0] if weights[0] else {"repeat": 1.5}, *weights[1:]][: len(nums)]
    if not any(
        w.get("repeat", 1) * n >= 1 and w.get("choose", 1)
        for w, n in zip(weights, nums, strict=True)
    ):
        return
    r = make(lengths, weights, method, num_lanes)

    seen: list[Counter] = [Counter() for _ in nums]
    keys: list[set] = [set() for _ in nums]
    for epoch in range(3):
        for number, pieces in enumerate(taken(r, epoch)):
            assert len(pieces) == r.streams[number].quota.amount
            assert not keys[number] & set(pieces), "a pass took a sample twice"
            keys[number] |= set(pieces)
            seen[number].update(sample for _, sample in pieces)
            for lane in lane_samples(r, number):
                uses = [seen[number][sample] for sample in lane]
                assert max(uses) - min(uses) <= 1


@pytest.mark.parametrize(
    ("method", "lanes_and_unit"),
    crossed(METHODS, list(product([3, 1], ["tokens", "samples"]))),
)
def test_fixed_takes_the_same_samples_in_every_epoch_and_balanced_goes_on(method, lanes_and_unit):
    num_lanes, unit = lanes_and_unit
    lengths = [np.random.default_rng(num).integers(1, 40, num) for num in (600, 500)]
    share = [{"proportion": 1}, {"proportion": 2}]

    def samples(sampling_method: str, epoch: int) -> list[set]:
        r = make(
            lengths,
            share,
            method,
            num_lanes,
            epoch_size=200 if unit == "samples" else 4000,
            sampling_method=sampling_method,
            weight_unit=unit,
        )
        return [{sample for _, sample in pieces} for pieces in taken(r, epoch)]

    assert samples("fixed", 0) == samples("fixed", 1) == samples("fixed", 2)
    for first, second in zip(samples("balanced", 0), samples("balanced", 1), strict=True):
        assert not first & second


@examples(7, many=30)
@given(
    nums=st.lists(st.integers(20, 900), min_size=1, max_size=3),
    choose=st.lists(st.integers(1, 12_000), min_size=3, max_size=3),
    method=st.sampled_from(METHODS),
    num_lanes=st.sampled_from([1, 2, 3, 4]),
    overflow=st.sampled_from(["split", "drop"]),
    block_size=st.sampled_from([None, 100]),
)
def test_by_tokens_epochs_are_the_same_by_totals_by_lengths_alone_and_one_after_the_other(
    nums, choose, method, num_lanes, overflow, block_size
):
    lengths = [np.random.default_rng(num).integers(1, 80, num) for num in nums]
    r = make(
        lengths,
        [{"choose": tokens} for tokens in choose[: len(nums)]],
        method,
        num_lanes,
        weight_unit="tokens",
    )
    packing, order = (
        Packing(max_seq_len=64, overflow=overflow),
        Order(shuffle_block_size=block_size),
    )
    r = replace(r, packing=packing, order=order)

    def with_totals(stream: PlanStream) -> PlanStream:
        shards = range(len(stream.raw_bytes))
        totals = [int(r.weigh(stream.lengths_of(shard)).sum()) for shard in shards]
        return replace(stream, shard_tokens=np.array(totals))

    by_totals = replace(r, streams=tuple(map(with_totals, r.streams)))
    for epoch in range(3):
        # A new recipe does not know where the previous epoch ended.
        alone = global_batches(replace(r), epoch)
        assert global_batches(r, epoch) == alone
        assert global_batches(replace(by_totals), epoch) == alone


def lane_uses(r: Recipe, num_epochs: int) -> list[Counter]:
    """For each lane, how often each sample of the only stream arrives in so many epochs."""
    uses = []
    for lane in range(r.num_lanes):
        uses.append(Counter())
        for epoch in range(num_epochs):
            arrivals = SampleOrder(r, lane, 0, epoch)
            while len(rows := arrivals.next()):
                uses[lane].update(rows[:, 2].tolist())
    return uses


@examples(7, many=30)
@given(
    long=st.integers(300, 1000),
    short=st.integers(4, 30),
    num_long=st.integers(5, 60),
    num_lanes=st.integers(2, 8),
    method=st.sampled_from(["random", "stratified"]),
    shuffle=st.booleans(),
    seed=st.integers(0, 99),
)
def test_by_tokens_lanes_of_long_samples_are_used_as_often_as_lanes_of_short_ones(
    long, short, num_long, num_lanes, method, shuffle, seed
):
    rng = np.random.default_rng(seed)
    # The first shards have long samples; the last ones have short ones, dozens of times as many.
    lengths = [rng.integers(long // 2, long, 64 * num_long), rng.integers(short // 2, short, 9600)]
    r = recipe(
        [np.concatenate(lengths)],
        weights=[{"proportion": 1}],  # by tokens: an epoch is one time through the stream
        mixing=Mixing(batching_method=method, weight_unit="tokens"),
        order=Order(seed=seed, shuffle=shuffle),
        num_lanes=num_lanes,
    )
    num_epochs = 3
    for uses, samples in zip(lane_uses(r, num_epochs), lane_samples(r, 0), strict=True):
        assert set(uses) == set(samples)
        assert {num_epochs - 1, num_epochs, num_epochs + 1} >= set(uses.values())


def starts(r: Recipe, num_epochs: int) -> list[np.ndarray]:
    """How often each sample of each stream begins in so many epochs."""
    uses = [np.zeros(stream.num_samples, int) for stream in r.streams]
    view = DeviceView(batch_size=r.global_batch_size)
    for epoch in range(num_epochs):
        for batch in device_batches(r, view, epoch):
            rows = batch.packs.segments[batch.packs.segments[:, START] == 0]
            for number, own in enumerate(uses):
                np.add.at(own, rows[rows[:, STREAM] == number, SAMPLE], 1)
    return uses


@pytest.mark.thorough
@examples(7, many=25)
@given(
    method=st.sampled_from(METHODS),
    num_lanes=st.sampled_from([1, 2, 3, 5, 8]),
    run=st.integers(1, 8),
    size=st.integers(1, 24),
    epoch_size=st.sampled_from([60, 150, None]),
    num_epochs=st.integers(1, 20),
)
@example(method="random", num_lanes=8, run=5, size=5, epoch_size=60, num_epochs=20)
def test_carry_uses_two_samples_of_a_stream_as_often_but_for_two(
    method, num_lanes, run, size, epoch_size, num_epochs
):
    """Lanes have equally many tokens, and packers buffer less than a lane's part."""
    if method == "per_stream":
        size = num_lanes * run
    if method == "device_per_stream":
        size = run * -(-size // run)
    r = recipe(
        [np.full(1200, 16)],
        weights=[{"proportion": 1}],
        mixing=Mixing(batching_method=method, epoch_end="carry", epoch_size=epoch_size),
        packing=Packing(max_seq_len=64, buffer_tokens=128),
        num_lanes=num_lanes,
        lane_turn=run,
        global_batch_size=min(size, 60 * 16 // 64),
    )
    if method in ("per_stream", "device_per_stream") and r.global_batch_size != size:
        return
    [uses] = starts(r, num_epochs)
    assert uses.max() - uses.min() <= 2


@examples(8, many=20)
@given(
    num=st.integers(500, 2000),
    num_lanes=st.sampled_from([2, 3, 5]),
    shard_size=st.sampled_from([64, 500, 10_000]),
    share=st.floats(0.5, 1.05),
)
def test_of_less_than_a_pass_by_tokens_samples_come_twice_only_beyond_the_smallest_lane(
    num, num_lanes, shard_size, share
):
    lengths = np.random.default_rng(num).lognormal(4, 1, num).astype(np.int64) + 1
    other = np.full(num, 50)

    def with_amount(amount: int) -> Recipe:
        mixing = Mixing(weight_unit="tokens")
        weights = [{"choose": amount}, {"choose": 1000}]
        r = recipe([lengths, other], weights=weights, mixing=mixing, num_lanes=num_lanes)
        stream = plan_stream(lengths, 0, shard_size=shard_size)
        return replace(r, streams=(replace(stream, quota=r.streams[0].quota), r.streams[1]))

    lanes = [LaneStream(with_amount(1), 0, lane) for lane in range(num_lanes)]
    least = min(lane.tokens_in_pass for lane in lanes)
    r = with_amount(int(share * num_lanes * least))
    uses = Counter()
    for lane in range(num_lanes):
        arrivals = SampleOrder(r, lane, 0)
        while len(rows := arrivals.next()):
            uses.update(rows[rows[:, STREAM] == 0, SAMPLE].tolist())
    twice = sum(times > 1 for times in uses.values())
    assert share > 1 or twice == 0
