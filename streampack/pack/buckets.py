"""Batches of samples of similar length under a token budget, for training on padded batches.

With max_tokens=12, padding counted, and waiting samples by length::

    waiting    2  3  3' 5  6  9       3' is the oldest
    batch         3  3' 5             its nearest lengths, while rows * longest <= max_tokens

The oldest sample opens every batch. Batches therefore follow arrival order rather than length, and
no sample waits for more than `buffer_samples` batches.

Cost: about 2 us a sample. Memory: `buffer_samples` lengths and keys.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from streampack.config import check_positive, read_count
from streampack.errors import DataError


@dataclass(frozen=True, slots=True, order=True)
class _Waiting:
    length: int
    number: int  # arrival number, so that equal lengths keep their order


class LengthBuckets:
    """Groups samples of similar length into batches. It sees only lengths.

    Args:
        max_tokens: Maximum tokens per batch, inclusive.
        include_padding: Count a batch as its samples times its longest sample.
        buffer_samples: Maximum number of waiting samples.
        max_samples: Maximum samples per batch. None: limited only by tokens.

    Raises:
        ConfigError: If a limit is below 1.

    >>> buckets = LengthBuckets(12, buffer_samples=4)
    >>> [buckets.add(length) for length in (5, 2, 6, 2)]
    [[], [], [], [[0, 2]]]
    >>> list(buckets.flush())
    [[1, 3]]
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        include_padding: bool = True,
        buffer_samples: int = 1000,
        max_samples: int | None = None,
    ) -> None:
        self._max_tokens = read_count("max_tokens", max_tokens)
        self._include_padding = include_padding
        self._buffer_samples = read_count("buffer_samples", buffer_samples)
        self._max_samples = check_positive("max_samples", max_samples)
        self._num_arrived = 0
        self._by_length: list[_Waiting] = []
        self._by_age: deque[_Waiting] = deque()  # may contain samples already in a batch
        self._left: set[int] = set()  # numbers of those

    def __len__(self) -> int:
        """Return the number of waiting samples."""
        return len(self._by_length)

    def add(self, length: int) -> list[list[int]]:
        """Add a sample. Samples are numbered 0, 1, 2, ... in order of arrival.

        Returns:
            One batch if the buffer is now full, as sample numbers in arrival order; otherwise none.

        Raises:
            DataError: If the sample has no tokens, or more than max_tokens.
        """
        if not 1 <= length <= self._max_tokens:
            raise DataError(
                f"sample {self._num_arrived}: {length} tokens, where a batch takes 1 to "
                f"max_tokens={self._max_tokens}; cut it, leave it out, or raise max_tokens"
            )
        waiting = _Waiting(length, self._num_arrived)
        self._num_arrived += 1
        insort(self._by_length, waiting)
        self._by_age.append(waiting)
        return [self._next()] if len(self) >= self._buffer_samples else []

    def flush(self) -> Iterator[list[int]]:
        """Yield batches until no sample is left."""
        while self._by_length:
            yield self._next()

    def _next(self) -> list[int]:
        while self._by_age[0].number in self._left:
            self._left.remove(self._by_age.popleft().number)
        oldest = self._by_age[0]
        first = bisect_left(self._by_length, oldest)
        last = first + 1  # the batch is _by_length[first:last]
        tokens = oldest.length
        while True:
            grown = self._nearest(first, last, oldest.length)
            if grown is None:
                break
            new_first, new_last, added = grown
            longest = self._by_length[new_last - 1].length
            cost = (new_last - new_first) * longest if self._include_padding else tokens + added
            if cost > self._max_tokens or (self._max_samples or cost) < new_last - new_first:
                break
            first, last, tokens = new_first, new_last, tokens + added
        numbers = sorted(waiting.number for waiting in self._by_length[first:last])
        del self._by_length[first:last]
        self._left.update(numbers)
        return numbers

    def _nearest(self, first: int, last: int, length: int) -> tuple[int, int, int] | None:
        """Extend a batch by its neighbour of nearest length; return its range and that length."""
        neighbours = []
        if first:
            shorter = self._by_length[first - 1].length
            neighbours.append((length - shorter, first - 1, last, shorter))
        if last < len(self._by_length):
            longer = self._by_length[last].length
            neighbours.append((longer - length, first, last + 1, longer))
        return min(neighbours)[1:] if neighbours else None
