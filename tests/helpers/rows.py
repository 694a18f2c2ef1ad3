"""Random rows of tokens and their packs, in the form that the gather returns."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from streampack.gather.gather import Rows
from streampack.types import Packs

ROW_TOKENS = 9
PADDING = 77


@st.composite
def planned_rows(draw: st.DrawFn) -> tuple[Rows, Packs]:
    """Rows of random segments, some of them cut, with or without padding and padding packs."""
    num_rows = draw(st.integers(1, 4))
    num_packs = draw(st.integers(0, num_rows))
    segments, ends = [], []
    tokens = np.full((num_rows, ROW_TOKENS), PADDING, np.int64)
    next_tokens = []
    for row in range(num_packs):
        at = 0
        for length in draw(st.lists(st.integers(1, ROW_TOKENS), min_size=1, max_size=5)):
            if at + length > ROW_TOKENS:
                break
            start, rest = draw(st.integers(0, 5)), draw(st.integers(0, 3))
            sample = len(segments)
            segments.append([sample % 3, 1, sample, start, length, start + length + rest])
            first = 1000 * (sample + 1) + start
            tokens[row, at : at + length] = np.arange(first, first + length)
            next_tokens.append(first + length if rest else -100)
            at += length
        ends.append(len(segments))
    packs = Packs(
        segments=np.array(segments, np.int64).reshape(-1, 6), ends=np.array(ends, np.int64)
    )
    rows = Rows(tokens=tokens, next_tokens=np.array(next_tokens, np.int64), labels=None)
    return rows, packs
