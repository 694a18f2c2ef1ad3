"""Randomness is a function of (seed, place): the numbers themselves are part of the contract."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.philox import random_bits
from streampack.rng import SortScratch, deal_places, permutation, shuffle_rows

seeds = st.integers(-(2**70), 2**70)
places = st.lists(st.one_of(st.integers(0, 2**40), st.text(max_size=5)), max_size=4)


@given(length=st.integers(0, 3000), seed=seeds, place=places)
def test_a_permutation_holds_every_number_once_and_is_the_same_every_time(length, seed, place):
    order = permutation(length, seed, *place)

    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(length))
    assert np.array_equal(order, permutation(length, seed, *place))


@given(length=st.integers(0, 100), more=st.integers(0, 100), seed=seeds, place=places)
def test_random_bits_only_grow_at_their_end(length, more, seed, place):
    long = random_bits(length + more, seed, *place)

    assert np.array_equal(long[:length], random_bits(length, seed, *place))


def test_the_numbers_are_those_that_states_on_disk_rely_on():
    assert random_bits(2, 17, "draw", 0).tolist() == [
        8621003463404847099,
        13341559396023055479,
    ]
    assert permutation(8, 9176, "shuffle", 1, 2).tolist() == [6, 0, 1, 7, 3, 5, 2, 4]


def test_every_number_is_equally_likely_in_every_place():
    num_orders, length = 6000, 6
    counts = np.zeros((length, length))
    for place in range(num_orders):
        counts[np.arange(length), permutation(length, 0, place)] += 1

    expected = num_orders / length
    # Chi-square with 25 degrees of freedom: above 60 once in ten thousand seeds.
    assert ((counts - expected) ** 2 / expected).sum() < 60


@given(length=st.integers(1, 600), seed=st.integers(0, 99), more=st.integers(0, 50))
def test_rows_are_shuffled_by_the_permutation_of_the_same_place(length, seed, more):
    scratch = SortScratch(length + more)  # one that served a larger block before
    rows = np.arange(2 * length).reshape(length, 2) * 7
    scratch.rows[:length] = rows
    out = np.empty((length, 2), np.int64)

    shuffle_rows(length, scratch, out, seed, "here", 3)

    assert (out == rows[permutation(length, seed, "here", 3)]).all()


@given(counts=st.lists(st.integers(0, 90), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_places_are_those_of_shuffled_items_owner_after_owner(counts, seed):
    owners = np.repeat(np.arange(len(counts)), counts)
    shuffled = owners[permutation(len(owners), seed, "here")]

    places = deal_places(np.array(counts), seed, "here")

    assert places.tolist() == np.argsort(shuffled, kind="stable").tolist()


@pytest.mark.parametrize("length", [4096, 4097, 70_000])
def test_long_permutations_are_equal_too(length):
    scratch = SortScratch(length)
    scratch.rows[:] = np.arange(length)[:, None]
    out = np.empty((length, 2), np.int64)

    shuffle_rows(length, scratch, out, 5, "here")

    assert (out[:, 0] == permutation(length, 5, "here")).all()
