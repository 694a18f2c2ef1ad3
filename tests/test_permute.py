"""Buckets give the very permutations that sorting gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import _permute
from streampack._permute import Scratch, deal_places, shuffle_rows
from streampack.rng import permutation


@given(length=st.integers(1, 600), seed=st.integers(0, 99), more=st.integers(0, 50))
def test_rows_are_shuffled_by_the_permutation_of_the_same_place(length, seed, more):
    scratch = Scratch(length + more)  # one that served a larger block before
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
    scratch = Scratch(length)
    scratch.rows[:] = np.arange(length)[:, None]
    out = np.empty((length, 2), np.int64)

    shuffle_rows(length, scratch, out, 5, "here")

    assert (out[:, 0] == permutation(length, 5, "here")).all()


def test_more_keys_than_buckets_share_them():
    bits = np.random.default_rng(0).integers(0, 2**63, 5000).astype(np.uint64) * np.uint64(2)
    keys = np.empty(5000, np.uint64)

    _permute._sort(bits, 13, keys, np.empty(16, np.int32))

    low = np.uint64(2**13 - 1)
    assert keys.tolist() == sorted((bits & ~low | np.arange(5000, dtype=np.uint64)).tolist())
