"""What next fit and concat promise beyond a packer's laws: strict arrival order, and full packs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Packing
from streampack.pack import fit_samples, make_packer
from streampack.types import LENGTH, SAMPLE, START, Packs
from tests.helpers.oracles import rows_of


def packed(method: str, rows: np.ndarray, **options) -> Packs:
    packer = make_packer(Packing(method=method, **options))
    return Packs.join([packer.add(rows), packer.flush()])


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_with_concat_every_pack_but_the_last_is_full_and_order_is_arrival(lengths):
    packs = packed("concat", rows_of(lengths), max_seq_len=20)

    filled = [packs[pack][:, LENGTH].sum() for pack in range(len(packs))]
    assert filled[:-1] == [20] * (len(packs) - 1)
    places = packs.segments[:, SAMPLE] * 1000 + packs.segments[:, START]
    assert (np.diff(places) > 0).all()


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=30))
def test_pieces_of_a_long_sample_that_meet_in_a_pack_are_one_segment(lengths):
    samples = np.array([[0, 0, s, n] for s, n in enumerate(lengths)])
    packs = packed("concat", fit_samples(samples, 20, "split", ["a"]), max_seq_len=20)

    for pack in range(len(packs)):
        assert len(np.unique(packs[pack][:, SAMPLE])) == len(packs[pack])
    assert packs.segments[:, LENGTH].sum() == sum(lengths)
