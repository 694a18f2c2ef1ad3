"""torchdata's `MaxTokenBucketizer`: batches of samples of similar length under a token budget.

Strict: equal lengths leave in heap order, and long samples wait until the end of the source; in
batches of `BucketedIterableDataset` they do not. Unlike torchdata, it copies the samples that wait,
and under torch's ``DataLoader`` each worker takes its part of the source.

Semantics: torchdata 0.9, `datapipes/iter/transform/bucketbatcher.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

from torch.utils.data import IterableDataset, IterDataPipe
from torch.utils.data.graph_settings import apply_sharding

from streampack.errors import ConfigError
from streampack.runtime.torch_worker import worker_here
from streampack.texts.source_traits import is_hugging_face, own_copy

Sample = TypeVar("Sample")


@dataclass(order=True, slots=True)
class _Waiting(Generic[Sample]):
    """A sample in the heap; only lengths are compared, so samples need no order of their own."""

    length: int
    sample: Sample = field(compare=False)


class MaxTokenBucketizer(IterableDataset[list[Sample]]):
    """Batches samples of similar length under a token budget: torchdata's class of this name.

    Args:
        datapipe: Any iterable of samples. In a worker of a DataLoader an `IterDataPipe` shards
            at its ``sharding_filter()`` and an `IterableDataset` by its own rule. Any other
            iterable is divided between the workers.
        max_token_count: Maximum number of tokens in a batch, inclusive.
        len_fn: Returns the number of tokens of a sample.
        min_len: Shorter samples are omitted.
        max_len: Longer samples are omitted; max_token_count by default.
        buffer_size: Maximum number of samples that wait.
        include_padding: Count a batch as its number of samples times the longest of them.

    Raises:
        ConfigError: A ValueError: the limits contradict each other.

    >>> words = ["a", "bb", "ccc", "dddd"]
    >>> list(MaxTokenBucketizer(words, max_token_count=5, buffer_size=4))
    [['a', 'bb'], ['ccc'], ['dddd']]
    """

    def __init__(
        self,
        datapipe: Iterable[Sample],
        max_token_count: int,
        len_fn: Callable[[Any], int] = len,
        min_len: int = 0,
        max_len: int | None = None,
        buffer_size: int = 1000,
        include_padding: bool = False,
    ) -> None:
        max_len = max_token_count if max_len is None else max_len
        if min_len < 0 or min_len > max_len:
            raise ConfigError(
                "``min_len`` should be larger than 0, or 0, and at most ``max_len``, but "
                f"min_len={min_len} and max_len={max_len}; lower min_len, or omit it"
            )
        if max_len > max_token_count:
            raise ConfigError(
                "``max_token_count`` must be equal to or greater than ``max_len``, but "
                f"max_token_count={max_token_count} and max_len={max_len}: longer samples fit no "
                "batch; lower max_len, or omit it"
            )
        if buffer_size <= 0:
            raise ConfigError(
                f"'buffer_size' is required to be a positive integer, but is {buffer_size}; "
                "1 keeps the order, and more sorts further"
            )
        super().__init__()
        self.datapipe = datapipe
        self.max_token_count = max_token_count
        self.len_fn = len_fn
        self.min_len = min_len
        self.max_len = max_len
        self.buffer_size = buffer_size
        self.include_padding = include_padding

    def __iter__(self) -> Iterator[list[Sample]]:
        """Read the source from its start; waiting samples belong to this iteration."""
        batch: list[Sample] = []
        cost = longest = 0  # of the batch, in tokens
        for waiting in self._leaving():
            longest = max(longest, waiting.length)
            cost = (len(batch) + 1) * longest if self.include_padding else cost + waiting.length
            if cost > self.max_token_count:
                yield batch
                batch, cost, longest = [], waiting.length, waiting.length
            batch.append(waiting.sample)
        if batch:
            yield batch

    def _leaving(self) -> Iterator[_Waiting[Sample]]:
        heap: list[_Waiting[Sample]] = []
        for sample in self._own_part():
            length = self.len_fn(sample)
            if self.min_len <= length <= self.max_len:
                heapq.heappush(heap, _Waiting(length, own_copy(sample)))
                if len(heap) == self.buffer_size:
                    yield heapq.heappop(heap)
        while heap:
            yield heapq.heappop(heap)

    def _own_part(self) -> Iterable[Sample]:
        worker, source = worker_here(), self.datapipe
        if not worker:
            return source
        if isinstance(source, IterDataPipe):
            # As DataLoader does if its dataset is itself a datapipe.
            apply_sharding(source, worker.num_workers, worker.number)
        if isinstance(source, IterableDataset) or is_hugging_face(source):
            return source
        return islice(source, worker.number, None, worker.num_workers)
