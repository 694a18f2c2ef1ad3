"""Labels of plain text: every token's label is the token after it, within its own sample.

Two segments in a row of 7: A is cut after 3 tokens and goes on elsewhere with a3, B ends::

    tokens   a0  a1  a2 | b0   b1 | pad  pad
    labels   a1  a2  a3 | b1 -100 |-100 -100

Cost: one pass over the row.
"""

from __future__ import annotations

from streampack.compiled import compiled
from streampack.types import Int64Array

__all__ = ["shift_labels"]


@compiled
def shift_labels(tokens: Int64Array, next_token: int, labels: Int64Array) -> None:
    """Fill one segment's labels: its tokens moved back by one, then the token that follows it.

    Args:
        tokens: Its tokens, shape (length,); length is at least 1.
        next_token: The sample's token after them, or -100 where the sample ends.
        labels: Filled, shape (length,).

    >>> import numpy as np
    >>> labels = np.zeros(3, np.int64)
    >>> shift_labels(np.array([5, 6, 7]), -100, labels)
    >>> labels.tolist()
    [6, 7, -100]
    """
    last = len(tokens) - 1
    for i in range(last):
        labels[i] = tokens[i + 1]
    labels[last] = next_token
