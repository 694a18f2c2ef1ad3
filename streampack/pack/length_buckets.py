"""Batches of samples of similar length under a token budget, for training on padded batches.

With max_tokens=12, padding counted, and buffered samples by length::

    buffered   2  3  3' 5  6  9       3' is the oldest
    batch         3  3' 5             its nearest lengths, while rows * longest <= max_tokens

The oldest sample opens every batch. Batches therefore follow arrival order rather than length, and
no sample waits for more than `buffer_samples` batches.

Cost: about 5 us a sample. Memory: `buffer_samples` segment rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict

import numpy as np

from streampack.config import Bucketing
from streampack.types import LENGTH, NUM_COLUMNS, Int64Array, Packs


class LengthBucketPacker:
    """Makes batches of similar lengths; called as a `BufferedPacker`, but it has no state.

    >>> packer = LengthBucketPacker(Bucketing(max_tokens=12, buffer_samples=3))
    >>> lengths = (5, 2, 6)
    >>> packs = packer.add(np.array([[0, 0, n, 0, lengths[n], lengths[n]] for n in range(3)]))
    >>> packs.segments[:, 4].tolist(), packer.buffered[:, 4].tolist()
    ([5, 6], [2])
    """

    def __init__(self, bucketing: Bucketing) -> None:
        self._bucketing = bucketing
        self._num_arrived = 0
        self._rows: OrderedDict[int, list[int]] = OrderedDict()  # by arrival number, oldest first
        self._by_length: list[tuple[int, int]] = []  # length and arrival number, sorted

    @property
    def buffered(self) -> Int64Array:
        return np.array(list(self._rows.values()), np.int64).reshape(-1, NUM_COLUMNS)

    def add(self, segments: Int64Array) -> Packs:
        batches: list[list[list[int]]] = []
        for row in segments.tolist():
            self._rows[self._num_arrived] = row
            insort(self._by_length, (row[LENGTH], self._num_arrived))
            self._num_arrived += 1
            if len(self._rows) >= self._bucketing.buffer_samples:
                batches.append(self._next_batch())
        return _as_packs(batches)

    def flush(self) -> Packs:
        batches = []
        while self._rows:
            batches.append(self._next_batch())
        return _as_packs(batches)

    def _next_batch(self) -> list[list[int]]:
        """Remove the oldest segment and its neighbours by length; return them in arrival order."""
        options = self._bucketing
        number, row = next(iter(self._rows.items()))
        oldest = tokens = row[LENGTH]
        first = bisect_left(self._by_length, (oldest, number))
        last = first + 1  # the batch is _by_length[first:last]
        while neighbour := self._nearest(first, last, oldest):
            new_first, new_last, added = neighbour
            size, longest = new_last - new_first, self._by_length[new_last - 1][0]
            cost = size * longest if options.include_padding else tokens + added
            if cost > options.max_tokens or size > (options.max_samples or size):
                break
            first, last, tokens = new_first, new_last, tokens + added
        numbers = sorted(number for _, number in self._by_length[first:last])
        del self._by_length[first:last]
        return [self._rows.pop(number) for number in numbers]

    def _nearest(self, first: int, last: int, length: int) -> tuple[int, int, int] | None:
        """Extend a batch by its neighbour of nearest length; return its range and that length."""
        neighbours = []
        if first:
            shorter = self._by_length[first - 1][0]
            neighbours.append((length - shorter, first - 1, last, shorter))
        if last < len(self._by_length):
            longer = self._by_length[last][0]
            neighbours.append((longer - length, first, last + 1, longer))
        return min(neighbours)[1:] if neighbours else None


def _as_packs(batches: list[list[list[int]]]) -> Packs:
    rows = [row for batch in batches for row in batch]
    return Packs(
        segments=np.array(rows, np.int64).reshape(-1, NUM_COLUMNS),
        ends=np.cumsum([len(batch) for batch in batches], dtype=np.int64),
    )
