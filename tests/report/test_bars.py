"""Packs drawn for a terminal, with a colour for each stream."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.report.bars import colour, pack_lines

bar_of_at_most_64 = (
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 20)), min_size=1, max_size=12)
    .filter(lambda bar: sum(length for _, length in bar) <= 64)
    .map(lambda bar: np.array(bar, np.int64))
)


@given(bars=st.lists(bar_of_at_most_64, min_size=1, max_size=5), width=st.integers(8, 100))
def test_a_bar_is_drawn_as_long_as_its_pack_is_full(bars, width):
    lines = pack_lines(bars, row_tokens=64, width=width).plain.splitlines()

    assert len(lines) == len(bars)
    for line, bar in zip(lines, bars, strict=True):
        drawn, note = line[:width], line[width:]
        assert abs(len(drawn.rstrip("·")) - bar[:, 1].sum() * width / 64) <= 0.5
        assert note.split()[0] == str(len(bar))


def test_a_segment_has_its_streams_colour_and_ends_in_a_notch():
    (bar,) = [np.array([[0, 4], [3, 2]])]

    line = pack_lines([bar], row_tokens=8, width=8)

    assert line.plain == "███▌█▌··  2 segments"
    assert [(span.start, span.end, span.style) for span in line.spans][:2] == [
        (0, 4, colour(0)),
        (4, 6, colour(3)),
    ]
