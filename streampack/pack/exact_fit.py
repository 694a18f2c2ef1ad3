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
its tail opens the next pack. With `guard`, segments that saw so many packs leave go in first, as
they came, until one does not fit: none waits for more than guard + 2 * buffer_tokens / max_seq_len
+ 1 packs (those of one full segment not counted). With `max_samples_per_pack` the rows of sums are
rows of counts, and 256 segments are looked at at most.

Cost: (segments looked at) x (tokens to fill / 64) word operations a pack; where packs are longer
than 8,192, the first segments go in as they come until a segment would leave fewer. About 0.15 us a
segment on web text at 8,192, far more with `max_samples_per_pack`. Fill: over 99.99 % there.
Memory: at most `buffer_tokens` are buffered, mostly far fewer.
"""

from __future__ import annotations

from streampack.config import Packing
from streampack.pack import kernels
from streampack.pack.buffered import KernelPacker
from streampack.pack.limits import limits_of

__all__ = ["exact_fit"]


def exact_fit(packing: Packing) -> KernelPacker:
    """Return a packer that fills packs to the brim.

    >>> import numpy as np
    >>> packer = exact_fit(Packing(max_seq_len=8))
    >>> lengths = [5, 4, 6, 2, 1, 3]
    >>> rows = [[0, 0, sample, 0, length, length] for sample, length in enumerate(lengths)]
    >>> packer.add(np.array(rows))[0][:, 2].tolist(), packer.num_buffered_tokens
    ([0, 3, 4], 13)
    """
    return KernelPacker("exact_fit", limits_of(packing), kernels.exact_fit)
