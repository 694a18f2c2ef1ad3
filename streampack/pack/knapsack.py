"""Knapsack: the bins of LLaMA-Factory, one after another, each time with the longest that fits.

With max_seq_len=8 and a window of six segments::

    arrival    A2  B5  C3  D6  E4  F2
    bins       D6 A2 | B5 C3 | E4 F2       the longest opens a bin; then the longest that fits
    packs      B C | A D | E F             bins in the order in which B, D and E came

The contents of each bin match LLaMA-Factory's (of equal lengths, the oldest first), so nothing
waits for the next window.

Cost: a sort and about 50 ns a segment.
"""

from __future__ import annotations

import numpy as np

from streampack._numba import kernel_allocating
from streampack.pack.best_fit_decreasing import COUNT, FREE, NUM_PACK_COLUMNS, OPENER, Placed
from streampack.pack.buffered import Limits
from streampack.types import Int64Array


@kernel_allocating
def fill_bins(lengths: Int64Array, capacity: int, max_items: int, bins: Int64Array) -> int:
    """Fill bins one at a time, always with the longest item that fits; return their number.

    `lengths` are ascending, none over `capacity`. `bins` receives the bin of each item.
    """
    # below[j]: all items in [below[j], j) are taken, so the search continues at below[j].
    below = np.arange(len(lengths) + 1)
    num_left, num_bins = len(lengths), 0
    while num_left > 0:
        room, count = capacity, 0
        while count < max_items:
            j = np.searchsorted(lengths, room, side="right")
            while below[j] != j:
                below[j] = below[below[j]]
                j = below[j]
            if j == 0:
                break
            below[j] = j - 1
            bins[j - 1] = num_bins
            room -= lengths[j - 1]
            count += 1
            num_left -= 1
        num_bins += 1
    return num_bins


def place_in_bins(limits: Limits, lengths: Int64Array, _: int) -> Placed:
    """Fill one pack after another, always with the longest segment that fits.

    >>> from streampack.config import Packing
    >>> from streampack.pack.buffered import limits_of
    >>> limits = limits_of(Packing(max_seq_len=8, method="knapsack"))
    >>> place_in_bins(limits, np.array([2, 5, 3, 6, 4, 2]), 0).pack_of.tolist()
    [0, 1, 1, 0, 2, 2]
    """
    # Ascending lengths; among equals the oldest is last, because items are taken from the end.
    order = np.argsort(-lengths, kind="stable")[::-1]
    of_sorted = np.empty(len(lengths), np.int64)
    num_bins = fill_bins(lengths[order], limits.pack_tokens, limits.max_samples, of_sorted)
    bins = np.empty(len(lengths), np.int64)
    bins[order] = of_sorted
    packs = np.zeros((num_bins, NUM_PACK_COLUMNS), np.int64)
    packs[:, FREE] = limits.pack_tokens - np.bincount(bins, lengths).astype(np.int64)
    packs[:, COUNT] = np.bincount(bins)
    packs[of_sorted, OPENER] = order  # the last is the longest, and the oldest of those
    return Placed(bins, packs, np.arange(len(lengths)))
