"""Integers split into integer parts: nothing is lost, shrinks or is far from its share."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.mix.apportion import apportion, largest_remainders, scaled_shares

sizes = st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any)


@given(total=st.integers(0, 10**9), sizes=sizes)
def test_parts_lose_nothing_and_whole_rounds_are_exact(total, sizes):
    counts = apportion(total, sizes)

    assert sum(counts) == total
    assert apportion(total * sum(sizes), sizes) == [total * size for size in sizes]
    assert all(count == 0 for count, size in zip(counts, sizes, strict=True) if size == 0)


@given(sizes=sizes, start=st.integers(0, 500))
def test_no_part_shrinks_as_the_total_grows_and_each_step_moves_one_part_by_one(sizes, start):
    every = np.array([apportion(total, sizes) for total in range(start, start + 120)])

    steps = np.diff(every, axis=0)
    assert steps.min() >= 0
    assert (steps.sum(axis=1) == 1).all()


@given(sizes=sizes, epochs=st.integers(1, 5), amount=st.integers(0, 300))
def test_in_each_part_two_of_its_samples_are_taken_equally_often_give_or_take_one(
    sizes, epochs, amount
):
    # apportion(total)[l] elements of an endless cycle through sizes[l] samples.
    rounds = epochs * amount // sum(sizes)
    for count, size in zip(apportion(epochs * amount, sizes), sizes, strict=True):
        assert rounds * size <= count <= (rounds + 1) * size


@given(total=st.integers(0, 10**6), weights=sizes)
def test_largest_remainders_are_whole_within_one_of_the_share_and_nothing_for_nothing(
    total, weights
):
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    counts = largest_remainders(total, shares)

    assert sum(counts) == total
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - total * share) < 1
        assert count == 0 or share > 0


@given(
    amounts=st.lists(st.integers(0, 10**15), min_size=1, max_size=8).filter(any),
    scale=st.sampled_from([1 << 16, 1 << 30, 1 << 32]),
)
def test_scaled_shares_sum_to_the_scale_and_keep_the_smallest_stream(amounts, scale):
    shares = scaled_shares(amounts, scale)

    assert shares.dtype == np.int64
    assert int(shares.sum()) == scale
    assert [share > 0 for share in shares.tolist()] == [amount > 0 for amount in amounts]
    for share, amount in zip(shares.tolist(), amounts, strict=True):
        assert abs(share - Fraction(amount * scale, sum(amounts))) < 1 + len(amounts)


def test_amounts_beyond_numpys_integers_keep_their_shares():
    assert scaled_shares([10**40, 3 * 10**40, 1], 8).tolist() == [2, 5, 1]
