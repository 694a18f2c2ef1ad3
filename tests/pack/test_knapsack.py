"""The knapsack: LLaMA-Factory's bins, a window at a time."""

from __future__ import annotations

from streampack.config import Packing
from streampack.pack import make_packer
from streampack.types import SAMPLE, Packs
from tests.helpers.oracles import rows_of


def samples_of(packs: Packs) -> list[list[int]]:
    return [packs[pack][:, SAMPLE].tolist() for pack in range(len(packs))]


def test_the_bins_are_those_that_llama_factory_makes():
    lengths = [41, 500, 1000, 500, 1024, 500, 2048, 40, 1023, 500, 1000]
    packer = make_packer(Packing(max_seq_len=2048, method="knapsack"))

    made = samples_of(Packs.join([packer.add(rows_of(lengths)), packer.flush()]))

    bins = sorted(sorted((lengths[sample] for sample in pack), reverse=True) for pack in made)
    assert bins == [[500, 500, 500, 500, 40], [1000, 1000, 41], [1024, 1023], [2048]]
