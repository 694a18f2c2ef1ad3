"""torchdata's `MaxTokenBucketizer`: batches of samples of similar length under a token budget.

With max_token_count=5 and buffer_size=4::

    source      d(4) a(1) c(3) b(2) ...     the shortest leaves once four wait
    open batch  a b                         3 tokens
                + c would be 6: a b leaves, c opens the next batch

Strict: equal lengths leave in heap order, and long samples wait until the end of the source. With
`max_age` (not torchdata's) a sample that that many others have overtaken leaves next.

Cost: a heap push and pop a sample, about 2 us. Memory: `buffer_size` samples and one batch.
Semantics: torchdata 0.9, `datapipes/iter/transform/bucketbatcher.py`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from streampack.errors import ConfigError

__all__ = ["MaxTokenBucketizer"]

Sample = TypeVar("Sample")


@dataclass(order=True, slots=True)
class _Waiting(Generic[Sample]):
    """A sample in the heap; only lengths are compared, so samples need no order of their own."""

    length: int
    sample: Sample = field(compare=False)
    number: int = field(compare=False)
    has_left: bool = field(compare=False, default=False)


class _OpenBatch(Generic[Sample]):
    """The batch that is being filled."""

    def __init__(self, max_token_count: int, *, include_padding: bool) -> None:
        self._max_token_count = max_token_count
        self._include_padding = include_padding
        self.samples: list[Sample] = []
        self._cost = 0
        self._longest = 0

    def offer(self, waiting: _Waiting[Sample]) -> list[Sample] | None:
        """Add a sample; return the batch before it, if it does not fit into that."""
        longest = max(self._longest, waiting.length)
        cost = self._cost + waiting.length
        if self._include_padding:
            cost = (len(self.samples) + 1) * longest
        if cost <= self._max_token_count:
            self.samples.append(waiting.sample)
            self._cost, self._longest = cost, longest
            return None
        full, self.samples = self.samples, [waiting.sample]
        self._cost = self._longest = waiting.length
        return full


class MaxTokenBucketizer(Generic[Sample]):
    """Batches samples of similar length under a token budget: torchdata's class of this name.

    Args:
        source: The samples.
        max_token_count: Most tokens of a batch, itself allowed.
        len_fn: Tokens of a sample.
        min_len: Shorter samples are left out.
        max_len: Longer samples are left out; None: max_token_count.
        buffer_size: Samples that wait, at most.
        include_padding: Count a batch as its samples times the longest of them.
        max_age: Most samples that may overtake one; None, as in torchdata: any number.

    Raises:
        ConfigError: A ValueError: the limits cannot work together.

    >>> words = ["a", "bb", "ccc", "dddd"]
    >>> list(MaxTokenBucketizer(words, max_token_count=5, buffer_size=4))
    [['a', 'bb'], ['ccc'], ['dddd']]
    """

    def __init__(  # noqa: PLR0913 - torchdata's arguments, and max_age
        self,
        source: Iterable[Sample],
        max_token_count: int,
        len_fn: Callable[[Any], int] = len,
        min_len: int = 0,
        max_len: int | None = None,
        buffer_size: int = 1000,
        include_padding: bool = False,
        max_age: int | None = None,
    ) -> None:
        max_len = max_token_count if max_len is None else max_len
        if min_len < 0 or min_len > max_len:
            raise ConfigError(f"min_len={min_len} must be at least 0 and at most max_len={max_len}")
        if max_len > max_token_count:
            raise ConfigError(
                f"max_len={max_len} is over max_token_count={max_token_count}, "
                "so such samples fit no batch; lower it, or leave it out"
            )
        if buffer_size <= 0:
            raise ConfigError(f"buffer_size={buffer_size} must be at least 1")
        if max_age is not None and max_age < 1:
            raise ConfigError(f"max_age={max_age} must be at least 1; None sets no limit")
        self.source = source
        self.max_token_count = max_token_count
        self.len_fn = len_fn
        self.min_len = min_len
        self.max_len = max_len
        self.buffer_size = buffer_size
        self.include_padding = include_padding
        self.max_age = max_age

    def __iter__(self) -> Iterator[list[Sample]]:
        """Read the source from its start; what waits belongs to this iteration."""
        heap: list[_Waiting[Sample]] = []
        arrived: deque[_Waiting[Sample]] = deque()  # for max_age; holds some that have left
        batch = _OpenBatch[Sample](self.max_token_count, include_padding=self.include_padding)
        num_waiting = num_left = 0
        for number, waiting in enumerate(self._wanted()):
            waiting.number = number
            heapq.heappush(heap, waiting)
            if self.max_age is not None:
                arrived.append(waiting)
            num_waiting += 1
            if num_waiting == self.buffer_size:
                num_waiting, num_left = num_waiting - 1, num_left + 1
                full = batch.offer(self._next(heap, arrived, num_left))
                if full is not None:
                    yield full
        while num_waiting:
            num_waiting, num_left = num_waiting - 1, num_left + 1
            full = batch.offer(self._next(heap, arrived, num_left))
            if full is not None:
                yield full
        if batch.samples:
            yield batch.samples

    def _wanted(self) -> Iterator[_Waiting[Sample]]:
        for sample in self.source:
            length = self.len_fn(sample)
            if self.min_len <= length <= self.max_len:
                yield _Waiting(length, sample, 0)

    def _next(
        self, heap: list[_Waiting[Sample]], arrived: deque[_Waiting[Sample]], num_left: int
    ) -> _Waiting[Sample]:
        """Take the shortest that waits, or the oldest if it is overdue."""
        while arrived and arrived[0].has_left:
            arrived.popleft()
        # num_left - 1 samples have left before; those with higher numbers overtook the oldest.
        if self.max_age is not None and num_left - 1 - arrived[0].number >= self.max_age:
            waiting = arrived.popleft()
        else:
            waiting = heapq.heappop(heap)
            while waiting.has_left:
                waiting = heapq.heappop(heap)
        waiting.has_left = True
        return waiting
