"""Knapsack: packs a window of segments at a time, longest fitting segment first (LLaMA-Factory).

With max_seq_len=8 and a window of six segments::

    arrival    A2  B5  C3  D6  E4  F2
    bins       D6 A2 | B5 C3 | E4 F2       the longest opens a bin; then the longest that fits
    packs      B C | A D | E F             bins in the order in which B, D and E came

A window is a full buffer, and all of it is packed. To hide the order of its bins from training,
packs leave in the arrival order of their longest segments. The contents of each bin match
LLaMA-Factory's (of equal lengths, the oldest first).

Cost: a sort and about 50 ns a segment. Memory: the window, which is always filled.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from streampack._numba import kernel_allocating
from streampack.config import Packing
from streampack.pack.buffered import BufferedPacker, limits_of, rooms, without_padding
from streampack.types import LENGTH, Int64Array, Packs


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


def _bins(lengths: Int64Array, capacity: int, max_items: int) -> tuple[Int64Array, int]:
    """Return the bin of each item, shape (n,), and the number of bins."""
    # Ascending lengths; among equals the oldest is last, because items are taken from the end.
    order = np.lexsort((-np.arange(len(lengths)), lengths))
    of_sorted = np.empty(len(lengths), np.int64)
    num_bins = fill_bins(lengths[order], capacity, max_items, of_sorted)
    bins = np.empty(len(lengths), np.int64)
    bins[order] = of_sorted
    return bins, num_bins


class KnapsackPacker(BufferedPacker):
    """A packer that fills its buffer completely, then packs all of it, longest segments first.

    >>> packer = KnapsackPacker(Packing(max_seq_len=8, method="knapsack", buffer_tokens=22))
    >>> lengths = [2, 5, 3, 6, 4, 2, 1]
    >>> rows = [[0, 0, sample, 0, length, length] for sample, length in enumerate(lengths)]
    >>> packs = packer.add(np.array(rows))
    >>> [packs[pack][:, 2].tolist() for pack in range(3)], packer.held[1]
    ([[1, 2], [0, 3], [4, 5]], 1)
    """

    def __init__(self, packing: Packing) -> None:
        super().__init__("knapsack", limits_of(packing))

    def _pack(self, segments: Int64Array, *, final: bool) -> Packs:
        multiple = self._limits.multiple
        rows = rooms(np.concatenate([self._buffered, segments]), multiple)
        ends = list(self._windows(rows[:, LENGTH]))
        if final and len(rows):
            ends.append(len(rows))
        *windows, left = np.split(rows, ends)
        packs = Packs.join(list(map(self._pack_window, windows)))
        self._buffered = without_padding(left, multiple)
        return Packs(segments=without_padding(packs.segments, multiple), ends=packs.ends)

    def _windows(self, lengths: Int64Array) -> Iterator[int]:
        """Yield the end of each window: before the first segment that exceeds the buffer."""
        limits = self._limits
        totals = np.cumsum(lengths)
        begin, before = 0, 0
        while begin < len(lengths):
            end = int(np.searchsorted(totals, before + limits.buffer_tokens, side="right"))
            end = min(end, begin + limits.buffer_samples)
            tokens, samples = self._high_water
            held = int(totals[end - 1]) - before
            self._high_water = (max(tokens, held), max(samples, end - begin))
            if end == len(lengths):
                return
            yield end
            begin, before = end, int(totals[end - 1])

    def _pack_window(self, rows: Int64Array) -> Packs:
        lengths = rows[:, LENGTH]
        limits = self._limits
        bins, num_bins = _bins(lengths, limits.pack_tokens, limits.max_samples)
        # In each bin, the first row by length and then by age is the one that opened it.
        by_length = np.lexsort((np.arange(len(rows)), -lengths, bins))
        sizes = np.bincount(bins, minlength=num_bins)
        openers = by_length[np.cumsum(sizes) - sizes]
        place = np.empty(num_bins, np.int64)
        place[np.argsort(openers)] = np.arange(num_bins)
        order = np.argsort(place[bins], kind="stable")
        return Packs(segments=rows[order], ends=np.cumsum(np.bincount(place[bins])))
