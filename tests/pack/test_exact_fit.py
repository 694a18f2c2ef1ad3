"""What exact fit promises beyond a packer's laws: the best subset, the oldest first, full packs."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Packing
from streampack.pack import fit_samples, make_packer
from streampack.report.packers import synthetic_lengths
from streampack.types import LENGTH, SAMPLE, Packs
from tests.helpers import oracles
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


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=10), most=st.integers(1, 5))
def test_of_at_most_so_many_samples_the_best_subset_is_taken(lengths, most):
    size = 401
    packer = make_packer(Packing(max_seq_len=size, max_samples_per_pack=most))

    packs = Packs.join([packer.add(rows_of(lengths)), packer.flush()])

    left = size - lengths[0]
    best = max(
        sum(some)
        for count in range(most)
        for some in combinations(lengths[1:], count)
        if sum(some) <= left
    )
    assert sum(lengths[sample] for sample in samples_of(packs)[0]) == lengths[0] + best


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


@given(
    lengths=st.lists(st.integers(1, 100), max_size=60),
    full=st.lists(st.integers(0, 60), max_size=10),
    split_gap=st.sampled_from([None, 0.0, 0.1]),
)
def test_full_samples_pass_through_and_change_no_other_pack(lengths, full, split_gap):
    packing = Packing(max_seq_len=100, buffer_tokens=300, split_gap=split_gap)
    rows = rows_of([min(length, 99) for length in lengths])
    places = sorted(min(place, len(rows)) for place in full)
    extra = rows_of([100] * len(places))
    extra[:, SAMPLE] += 1000
    plain, mixed = make_packer(packing), make_packer(packing)

    expected = samples_of(Packs.join([plain.add(rows), plain.flush()]))
    found = samples_of(
        Packs.join([mixed.add(np.insert(rows, places, extra, axis=0)), mixed.flush()])
    )

    assert [pack for pack in found if pack[0] < 1000] == expected
    assert [pack for pack in found if pack[0] >= 1000] == [[s] for s in extra[:, SAMPLE].tolist()]


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
