"""Exact fit: the oldest segment opens a pack, a subset of those behind it fills it to the brim.

With max_seq_len=8 and segments in arrival order::

    arrival    A5  B4  C6  D2  E1  F3
    pack 0     A A A A A D D E         A opens; of those behind it D and E are the first 3 tokens
    buffered   B4  C6  F3              B opens the next pack, which waits for 4 tokens

For each pack: take the oldest segment (its anchor, so nothing starves); keep the reachable sums as
a bitset; look at the others in arrival order, one row of sums each (``row | row << length``), and
pull a new one only when all were looked at; stop when the pack is full, or 16 looks after the gap
came within 0.1 % of a pack, or when the buffer is full; go back through the rows for the subset.
After 10 to 20 segments the subsets outnumber the slots, so a full pack is found a few segments
behind the anchor, and order stays nearly first in, first out.

With `split_gap`, a pack that would leave a larger gap takes the head of the oldest segment left;
its tail opens the next pack.

Cost: (segments looked at) x (tokens to fill / 64) word operations a pack; where packs are longer
than 8,192, the first segments go in as they come until a segment would leave fewer. About 0.2 us a
segment on web text at 8,192. Fill: over 99.99 % there. Memory: at most `buffer_tokens` are
buffered, mostly far fewer.
"""

from __future__ import annotations

from fractions import Fraction

from streampack.config import Packing
from streampack.pack import kernels
from streampack.pack.buffered import BufferedPacker
from streampack.pack.kernels import Limits

__all__ = ["exact_fit", "limits_of"]

WINDOW_TOKENS = 8192
TOLERANCE = 1000  # a gap of one part in so many is good enough ...
PATIENCE = 16  # ... if this many more looks find nothing better
MIN_FRAGMENT_TOKENS = 64


def limits_of(packing: Packing) -> Limits:
    """Return the integers that the kernels go by.

    >>> limits_of(Packing(max_seq_len=8192, split_gap=0.01)).split_gap
    81
    """
    size = packing.max_seq_len
    # As it is written: 0.29 of 100 tokens is 29, not 28.999...
    gap = size if packing.split_gap is None else int(Fraction(str(packing.split_gap)) * size)
    return Limits(
        max_seq_len=size,
        buffer_tokens=packing.buffer_limit,
        buffer_samples=packing.buffer_samples,
        window=min(size, WINDOW_TOKENS),
        tolerance=size // TOLERANCE,
        patience=PATIENCE,
        split_gap=gap,
        min_fragment=min(MIN_FRAGMENT_TOKENS, max(1, size // 8)),
    )


def exact_fit(packing: Packing) -> BufferedPacker:
    """Return a packer that fills packs to the brim.

    >>> import numpy as np
    >>> packer = exact_fit(Packing(max_seq_len=8))
    >>> lengths = [5, 4, 6, 2, 1, 3]
    >>> rows = [[0, 0, sample, 0, length, length] for sample, length in enumerate(lengths)]
    >>> packer.add(np.array(rows))[0][:, 2].tolist(), packer.num_buffered_tokens
    ([0, 3, 4], 13)
    """
    return BufferedPacker("exact_fit", limits_of(packing), kernels.exact_fit)
