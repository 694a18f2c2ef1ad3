"""Convert a `Packing` to the integers that the kernels use.

::

    Packing(max_seq_len=8192, split_gap=0.01)  -->  Limits(max_seq_len=8192, split_gap=81, ...)

Cost: none.
"""

from __future__ import annotations

from fractions import Fraction

from streampack.config import Packing
from streampack.pack.kernels import NO_LIMIT, Limits

WINDOW_TOKENS = 8192
TOLERANCE = 1000  # a gap of at most 1 / TOLERANCE of a pack is acceptable ...
PATIENCE = 16  # ... if this many more looks find nothing better


def limits_of(packing: Packing) -> Limits:
    """Return the limits of a packing in tokens and segments.

    >>> limits_of(Packing(max_seq_len=8192, split_gap=0.01)).split_gap
    81
    """
    size, multiple = packing.max_seq_len, packing.pad_to_multiple or 1
    # Exact decimal arithmetic: 0.29 of 100 tokens is 29, not 28.999...
    gap = size if packing.split_gap is None else int(Fraction(str(packing.split_gap)) * size)
    return Limits(
        max_seq_len=size,
        buffer_tokens=packing.buffer_limit,
        buffer_samples=packing.buffer_samples,
        window=min(size, WINDOW_TOKENS),
        tolerance=size // TOLERANCE,
        patience=PATIENCE,
        split_gap=gap,
        # The padding in a segment's room may make the last piece of a sample this much shorter.
        min_fragment=packing.least_fragment + multiple - 1,
        guard=packing.guard or NO_LIMIT,
        max_samples=packing.max_samples_per_pack or NO_LIMIT,
        multiple=multiple,
    )
