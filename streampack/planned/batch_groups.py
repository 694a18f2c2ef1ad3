"""Groups of batches that a thread reads together, sharing calls, memory and waits for the GIL.

::

    batches   0 | 1 2 | 3 4 5 6 | ...    groups grow, so that the first batch is not delayed
    a plan    of a group: one gather, one pass over the packs, one block of memory
    batch 4 is damaged or unavailable    3, then the error, as if each were read separately

Cost: about 10 us per group. Memory: a group's batches live as long as the last of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from streampack.errors import StreampackError
from streampack.plan.device_plan import DevicePlan
from streampack.planned.cache_budget import ReadAhead
from streampack.runtime.batch_reader import BatchReader
from streampack.runtime.memory_budget import BYTES_PER_TOKEN

MOST_AT_ONCE = 16
GROUP_BYTES = 1 << 23  # larger groups are evicted from the CPU cache before use


def most_together(read: BatchReader, batch_tokens: int) -> int:
    """Return how many batches of so many slots a thread reads together, if there is room."""
    if not read.is_cheap:
        return 1  # grouping gains nothing here and would delay the first batch
    if read.keeps_rows and read.gatherer.has_labels:
        return 1  # labels depend on a batch's own samples, but are known per group only
    each = np.dtype(read.gatherer.dtype).itemsize if read.keeps_rows else BYTES_PER_TOKEN
    return min(max(1, GROUP_BYTES // (each * batch_tokens)), MOST_AT_ONCE)


def task_groups(tasks: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Return groups of tasks, of `size` but for the last.

    >>> list(task_groups(range(5), 2))
    [(0, 1), (2, 3), (4,)]
    """
    left = iter(tasks)
    return iter(lambda: tuple(islice(left, size)), ())


@dataclass(slots=True, kw_only=True, eq=False)
class ReadGroup:
    """The outcome of reading a group."""

    batches: deque[Any] = field(default_factory=deque)
    failure: Exception | None = None
    """Error to raise after the batches."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches, dropping each when the next is requested."""
        while self.batches:
            yield self.batches.popleft()
        if self.failure is not None:
            raise self.failure


def in_groups(
    next_plan: Callable[[int], DevicePlan | None], most: int, ahead: ReadAhead
) -> Iterator[DevicePlan]:
    """Yield plans of at most `most` batches, once their shards are local.

    While a shard is missing, the group is halved repeatedly, so that no batch waits for a shard
    that only a later one needs. Batches before a failure come first.
    """
    size = 1
    while (plan := next_plan(size)) is not None:
        first = 0
        while first < plan.num_batches:
            last = plan.num_batches
            part = plan.slice(first, last) if first else plan
            while not ahead.has(part):
                if last == first + 1:
                    ahead.need_for(part)
                    break
                last = (first + last) // 2
                part = plan.slice(first, last)
            yield part
            first = last
        size = min(2 * size, most)


def read_group(read: BatchReader, plan: DevicePlan) -> ReadGroup:
    """Read batches together; if that fails, one by one, up to the one that fails."""
    if plan.num_batches > 1:
        with suppress(StreampackError):  # but not errors raised by a signal handler
            return ReadGroup(batches=deque(read.read(plan)))
    group = ReadGroup()
    try:
        for number in range(plan.num_batches):
            group.batches.append(read(plan.slice(number, number + 1)))
    except Exception as failure:  # raised when its batch is requested
        group.failure = failure
    return group
