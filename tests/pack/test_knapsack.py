"""The knapsack: LLaMA-Factory's bins, a window at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Packing
from streampack.errors import DataError
from streampack.pack import make_packer
from streampack.pack.knapsack import greedy_knapsack
from streampack.types import SAMPLE, Packs
from tests.helpers import oracles
from tests.helpers.oracles import rows_of


def samples_of(packs: Packs) -> list[list[int]]:
    return [packs[pack][:, SAMPLE].tolist() for pack in range(len(packs))]


def test_the_bins_are_those_that_llama_factory_makes():
    lengths = [41, 500, 1000, 500, 1024, 500, 2048, 40, 1023, 500, 1000]

    bins = greedy_knapsack(lengths, 2048)

    assert bins == [[2048], [1024, 1023], [1000, 1000, 41], [500, 500, 500, 500, 40]]


@pytest.mark.parametrize("bad", [9, -1])
def test_an_item_that_no_bin_can_hold_is_an_error_and_not_an_endless_loop(bad):
    with pytest.raises(DataError, match=rf"item 1 has length {bad}, but a bin holds 0 to 8; drop"):
        greedy_knapsack([3, bad, 4], 8)


@given(lengths=st.lists(st.integers(0, 30), max_size=60), capacity=st.integers(30, 60))
def test_each_bin_takes_the_longest_that_fits_until_none_does(lengths, capacity):
    expected = [
        [lengths[item] for item in found] for found in oracles.greedy_knapsack(lengths, capacity)
    ]

    assert greedy_knapsack(lengths, capacity) == expected


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=80), packs=st.integers(1, 5))
def test_packs_of_a_window_are_the_bins_in_the_order_of_their_longest(lengths, packs):
    packing = Packing(max_seq_len=20, method="knapsack", buffer_tokens=20 * packs)
    packer = make_packer(packing)

    made = samples_of(Packs.join([packer.add(rows_of(lengths)), packer.flush()]))

    begin = 0
    while begin < len(lengths):
        end = begin
        while end < len(lengths) and sum(lengths[begin : end + 1]) <= 20 * packs:
            end += 1
        window = lengths[begin:end]
        bins = greedy_knapsack(window, 20)
        here, made = made[: len(bins)], made[len(bins) :]
        found = [sorted((lengths[sample] for sample in pack), reverse=True) for pack in here]
        assert sorted(found) == sorted(bins)
        longest = [min(pack, key=lambda sample: (-lengths[sample], sample)) for pack in here]
        assert longest == sorted(longest)
        assert all(pack == sorted(pack) for pack in here)
        begin = end
    assert not made
