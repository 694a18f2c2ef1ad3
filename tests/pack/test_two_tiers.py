"""Two tiers: runs of short samples up to short_seq_len, long samples around them, no cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Packing
from streampack.errors import ConfigError
from streampack.pack import fit_samples, make_packer
from streampack.types import LENGTH, SAMPLE, Packs
from tests.helpers.examples import examples
from tests.helpers.lengths import synthetic_lengths
from tests.helpers.oracles import rows_of


def packing_of(**options) -> Packing:
    return Packing(**{"max_seq_len": 64, "method": "two_tiers", "short_seq_len": 16, **options})


def pack_all(packing: Packing, lengths) -> Packs:
    packer = make_packer(packing)
    return Packs.join([packer.add(rows_of(lengths)), packer.flush()])


@examples(40, many=100)
@given(lengths=st.lists(st.integers(1, 64) | st.integers(1, 16), min_size=1, max_size=200))
def test_the_samples_of_a_block_are_neighbours_of_at_most_short_seq_len_tokens(lengths):
    packs = pack_all(packing_of(), lengths)

    assert sorted(packs.segments[:, SAMPLE].tolist()) == list(range(len(lengths)))
    for pack in range(len(packs)):
        found = packs[pack][:, LENGTH]
        longs, shorts = found[found > 16], found[found <= 16]
        assert found.tolist() == [*longs, *shorts]
        # The fewest runs of neighbours are found by filling up from the left.
        num_blocks, filled = 0, 16
        for length in shorts.tolist():
            num_blocks, filled = (
                (num_blocks, filled + length) if filled + length <= 16 else (num_blocks + 1, length)
            )
        assert num_blocks <= -(-(64 - longs.sum()) // 16)


@pytest.mark.parametrize("kind", ["web", "code", "long", "sft"])
@pytest.mark.parametrize(("size", "short"), [(8192, 1024), (32_768, 4096)])
def test_windows_of_1024_samples_fill_rows(kind, size, short):
    samples = np.zeros((30_000, 4), np.int64)
    samples[:, 3] = synthetic_lengths(kind, len(samples))
    rows = fit_samples(samples, size, "split", [kind])
    packer = make_packer(packing_of(max_seq_len=size, short_seq_len=short))

    packs = Packs.join(
        [packer.add(rows[begin : begin + 1024]) for begin in range(0, len(rows), 1024)]
    )

    assert packs.segments[:, LENGTH].sum() / (size * len(packs)) >= 0.998


@pytest.mark.parametrize(("size", "options"), [(1, {}), (8, {"pad_to_multiple": 8})])
def test_where_no_block_is_shorter_than_a_pack_another_method_is_the_way_out(size, options):
    with pytest.raises(ConfigError, match="raise max_seq_len, or choose another method"):
        packing_of(max_seq_len=size, short_seq_len=size, **options)
