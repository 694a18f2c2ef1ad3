"""Padding that tokenizers put into rows: where an attention mask marks it.

::

    tokens            0  0  7  8  9  0
    attention_mask    0  0  1  1  1  0      padded_range: tokens 2 to 4

Cost: one look at the mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PADDING_MASK = "attention_mask"  # 0 marks padding, as tokenizers write it


def is_padded(mask: Any) -> bool:
    """Return whether an attention mask may pad a token, or None if there is none."""
    if mask is None or type(mask) is np.ndarray:
        return mask is not None and not mask.all()
    # Compares by identity first, so it is faster than a search for 0.
    return type(mask) is not list or mask.count(1) < len(mask)


def padded_range(mask: Any, num_tokens: int) -> slice | None:
    """Return the tokens that are not padding by a row's attention mask.

    None: all of them, or it has not one number for each token. A ValueError refuses padding
    between tokens.

    >>> padded_range([0, 1, 1, 0], 4), padded_range([1, 1], 2)
    (slice(1, 3, None), None)
    """
    values = np.asarray(mask if is_padded(mask) else None)
    if values.size != num_tokens or values.dtype.kind not in "biuf" or values.all():
        return None
    kept = np.flatnonzero(values)
    if not len(kept):
        return slice(0, 0)
    first, stop = int(kept[0]), int(kept[-1]) + 1
    if stop - first > len(kept):
        raise ValueError(
            f"its {PADDING_MASK!r} is 0 at token {first + int(values.ravel()[first:].argmin())}, "
            "between tokens where it is 1; padding is omitted before and after a sample; rename "
            "the field if it has another meaning"
        )
    return slice(first, stop)
