"""Endless runs use the samples of a small stream equally often."""

from __future__ import annotations

from itertools import islice
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streampack import rng
from streampack.config import Mixing, Order, Packing
from streampack.config.packing import Method
from streampack.order import shuffle
from streampack.pack import best_fit_decreasing
from streampack.plan import sample_order
from streampack.plan.device_plan import DeviceView
from streampack.plan.lane_stream import LaneStream
from streampack.plan.pack_queue import PackQueue
from streampack.plan.recipe import Recipe
from streampack.types import LENGTH, PASS, SAMPLE, START, STREAM
from tests.helpers.examples import crossed, examples
from tests.helpers.planning import device_batches, queue_packs, recipe

METHODS = ["random", "stratified", "per_stream", "device_per_stream"]
PACKERS: list[str | None] = [None, *get_args(Method)]


def lengths_of(kind: str, number: int, size: int) -> np.ndarray:
    """Lengths of so many samples: most or all of them short, nearly a pack, or a few passes."""
    rng = np.random.default_rng(number)
    most = {"mixed": 2 * size, "short": max(size // 8, 1), "long": size, "tiny": 3}[kind]
    least = {"long": size // 2 + 1}.get(kind, 1)
    return rng.integers(least, most + 1, number)


def packing_of(packer: str | None, size: int, extra: dict | None = None, **options) -> Packing:
    """A packing with those extra options that its packer supports."""
    short = size // 4 if packer == "two_tiers" else None
    more = dict(extra or {})
    if packer in ("concat", "two_tiers"):
        more.pop("max_samples_per_pack", None)
    return Packing(max_seq_len=size, method=packer, short_seq_len=short, **more, **options)


EXTRA = [
    {},
    {"max_samples_per_pack": 3},
    {"pad_to_multiple": 4},
    {"buffer_samples": 50},
]


def most_apart(r: Recipe, lane: int, queue: int, num_packs: int) -> int:
    """The largest difference between the uses of two samples of a stream, after any pack."""
    owns = {}
    for number in r.streams_in(queue):
        stream = LaneStream(r, number, lane)
        if not stream.is_empty and stream.is_used:
            extents, shares = r.assignment(number)
            own = extents[0] if shares is None else extents[lane]
            firsts = r.streams[number].first_sample[own.shards] + own.firsts
            owns[number] = np.concatenate(
                [np.arange(a, a + n) for a, n in zip(firsts, own.counts, strict=True)]
            )
    uses = {number: np.zeros(r.streams[number].num_samples, int) for number in owns}
    most = 0
    for pack in islice(queue_packs(PackQueue(r, lane, queue, 0)), num_packs):
        for row in pack:
            if row[START] == 0:
                uses[row[STREAM]][row[SAMPLE]] += 1
        for number in {row[STREAM] for row in pack}:
            own = uses[number][owns[number]]
            most = max(most, int(own.max() - own.min()))
    return most


@pytest.mark.thorough
@pytest.mark.parametrize("most", [10, pytest.param(150, marks=pytest.mark.slow)])
def test_the_uses_of_two_samples_differ_by_at_most_2_in_each_lane(most):
    @examples(most)
    @given(
        packer=st.sampled_from(PACKERS),
        method=st.sampled_from(METHODS),
        num_lanes=st.sampled_from([1, 2, 3]),
        number=st.sampled_from([2, 3, 5, 17, 40, 150, 400, 1300]),
        kind=st.sampled_from(["mixed", "short", "long", "tiny"]),
        size=st.sampled_from([64, 512]),
        pack_shuffle=st.sampled_from([None, 0, 10]),
        epoch_size=st.sampled_from([None, 700]),
        overflow=st.sampled_from(["split", "truncate"]),
        extra=st.sampled_from(EXTRA),
    )
    def law(
        packer, method, num_lanes, number, kind, size, pack_shuffle, epoch_size, overflow, extra
    ):
        num_lanes = min(num_lanes, max(number // 100, 1))  # all lanes share a smaller stream
        r = recipe(
            [lengths_of(kind, number, size)],
            packing=packing_of(packer, size, extra, overflow=overflow),
            mixing=Mixing(batching_method=method, epoch_end="carry", epoch_size=epoch_size),
            order=Order(seed=3, pack_shuffle=pack_shuffle),
            num_lanes=num_lanes,
            global_batch_size=1,
        )
        for lane in range(num_lanes):
            assert most_apart(r, lane, 0, 120) <= 2

    law()


@pytest.mark.thorough
@pytest.mark.parametrize("most", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_with_several_streams_they_differ_by_at_most_3(most):
    @examples(most)
    @given(
        packer=st.sampled_from(PACKERS),
        method=st.sampled_from(METHODS),
        unit=st.sampled_from(["samples", "tokens"]),
        numbers=st.lists(st.sampled_from([2, 5, 20, 150, 3000]), min_size=2, max_size=3),
        kinds=st.lists(st.sampled_from(["mixed", "short", "long", "tiny"]), min_size=3, max_size=3),
        shares=st.sampled_from([(1, 9, 4), (1, 1, 1), (50, 1, 3)]),
        pack_shuffle=st.sampled_from([None, 0, 10]),
    )
    @example(
        packer=None, method="random", unit="samples", numbers=[20, 3000], kinds=["short"] * 3,
        shares=(1, 9, 4), pack_shuffle=None,
    )  # fmt: skip
    def law(packer, method, unit, numbers, kinds, shares, pack_shuffle):
        size = 128
        r = recipe(
            [lengths_of(kind, n, size) for kind, n in zip(kinds, numbers, strict=False)],
            weights=[{"proportion": share} for share, _ in zip(shares, numbers, strict=False)],
            packing=packing_of(packer, size),
            mixing=Mixing(
                batching_method=method, weight_unit=unit, epoch_end="carry", epoch_size=20_000
            ),
            order=Order(seed=3, pack_shuffle=pack_shuffle),
            global_batch_size=1,
        )
        for queue in range(r.num_queues):
            assert most_apart(r, 0, queue, 150) <= (3 if r.is_mixed else 2)

    law()


@pytest.mark.thorough
@examples(15, many=60)
@given(
    packer=st.sampled_from(PACKERS),
    method=st.sampled_from(METHODS),
    num_lanes=st.sampled_from([2, 3, 8]),
    number=st.sampled_from([2, 3, 20, 150]),
    kind=st.sampled_from(["mixed", "short", "long"]),
)
def test_a_lane_of_a_stream_that_all_share_has_two_passes_in_progress_at_most(
    packer, method, num_lanes, number, kind
):
    """A lane gets different samples in each pass; uses are only even over all lanes together."""
    r = recipe(
        [lengths_of(kind, number, 64)],
        packing=packing_of(packer, 64),
        mixing=Mixing(batching_method=method, epoch_end="carry", epoch_size=2000),
        num_lanes=num_lanes,
        global_batch_size=num_lanes,
    )
    rows = LaneStream(r, 0, 1).take(0, 3000)
    left = {(row[PASS], row[SAMPLE]) for row in rows.tolist()}
    newest = 0
    for pack in islice(queue_packs(PackQueue(r, 1, 0, 0)), 60):
        delivered = {(row[PASS], row[SAMPLE]) for row in pack if row[START] == 0}
        left -= delivered
        newest = max([newest, *(number for number, _ in delivered)])
        assert newest - min(left)[0] <= 1


@pytest.mark.parametrize(
    ("number", "most"), [(40, 0.13), (360, 0.09), (2000, 0.06), (10_000, 0.025)]
)
def test_an_epoch_of_one_pass_misses_few_samples(number, most):
    lengths = np.exp(np.random.default_rng(0).normal(np.log(90), 0.86, number))
    r = recipe(
        [np.clip(lengths, 1, 4000).astype(int)],
        packing=Packing(max_seq_len=4096),
        mixing=Mixing(epoch_end="carry"),
        global_batch_size=1,
    )
    for epoch in range(2):
        batches = device_batches(r, DeviceView(batch_size=1), epoch)
        seen = np.unique(np.concatenate([batch.packs.segments[:, SAMPLE] for batch in batches]))
        assert 1 - len(seen) / number <= most


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize(("number", "length"), [(3, 1280), (3, 100), (40, 100)])
def test_a_packer_buffers_three_passes_or_a_pack_at_most(packer, number, length):
    r = recipe(
        [np.full(number, length)],
        packing=packing_of(packer, 2048),
        mixing=Mixing(epoch_end="carry", epoch_size=200),
        global_batch_size=1,
    )
    queue = PackQueue(r, 0, 0, 0)
    assert len(list(islice(queue_packs(queue), 300))) == 300
    assert queue.windows.packer.high_water[0] <= max(3 * number * length, 2048)


@pytest.mark.parametrize("packer", [None, "two_tiers"])
def test_packs_of_whole_samples_stay_as_full(packer):
    rng = np.random.default_rng(0)
    r = recipe(
        [rng.integers(50, 400, 360)],
        packing=packing_of(packer, 512),
        mixing=Mixing(epoch_end="carry"),
        global_batch_size=1,
    )
    packs = list(islice(queue_packs(PackQueue(r, 0, 0, 0)), 1600))
    with_larger_passes = {None: 0.987, "two_tiers": 0.972}[packer]
    tokens = sum(row[LENGTH] for pack in packs for row in pack)
    assert tokens / (512 * len(packs)) > with_larger_passes - 0.005


@pytest.mark.thorough
@pytest.mark.parametrize("num_lanes", [1, 4])
def test_lanes_drift_apart_by_their_unequal_tokens_alone(num_lanes):
    lengths = np.exp(np.random.default_rng(0).normal(np.log(90), 0.86, 2000)).astype(int) + 1
    r = recipe(
        [lengths],
        packing=Packing(max_seq_len=4096),
        mixing=Mixing(epoch_end="carry"),
        num_lanes=num_lanes,
        global_batch_size=num_lanes,
    )
    uses, num_epochs = np.zeros(2000, int), 30
    for epoch in range(num_epochs):
        for batch in device_batches(r, DeviceView(batch_size=num_lanes), epoch):
            rows = batch.packs.segments
            np.add.at(uses, rows[rows[:, START] == 0, SAMPLE], 1)
    # Lanes serve equally many packs, and so take as many tokens of passes of unequal length.
    tokens = np.array([LaneStream(r, 0, lane).tokens_in_pass for lane in range(num_lanes)])
    drift = num_epochs * (tokens.mean() / tokens.min() - tokens.mean() / tokens.max())
    assert (drift > 0.5) == (num_lanes > 1)
    assert drift - 2 <= uses.max() - uses.min() <= 2 + drift


def num_calls(
    monkeypatch: pytest.MonkeyPatch, size: int, unit: str, num_lanes: int, **order
) -> int:
    """Calls of kernels, random draws and packings of windows that planning an epoch takes.

    The epoch has a stream of 3,000 samples, and one of `size` that is a hundredth of the mixture.
    """
    some = np.random.default_rng(size)
    lengths = [some.integers(20, 400, number) for number in (3000, size) if number]
    r = recipe(
        lengths,
        weights=[{"proportion": 0.99}, {"proportion": 0.01}][: len(lengths)],
        mixing=Mixing(weight_unit=unit),
        packing=Packing(max_seq_len=512, buffer_tokens=4096),
        order=Order(**{"seed": 5, "pack_shuffle": 0, **order}),
        num_lanes=num_lanes,
        global_batch_size=4 * num_lanes,
    )
    calls = 0

    def counted(function):
        def call(*args):
            nonlocal calls
            calls += 1
            return function(*args)

        return call

    with monkeypatch.context() as patch:
        for module, name in (
            (shuffle, "permutation"),
            (shuffle, "shuffle_rows"),
            (shuffle, "shuffle_blocks"),
            (shuffle, "random_keys"),
            (rng, "random_bits"),
            (sample_order, "draw_known"),
            (best_fit_decreasing, "place_segments"),
        ):
            patch.setattr(module, name, counted(getattr(module, name)))
        device_batches(r, DeviceView(batch_size=r.global_batch_size))
    return calls


@pytest.mark.thorough
@pytest.mark.parametrize(("unit", "num_lanes"), crossed(["samples", "tokens"], [30, 1]))
def test_tiny_streams_and_blocks_are_planned_in_few_calls(unit, num_lanes, monkeypatch):
    """A call for each pass or block would be hundreds a lane."""
    least = num_calls(monkeypatch, 0, unit, num_lanes)
    most = 3 * least + 8 * num_lanes
    for size in (1, 3, 20, 50):
        assert num_calls(monkeypatch, size, unit, num_lanes) <= most
    for block in (1, 2, 3):
        for window in (0, None):
            order = {"shuffle_block_size": block, "pack_shuffle": window}
            assert num_calls(monkeypatch, 0, unit, num_lanes, **order) <= most
