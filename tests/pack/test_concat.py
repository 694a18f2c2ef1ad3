"""Concat: every pack is full, and what the cuts leave goes on in the next."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Packing
from streampack.pack import fit_samples, make_packer
from streampack.types import LENGTH, SAMPLE, START, TOTAL, Packs
from tests.helpers.oracles import rows_of


def pack_all(rows: np.ndarray, **options) -> Packs:
    packer = make_packer(Packing(method="concat", **options))
    return Packs.join([packer.add(rows), packer.flush()])


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_every_pack_but_the_last_is_full_and_order_is_arrival(lengths):
    packs = pack_all(rows_of(lengths), max_seq_len=20)

    filled = [packs[pack][:, LENGTH].sum() for pack in range(len(packs))]
    assert filled[:-1] == [20] * (len(packs) - 1)
    places = packs.segments[:, SAMPLE] * 1000 + packs.segments[:, START]
    assert (np.diff(places) > 0).all()


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=30))
def test_pieces_of_a_long_sample_that_meet_in_a_pack_are_one_segment(lengths):
    samples = np.array([[0, 0, s, n] for s, n in enumerate(lengths)])
    packs = pack_all(fit_samples(samples, 20, "split", ["a"]), max_seq_len=20)

    for pack in range(len(packs)):
        assert len(np.unique(packs[pack][:, SAMPLE])) == len(packs[pack])
    assert packs.segments[:, LENGTH].sum() == sum(lengths)


@given(lengths=st.lists(st.integers(1, 32), min_size=1, max_size=40))
def test_with_pad_to_multiple_packs_are_full_of_rooms(lengths):
    packs = pack_all(rows_of(lengths), max_seq_len=32, pad_to_multiple=8)

    rooms = -(-packs.segments[:, LENGTH] // 8) * 8
    inner = packs.segments[:, START] + packs.segments[:, LENGTH] < packs.segments[:, TOTAL]
    ends = np.cumsum(rooms)[packs.ends - 1]
    assert (np.diff(ends, prepend=0)[:-1] == 32).all()
    assert not (packs.segments[inner, LENGTH] % 8).any()
