"""What exact fit promises beyond a packer's laws: the best subset, the oldest first, full packs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Packing
from streampack.pack import fit_samples, make_packer
from streampack.types import LENGTH, SAMPLE, Packs
from tests.helpers import oracles
from tests.helpers.lengths import synthetic_lengths
from tests.helpers.oracles import rows_of


def samples_of(packs: Packs) -> list[list[int]]:
    return [packs[pack][:, SAMPLE].tolist() for pack in range(len(packs))]


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=11))
def test_the_subset_is_the_best_there_is_and_the_oldest_that_is_as_good(lengths):
    # Packs of less than 1,000 tokens have no tolerance: only a full pack ends the search.
    size = 401
    packer = make_packer(Packing(max_seq_len=size))

    packs = Packs.join([packer.add(rows_of(lengths)), packer.flush()])

    first = samples_of(packs)[0]
    best = lengths[0] + oracles.largest_sum(lengths[1:], size - lengths[0])
    assert sum(lengths[sample] for sample in first) == best
    newest = first[-1]
    if newest:
        without = oracles.largest_sum(lengths[1:newest], size - lengths[0])
        assert lengths[0] + without < best


@given(
    lengths=st.lists(st.integers(1, 99), min_size=1, max_size=60),
    buffer_tokens=st.integers(100, 1000),
)
def test_the_oldest_sample_left_opens_the_next_pack(lengths, buffer_tokens):
    packer = make_packer(Packing(max_seq_len=100, buffer_tokens=buffer_tokens))

    packs = samples_of(Packs.join([packer.add(rows_of(lengths)), packer.flush()]))

    waiting = set(range(len(lengths)))
    for pack in packs:
        assert pack[0] == min(waiting)
        assert pack == sorted(pack)
        waiting -= set(pack)


@pytest.mark.parametrize("max_seq_len", [2048, 8192, 32768])
@pytest.mark.parametrize("kind", ["web", "sft", "code"])
def test_the_default_packer_and_buffer_fill_999_slots_of_a_thousand(kind, max_seq_len):
    samples = np.zeros((60_000, 4), np.int64)
    samples[:, 3] = synthetic_lengths(kind, len(samples))
    rows = fit_samples(samples, max_seq_len, "split", [kind])

    packs = make_packer(Packing(max_seq_len=max_seq_len)).add(rows)

    assert packs.segments[:, LENGTH].sum() / (max_seq_len * len(packs)) >= 0.999


def test_a_gap_no_larger_than_split_gap_is_left():
    lengths = [71, 80, 80]
    # The gap is 29 tokens of 100, which is 0.29 exactly, though not in floating point.
    uncut = make_packer(Packing(max_seq_len=100, split_gap=0.29, buffer_tokens=160))
    cut = make_packer(Packing(max_seq_len=100, split_gap=0.28, buffer_tokens=160))

    assert uncut.add(rows_of(lengths)).segments[:, LENGTH].tolist() == [71]
    assert cut.add(rows_of(lengths)).segments[:, LENGTH].tolist() == [71, 29]
