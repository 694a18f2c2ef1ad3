"""Positions of tokens in their samples, as rotary embeddings want them.

A row of 7 with a later piece of A (which was cut after 3 tokens) and a whole B::

    tokens      a3  a4 | b0  b1  b2 | pad pad
    restart      0   1 |  0   1   2 |  0   1      what a segment sees is what it counts
    continue     3   4 |  0   1   2 |  0   1      A goes on where its first piece stopped

Cost: one pass over the row.
"""

from __future__ import annotations

from streampack.compiled import compiled
from streampack.types import Int64Array

__all__ = ["count_up"]


@compiled
def count_up(first: int, positions: Int64Array) -> None:
    """Fill `positions`, shape (length,), with first, first + 1, ...

    >>> import numpy as np
    >>> positions = np.zeros(3, np.int64)
    >>> count_up(4, positions)
    >>> positions.tolist()
    [4, 5, 6]
    """
    for i in range(len(positions)):
        positions[i] = first + i
