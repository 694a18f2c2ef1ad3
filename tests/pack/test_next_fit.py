"""What next fit promises beyond a packer's laws: strict arrival order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Packing
from streampack.pack import make_packer
from streampack.types import LENGTH, SAMPLE, START, Packs
from tests.helpers.oracles import rows_of


def pack_all(lengths: list[int], **kwargs) -> Packs:
    packer = make_packer(Packing(method="next_fit", **kwargs))
    return Packs.join([packer.add(rows_of(lengths)), packer.flush()])


@given(lengths=st.lists(st.integers(1, 20), max_size=60))
def test_next_fit_keeps_arrival_order_and_whole_samples(lengths):
    packs = pack_all(lengths, max_seq_len=20)

    assert np.array_equal(packs.segments, rows_of(lengths))


@given(lengths=st.lists(st.integers(1, 20), max_size=60))
def test_a_pack_closes_only_where_the_next_sample_does_not_fit(lengths):
    packs = pack_all(lengths, max_seq_len=20)

    for pack in range(len(packs) - 1):
        held = packs[pack][:, LENGTH].sum()
        assert held + packs[pack + 1][0, LENGTH] > 20


@given(lengths=st.lists(st.integers(1, 20), max_size=60))
def test_with_split_gap_zero_only_short_fragments_leave_a_gap(lengths):
    packs = pack_all(lengths, max_seq_len=20, split_gap=0.0)

    segments = packs.segments
    order = segments[:, SAMPLE] * 100 + segments[:, START]
    assert (np.diff(order) > 0).all()
    for pack in range(len(packs) - 1):
        # A fragment has 20 // 8 tokens at least, so a cut can miss the gap by one.
        assert packs[pack][:, LENGTH].sum() >= 20 - 1 or packs[pack + 1][0, LENGTH] < 4


def test_a_full_pack_is_out_at_once():
    packer = make_packer(Packing(max_seq_len=10, method="next_fit"))

    assert len(packer.add(rows_of([4, 6]))) == 1
    assert packer.held[0] == 0


def test_a_pack_closes_at_buffer_samples():
    packs = pack_all([1] * 7, max_seq_len=10, buffer_samples=3)

    assert packs.ends.tolist() == [3, 6, 7]
