"""torch's iterations over workers, and their quick end wherever the last reference goes.

::

    loader --begin--> Iteration --next--> batches
                          '-- nobody holds it --> torch tells its workers to end, and waits for them

torch does that when its iterator is deleted. Where the garbage collector finds the iterator, in a
cycle such as a kept traceback makes, the queue of the message is closed before: torch then waits
5 s for each worker, in whichever thread happened to collect. What ends the workers here holds the
iterator, so that the collector never finds it with its queues.

Cost: one call a batch.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["Iteration", "Iterations"]


class Iteration:
    """torch's iterator over its workers, which end when nobody holds this any more."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        weakref.finalize(self, _end, batches, os.getpid()).atexit = False  # torch has its own

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.batches)


def _end(batches: Any, pid: int) -> None:
    if os.getpid() == pid:
        batches._shutdown_workers()
    else:
        batches._shutdown = True  # a forked child must not end its parent's workers


class Iterations:
    """The iterations of a torch loader with workers, one after the other.

    Args:
        loader: With `num_workers` > 0.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._last: Iteration | None = None

    def begin(self) -> Iteration:
        """Begin the next one; workers that live on are those of the one before."""
        batches = iter(self._loader)
        last, self._last = self._last, None
        begun = last if last is not None and last.batches is batches else Iteration(batches)
        if self._loader.persistent_workers:
            self._last = begun
        return begun
