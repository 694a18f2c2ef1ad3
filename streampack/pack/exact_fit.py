"""Exact fit: the oldest segment opens a pack, and a subset of the following ones fills it.

With max_seq_len=8 and segments in arrival order::

    arrival    A5  B4  C6  D2  E1  F3
    pack 0     A A A A A D D E         A opens; of those behind it D and E are the first 3 tokens
    buffered   B4  C6  F3              B opens the next pack, which waits for 4 tokens

For each pack:

- Take the oldest segment as its anchor, so that no segment starves.
- Keep the reachable sums as a bitset. Look at the other segments in arrival order, and add one row
  of sums for each (``row | row << length``). Pull a new segment only after all were looked at.
- Stop if the pack is full, or 16 looks after the gap came within 0.1 % of a pack, or if the buffer
  is full. Then go back through the rows to recover the subset.

After 10 to 20 segments there are more subsets than slots. A full pack is therefore found within a
few segments of the anchor, and the order stays close to first in, first out.

With `split_gap`, a pack that would leave a larger gap takes the head of the oldest remaining
segment. With `guard`, segments that have waited for that many packs go in first, in arrival order,
until one does not fit. With `max_samples_per_pack`, the rows hold counts instead of bits.

Cost: (segments looked at) x (tokens to fill / 64) word operations a pack. If packs are longer than
8,192, the first segments are taken in order as long as 8,192 tokens stay free. About 0.15 us a
segment on web text at 8,192, far more with `max_samples_per_pack`.
"""

from __future__ import annotations

from streampack.config import Packing
from streampack.pack import kernels
from streampack.pack.buffered import KernelPacker, limits_of


def exact_fit(packing: Packing) -> KernelPacker:
    """Return a packer that leaves almost no padding.

    >>> import numpy as np
    >>> packer = exact_fit(Packing(max_seq_len=8))
    >>> lengths = [5, 4, 6, 2, 1, 3]
    >>> rows = [[0, 0, sample, 0, length, length] for sample, length in enumerate(lengths)]
    >>> packer.add(np.array(rows))[0][:, 2].tolist(), packer.held[0]
    ([0, 3, 4], 13)
    """
    return KernelPacker("exact_fit", limits_of(packing), kernels.fit_exactly)
