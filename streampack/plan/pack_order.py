"""The order in which the packs of a window leave, and packs taken in an order.

::

    packs of a window        a b c d e f
    shuffled                 d a f c b e       by default: any order is equally likely
    even (equal cost)        few, many, some, few, many, some tokens ...

Packs of equal cost hold unequal tokens: a pack with a long sample has fewer. In a random order,
the tokens of a global batch would vary with its share of long samples.

Cost: about 0.2 us a pack.
"""

from __future__ import annotations

import numpy as np

from streampack._numba import kernel_holding_gil
from streampack.types import NUM_COLUMNS, Int64Array, Packs

NUM_QUANTILES = 64
GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # its fraction, times 2**64


def even_order(tokens: Int64Array) -> Int64Array:
    """Return an order in which consecutive packs have about their share of the tokens, shape (n,).

    Multiples of the golden ratio, modulo one, are spread evenly over consecutive positions. So
    the pack at a position is drawn from the quantile of tokens that the multiple names. Packs of
    one of `NUM_QUANTILES` keep their random order, which is that of `tokens`, shape (n,).

    >>> even_order(np.array([1, 1, 1, 1, 9, 9, 9, 9])).tolist()
    [0, 5, 2, 7, 4, 1, 6, 3]
    """
    num_packs = len(tokens)
    quantiles = np.empty(num_packs, np.int64)
    quantiles[np.argsort(tokens, kind="stable")] = (
        np.arange(num_packs) * NUM_QUANTILES // max(num_packs, 1)
    )
    places = np.argsort(np.arange(num_packs, dtype=np.uint64) * GOLDEN_RATIO, kind="stable")
    order = np.empty(num_packs, np.int64)
    order[places] = np.argsort(quantiles, kind="stable")
    return order


@kernel_holding_gil
def copy_packs(
    segments: Int64Array, begins: Int64Array, sizes: Int64Array, starts: Int64Array, out: Int64Array
) -> None:
    """Copy `sizes` rows for each pack, from row `begins` to row `starts` of `out`."""
    for pack in range(len(begins)):
        begin, start = begins[pack], starts[pack]
        for row in range(sizes[pack]):
            for column in range(NUM_COLUMNS):
                out[start + row, column] = segments[begin + row, column]


def take_packs(packs: Packs, order: Int64Array) -> Packs:
    """Return some packs by number, in this order, shape (n,)."""
    sizes = np.diff(packs.ends, prepend=0)
    begins = packs.ends - sizes
    sizes = sizes[order]
    ends = np.cumsum(sizes)
    out = np.empty((int(sizes.sum()), NUM_COLUMNS), np.int64)
    copy_packs(packs.segments, begins[order], sizes, ends - sizes, out)
    return Packs(segments=out, ends=ends)
