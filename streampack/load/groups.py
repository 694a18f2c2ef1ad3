"""Batches that a thread reads at once: calls, memory and the wait for Python's lock are shared.

::

    batches   0 | 1 2 | 3 4 5 6 | ...    groups grow, so that the first comes as soon as alone
    a plan    of a group: one gather, one pass over the packs, one block of memory
    batch 4 is bad, or cannot be had     3, then the error, as if each were read alone

Cost: some 10 us a group. Memory: a group's batches live as long as the last of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from streampack.load.buffers import BYTES_PER_TOKEN
from streampack.load.fetching import ReadAhead
from streampack.load.reader import BatchReader
from streampack.plan import DevicePlan

__all__ = ["MOST_AT_ONCE", "ReadGroup", "in_groups", "most_together", "read_group"]

NextPlan: TypeAlias = Callable[[int], DevicePlan | None]

MOST_AT_ONCE = 16
GROUP_BYTES = 1 << 23  # what is larger is no longer in the cache when it is read


def most_together(read: BatchReader, batch_tokens: int) -> int:
    """Return how many batches a thread reads at once, if there is room for them.

    Args:
        read: What reads them.
        batch_tokens: Token slots of one.
    """
    if not read.is_light:
        return 1  # nothing would be saved, and who waits for the first would wait for all
    if read.keeps_rows and read.gatherer.has_labels:
        return 1  # such a batch has labels if its own samples do, which is known of a group only
    each = np.dtype(read.gatherer.dtype).itemsize if read.keeps_rows else BYTES_PER_TOKEN
    return min(max(1, GROUP_BYTES // (each * batch_tokens)), MOST_AT_ONCE)


@dataclass(slots=True, kw_only=True, eq=False)
class ReadGroup:
    """What came of a group."""

    batches: deque[Any] = field(default_factory=deque)
    failure: Exception | None = None
    """What is to be raised after them."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches, held on to no longer than until the next is asked for."""
        while self.batches:
            yield self.batches.popleft()
        if self.failure is not None:
            raise self.failure


def in_groups(next_plan: NextPlan, most: int, ahead: ReadAhead) -> Iterator[DevicePlan]:
    """Yield plans of several batches whose shards are here; those before a failure come before it.

    Args:
        next_plan: Returns the plan of so many batches at most, and None at the end.
        most: Batches of a plan.
        ahead: What brings their shards. While one is not here yet, half as many batches come
            together, and so on: none waits for what only a later one needs.
    """
    size = 1
    while (plan := next_plan(size)) is not None:
        first = 0
        while first < plan.num_batches:
            last = plan.num_batches
            while not ahead.has(plan.part(first, last)):
                if last == first + 1:
                    ahead.need_for(plan.part(first, last))
                    break
                last = (first + last) // 2
            yield plan.part(first, last)
            first = last
        size = min(2 * size, most)


def read_group(read: BatchReader, plan: DevicePlan) -> ReadGroup:
    """Read batches at once; if that fails one by one, up to the one that is to blame."""
    if plan.num_batches > 1:
        with suppress(Exception):
            return ReadGroup(batches=deque(read.read(plan)))
    group = ReadGroup()
    try:
        for number in range(plan.num_batches):
            group.batches.append(read(plan.part(number, number + 1)))
    except Exception as failure:  # to be raised where its batch is asked for
        group.failure = failure
    return group
