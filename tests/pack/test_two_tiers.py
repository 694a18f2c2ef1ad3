"""Two tiers: runs of short samples up to short_seq_len, long samples around them, no cuts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Packing
from streampack.pack import make_packer
from streampack.types import LENGTH, Packs
from tests.helpers.examples import examples
from tests.helpers.lengths import synthetic_lengths
from tests.helpers.oracles import rows_of


def packing_of(**options) -> Packing:
    return Packing(**{"max_seq_len": 64, "method": "two_tiers", "short_seq_len": 16, **options})


def pack_all(packing: Packing, lengths) -> Packs:
    packer = make_packer(packing)
    return Packs.join([packer.add(rows_of(lengths)), packer.flush()])


@examples(100)
@given(lengths=st.lists(st.integers(1, 16), min_size=200, max_size=300))
def test_a_block_is_a_run_of_shorts_of_at_most_short_seq_len(lengths):
    """The blocks of rows of shorts alone are found again by filling up from the left."""
    packs = pack_all(packing_of(), lengths)

    for pack in range(len(packs)):
        blocks, filled = 1, 0
        for length in packs[pack][:, LENGTH].tolist():
            blocks, filled = (
                (blocks, filled + length) if filled + length <= 16 else (blocks + 1, length)
            )
        # Four blocks to a row, and one more of what filled the gap.
        assert blocks <= 5


@pytest.mark.parametrize(("kind", "least"), [("web", 0.998), ("long", 0.998), ("sft", 0.998)])
def test_long_rows_are_as_full_as_shorts_can_make_them(kind, least):
    lengths = synthetic_lengths(kind, 30_000).clip(max=32_768)
    packing = Packing(max_seq_len=32_768, method="two_tiers", short_seq_len=4096)

    packs = make_packer(packing).add(rows_of(lengths))

    assert packs.segments[:, LENGTH].sum() / (32_768 * len(packs)) >= least
