"""Summaries of lengths count every sample once, and quantiles are lengths that occur."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.report.lengths import histogram_table, length_quantiles

some_lengths = st.lists(st.integers(1, 2**40), min_size=1, max_size=50).map(np.array)


@given(lengths=some_lengths)
def test_quantiles_are_lengths_that_occur_and_they_rise(lengths):
    quantiles = length_quantiles(lengths)
    mean = quantiles.pop("mean")

    assert list(quantiles.values()) == sorted(quantiles.values())
    assert set(quantiles.values()) <= set(lengths.tolist())
    assert (quantiles["least"], quantiles["most"]) == (lengths.min(), lengths.max())
    assert np.isclose(mean, lengths.mean())


@given(lengths=some_lengths)
def test_every_sample_is_counted_once_between_the_powers_of_two_around_it(lengths):
    table = histogram_table(lengths)

    ranges = [text.replace(",", "").split(" - ") for text in table.columns[0].cells]
    counts = [int(text.replace(",", "")) for text in table.columns[1].cells]
    expected = [int(((lengths >= int(low)) & (lengths <= int(high))).sum()) for low, high in ranges]
    assert counts == expected
    assert sum(counts) == len(lengths)
