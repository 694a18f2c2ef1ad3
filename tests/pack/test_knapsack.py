"""The knapsack: LLaMA-Factory's bins, a window at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Packing
from streampack.pack import make_packer
from streampack.types import SAMPLE, Packs
from tests.helpers import oracles
from tests.helpers.oracles import rows_of


def samples_of(packs: Packs) -> list[list[int]]:
    return [packs[pack][:, SAMPLE].tolist() for pack in range(len(packs))]


def test_the_bins_are_those_that_llama_factory_makes():
    lengths = [41, 500, 1000, 500, 1024, 500, 2048, 40, 1023, 500, 1000]
    packer = make_packer(Packing(max_seq_len=2048, method="knapsack"))

    made = samples_of(Packs.join([packer.add(rows_of(lengths)), packer.flush()]))

    bins = sorted(sorted((lengths[sample] for sample in pack), reverse=True) for pack in made)
    assert bins == [[500, 500, 500, 500, 40], [1000, 1000, 41], [1024, 1023], [2048]]


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
        bins = [[window[item] for item in found] for found in oracles.greedy_knapsack(window, 20)]
        here, made = made[: len(bins)], made[len(bins) :]
        found = [sorted((lengths[sample] for sample in pack), reverse=True) for pack in here]
        assert sorted(found) == sorted(bins)
        longest = [min(pack, key=lambda sample: (-lengths[sample], sample)) for pack in here]
        assert longest == sorted(longest)
        assert all(pack == sorted(pack) for pack in here)
        begin = end
    assert not made
