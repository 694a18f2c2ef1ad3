"""Each batching method keeps its promise in every global batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Mixing, Order, Packing
from streampack.mix.draw import TOKEN_SCALE
from streampack.plan.recipe import Recipe
from streampack.plan.sample_order import SampleOrder
from streampack.types import STREAM
from tests.helpers.examples import examples
from tests.helpers.planning import global_batches, recipe

LENGTHS = [
    np.random.default_rng(n).integers(1, top, n) for n, top in [(3000, 60), (800, 120), (700, 64)]
]
WEIGHTS = st.lists(st.sampled_from([1, 2, 3, 5.5, 8]), min_size=3, max_size=3)


def make(method: str, weights: list, num_lanes: int, run: int, size: int, **mixing) -> Recipe:
    return recipe(
        LENGTHS,
        weights=[{"proportion": weight} for weight in weights],
        mixing=Mixing(batching_method=method, **mixing),
        order=Order(seed=5),
        num_lanes=num_lanes,
        lane_turn=run,
        global_batch_size=size,
    )


def counts_until_one_runs_out(r: Recipe, least: float) -> np.ndarray:
    """Packs of each stream in each global batch until one is padded; shape (batches, streams).

    No stream may run out in any lane before the fraction `least` of the epoch.
    """
    batches = global_batches(r)
    counts = [
        np.bincount([pack[0][STREAM] for pack in packs], minlength=len(r.streams))
        for packs, _ in takewhile(lambda each: each[1] and all(each[0]), batches)
        if len(packs) == r.global_batch_size
    ]
    assert len(counts) >= least * len(batches) - 1
    return np.array(counts)


def arriving(r: Recipe, lane: int, epoch: int) -> np.ndarray:
    """The samples of a lane in the order in which its packer receives them."""
    arrivals = SampleOrder(r, lane, 0, epoch)
    parts = []
    while len(rows := arrivals.next()):
        parts.append(rows)
    return np.concatenate(parts)


def drift(counts: np.ndarray, r: Recipe) -> np.ndarray:
    """Delivered packs minus their share, after every global batch; the same shape as `counts`."""
    shares = np.array([stream.chosen_tokens for stream in r.streams]) / r.chosen_tokens
    total = np.cumsum(counts, axis=0)
    return total - total.sum(axis=1, keepdims=True) * shares


@examples(12, many=25)
@given(
    weights=WEIGHTS,
    num_lanes=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([1, 4, 6, 12, 32]),
    unit=st.sampled_from(["samples", "tokens"]),
)
def test_stratified_is_within_one_pack_of_each_share_after_every_global_batch(
    weights, num_lanes, size, unit
):
    r = make("stratified", weights, num_lanes, 2, size, weight_unit=unit)
    counts = counts_until_one_runs_out(r, 0.6)

    assert np.abs(drift(counts, r)).max() < 1 + 1e-6


@examples(12, many=25)
@given(
    weights=WEIGHTS,
    num_lanes=st.sampled_from([1, 2, 3]),
    run=st.integers(1, 4),
    unit=st.sampled_from(["samples", "tokens"]),
)
@pytest.mark.parametrize("method", ["per_stream", "device_per_stream"])
def test_batches_of_one_stream_come_by_their_shares(method, weights, num_lanes, run, unit):
    size = num_lanes * run * 2 if method == "per_stream" else run * 6
    r = make(method, weights, num_lanes, run, size, weight_unit=unit)
    counts = counts_until_one_runs_out(r, 0.5)

    part = size if method == "per_stream" else run  # the packs that share a stream
    for packs, all_live in global_batches(r):
        for first in range(0, len(packs) * all_live, part):
            assert len({pack[0][STREAM] for pack in packs[first : first + part] if pack}) == 1
    assert np.abs(drift(counts, r)).max() < part * (1 + 1e-6)


@pytest.mark.parametrize("method", ["stratified", "per_stream", "device_per_stream"])
@pytest.mark.parametrize("num_lanes", [1, 2, 4])
def test_when_a_stream_runs_out_the_others_go_on_and_every_slot_is_served(method, num_lanes):
    """Shares come from estimated totals; with a very wrong estimate, a stream runs out early."""
    r = make(method, [1, 1, 1], num_lanes, 2, num_lanes * 4)
    wrong = replace(r.streams[0], num_tokens=20 * r.streams[0].num_tokens)
    batches = global_batches(replace(r, streams=(wrong, *r.streams[1:])))

    assert not all(live for _, live in batches)
    assert all(len(packs) == r.global_batch_size for packs, _ in batches[:-1])
    expected = global_batches(r)
    tokens = [
        sum(row[4] for packs, _ in b for p in packs for row in p) for b in (batches, expected)
    ]
    assert tokens[0] == tokens[1]


@examples(10, many=20)
@given(weights=WEIGHTS, num_lanes=st.sampled_from([1, 2, 3]), epoch=st.integers(0, 2))
def test_random_by_tokens_is_within_one_longest_sample_of_each_share_in_every_lane(
    weights, num_lanes, epoch
):
    """A lane begins as if it had drawn before: what it was behind then counts."""
    r = make("random", weights, num_lanes, 1, 4 * num_lanes, weight_unit="tokens")
    shares = np.array([stream.chosen_tokens for stream in r.streams]) / r.chosen_tokens
    longest = np.array([int(lengths.max()) for lengths in LENGTHS])

    for lane in range(num_lanes):
        first = SampleOrder(r, lane, 0, epoch)
        rows = first.next(1)
        due = np.array(first.state()[2:5]) / TOKEN_SCALE
        begin = due + np.bincount(rows[:, 0], rows[:, 3], 3) - rows[:, 3].sum() * shares
        rows = arriving(r, lane, epoch)
        got = np.cumsum((rows[:, 0, None] == np.arange(3)) * rows[:, 3, None], axis=0)
        behind = begin + got.sum(axis=1, keepdims=True) * shares - got
        # By the last samples, a stream may have run out in this lane.
        behind = np.concatenate([[begin], behind[: len(behind) * 9 // 10]])
        assert (behind >= -longest - 1e-3).all()
        assert (behind <= longest.sum() - longest + 1e-3).all()


@examples(10, many=20)
@given(
    amounts=st.lists(st.integers(1, 9), min_size=2, max_size=2),
    wrong=st.integers(5, 40),
    num_lanes=st.sampled_from([1, 2, 3]),
    epoch=st.integers(0, 2),
)
def test_random_by_tokens_the_streams_that_are_left_keep_their_shares_of_each_other(
    amounts, wrong, num_lanes, epoch
):
    """If its total was greatly overestimated, a stream runs out early."""
    rng = np.random.default_rng(7)
    lengths = [rng.integers(1, 60, 400 * amount) for amount in (3, *amounts)]
    r = recipe(lengths, mixing=Mixing(weight_unit="tokens"), num_lanes=num_lanes)
    first = replace(r.streams[0], num_tokens=wrong * r.streams[0].num_tokens)
    r = replace(r, streams=(first, *r.streams[1:]))
    left = np.array([stream.chosen_tokens for stream in r.streams[1:]])

    for lane in range(num_lanes):
        rows = arriving(r, lane, epoch)
        begin = np.flatnonzero(rows[:, 0] == 0).max() + 1
        rows = rows[begin:]
        assert len(rows) > 150
        got = np.cumsum((rows[:, 0, None] == (1, 2)) * rows[:, 3, None], axis=0)
        error = got - got.sum(axis=1, keepdims=True) * left / left.sum()
        assert np.abs(error[: len(error) * 8 // 10]).max() <= 60 + 1e-3


@pytest.mark.parametrize("method", ["random", "stratified"])
def test_an_epoch_by_tokens_holds_the_tokens_asked_for_give_or_take_a_sample_a_lane(method):
    r = recipe(
        LENGTHS,
        weights=[{"proportion": 5}, {"proportion": 2}, {"proportion": 3}],
        mixing=Mixing(batching_method=method, weight_unit="tokens", epoch_size=60_000),
        packing=Packing(max_seq_len=64),
        num_lanes=3,
        global_batch_size=12,
    )
    got = np.zeros(3, np.int64)
    for epoch in range(4):
        for packs, _ in global_batches(r, epoch):
            for pack in packs:
                for row in pack:
                    got[row[STREAM]] += row[4]
        for number, asked in enumerate([30_000, 12_000, 18_000]):
            # A sample belongs to the epoch of its first token, so there are never too few.
            assert 0 <= got[number] - (epoch + 1) * asked <= 3 * LENGTHS[number].max()
