"""The knapsack: LLaMA-Factory's bins, a window at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Packing
from streampack.pack import make_packer
from streampack.types import SAMPLE, Packs
from tests.helpers import oracles
from tests.helpers.examples import examples
from tests.helpers.oracles import rows_of


def samples_of(packs: Packs) -> list[list[int]]:
    return [packs[pack][:, SAMPLE].tolist() for pack in range(len(packs))]


def test_the_bins_are_those_that_llama_factory_makes():
    lengths = [41, 500, 1000, 500, 1024, 500, 2048, 40, 1023, 500, 1000]
    packer = make_packer(Packing(max_seq_len=2048, method="knapsack"))

    made = samples_of(packer.add(rows_of(lengths)))

    assert not len(packer.flush())
    bins = sorted(sorted((lengths[sample] for sample in pack), reverse=True) for pack in made)
    assert bins == [[500, 500, 500, 500, 40], [1000, 1000, 41], [1024, 1023], [2048]]


@examples(80, many=200)
@given(
    windows=st.lists(st.lists(st.integers(1, 64), max_size=40), max_size=3),
    most=st.sampled_from([None, 1, 2, 5]),
    multiple=st.sampled_from([None, 8]),
)
def test_every_window_is_packed_as_in_plain_python_and_nothing_waits(windows, most, multiple):
    packing = Packing(
        max_seq_len=64, method="knapsack", max_samples_per_pack=most, pad_to_multiple=multiple
    )
    rules = oracles.Rules(
        max_seq_len=64,
        buffer_tokens=0,
        buffer_samples=0,
        max_samples=most,
        multiple=multiple or 1,
    )
    packer = make_packer(packing)
    for lengths in windows:
        rows = rows_of(lengths)
        expected = oracles.in_rooms(oracles.knapsack, rules, rows.tolist(), final=True)
        packs = packer.add(rows)
        assert [packs[pack].tolist() for pack in range(len(packs))] == expected.packs
        assert not len(packer.buffered)
        assert packer.high_water == (0, 0)
