"""How the sources are run: which part by whom, by one iteration at a time, and divided once.

::

    thread of a loop that was left    next(source) ......... item | ends
    the next iteration                         waits              | reads from its start

    sharded     None                          False               True
    it is told  its worker; refused if read   no worker           its worker

Cost: 2 us for a batch and for a group of items.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from streampack.errors import ConfigError
from streampack.runtime import torch_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlice:
    """One worker's position among all ranks and workers."""

    device: int = 0
    """Number of the rank, among those that get distinct batches."""
    num_devices: int = 1
    worker: int = 0
    num_workers: int = 1

    @property
    def index(self) -> int:
        """Number of this slice, over all ranks and workers."""
        return self.device * self.num_workers + self.worker

    @property
    def num_slices(self) -> int:
        return self.num_devices * self.num_workers

    def num_of(self, total: int) -> int:
        """Return this slice's share of `total` items dealt round-robin.

        >>> [WorkerSlice(worker=worker, num_workers=3).num_of(8) for worker in range(3)]
        [3, 3, 2]
        """
        return -(-max(total - self.index, 0) // self.num_slices)


class SourceLock:
    """Lets one iteration at a time read the sources; each copy and each process has its own."""

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()

    def __reduce__(self) -> Any:
        return SourceLock, ()

    @contextmanager
    def take(self, check: Callable[[], None]) -> Iterator[None]:
        """Wait until no other iteration reads; `check` then says whether this one still may."""
        if self._pid != os.getpid():  # a fork copies the lock as it is
            self._pid, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            check()
            yield


@contextmanager
def watched(name: str, source: object, sharded: bool | None) -> Iterator[None]:
    """Let a source run whose items are dealt to workers; one that asks for its worker is refused.

    Raises:
        ConfigError: If it asked, and `sharded` does not say what for. With False, it sees none.
    """
    with torch_worker.watch_asking(is_hidden=sharded is not None) as was_asked:
        yield
    if was_asked():
        raise ConfigError(
            f"stream {name!r}: its source ({type(source).__name__}) asks which of "
            f"{torch_worker.worker_here().num_workers} workers it is in, while its items are "
            "divided among them already, so most would never come; set sharded=True if it gives "
            "each worker of each rank its own samples, or sharded=False if all of them are to be "
            "divided"
        )
