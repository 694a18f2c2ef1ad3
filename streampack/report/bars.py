"""Packs as bars, coloured by stream.

::

    pack 0   ████████▌██▌█████████████▌█████  12 segments     one colour per stream, a notch at the
    pack 1   ████▌█████████████████████████▌   5 segments     end of a segment; `·` is padding
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from rich.text import Text

from streampack.types import Int64Array

Bar: TypeAlias = Int64Array
"""One pack: (stream, length) of its segments in order, shape (num_segments, 2)."""

# Neighbours can be told apart by those who see fewer colours. The page of a report has the same
# hues for a dark background.
PALETTE = (
    *("#2a78d6", "#1baf7a", "#eda100", "#6f2da8", "#7d8f00"),
    *("#e34948", "#e87ba4", "#eb6834", "#0f9bb0", "#8a5a3b"),
)

FULL, NOTCH, EMPTY = "█", "▌", "·"


def colour(stream: int) -> str:
    """Return a stream's colour as ``#rrggbb``; colours repeat after ten streams.

    >>> colour(0) == colour(10)
    True
    """
    return PALETTE[stream % len(PALETTE)]


def pack_lines(bars: Sequence[Bar], row_tokens: int, width: int) -> Text:
    """Draw packs for a terminal, one line each; a full pack is `width` characters.

    >>> print(pack_lines([np.array([[0, 4], [1, 2]])], row_tokens=8, width=8))
    ███▌█▌··  2 segments
    """
    return Text("\n").join(_draw(bar, row_tokens, width) for bar in bars)


def _draw(bar: Bar, row_tokens: int, width: int) -> Text:
    """Draw one pack; every segment at least a character wide ends in a notch."""
    line = Text()
    # Round the ends, not the lengths, so that rounding errors do not add up.
    ends = np.rint(np.cumsum(bar[:, 1]) * (width / row_tokens)).astype(int).tolist()
    drawn = 0
    for (stream, _), end in zip(bar.tolist(), ends, strict=True):
        if end > drawn:
            line.append(FULL * (end - drawn - 1) + NOTCH, style=colour(stream))
        drawn = end
    line.append(EMPTY * (width - drawn), style="dim")
    return line.append(f"  {len(bar)} segment{'' if len(bar) == 1 else 's'}", style="dim")


def legend(names: Sequence[str]) -> Text:
    """Return the streams' names, each in its stream's colour."""
    return Text("  ").join(
        Text(f"{FULL} {name}", style=colour(number)) for number, name in enumerate(names)
    )
