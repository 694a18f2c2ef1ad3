"""Concat: samples one after another, cut wherever a pack is full.

With max_seq_len=6 and segments A (4 tokens), B (3), C (4)::

    arrival    A A A A     B B B     C C C C
    packs      A A A A B B | B C C C C ...       every pack is full; B is cut after 2 tokens

This is the usual concatenation for pre-training, but attention does not cross sample boundaries. A
later piece of a sample does not see the earlier one. Pieces of one sample that end up in the same
pack form one segment.

Cost: about 30 ns a segment. Padding: only in the last pack, or where a pack would exceed
`buffer_samples`. Cuts: nearly one a pack. Memory: one open pack.
"""

from __future__ import annotations

from streampack.config import Packing
from streampack.pack import kernels
from streampack.pack.buffered import KernelPacker, limits_of


def concat(packing: Packing) -> KernelPacker:
    """Return a packer that fills every pack by cutting samples.

    >>> import numpy as np
    >>> packer = concat(Packing(max_seq_len=6, method="concat"))
    >>> rows = [[0, 0, sample, 0, length, length] for sample, length in enumerate([4, 3, 4])]
    >>> packer.add(np.array(rows))[0][:, [2, 4]].tolist(), packer.held[0]
    ([[0, 4], [1, 2]], 5)
    """
    # Next fit that cuts at any gap, down to a single token.
    limits = limits_of(packing)._replace(split_gap=0, min_fragment=limits_of(packing).multiple)
    return KernelPacker("concat", limits, kernels.fit_in_order)
