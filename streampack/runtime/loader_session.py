"""What the loaders of both wings share: worker processes, their tasks, and memory for batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Generic

import torch

from streampack.errors import ConfigError
from streampack.runtime.provenance import RecentBatches
from streampack.runtime.resumable import Engine
from streampack.runtime.worker_main import Failed
from streampack.runtime.worker_pool import SHARED_MEMORY, Pool
from streampack.runtime.worker_processes import WorkerOptions


class LoaderSession(Generic[Engine]):
    """Iterates over a dataset, one iteration at a time with worker processes."""

    def __init__(self, engine: Engine, options: WorkerOptions) -> None:
        self.engine = engine
        self.num_workers = options.num_workers
        self._options = options
        # Without a GPU, there is nothing to pin for.
        self._pins = options.pin_memory and torch.cuda.is_available()
        self._workers: Pool | None = None
        self.recent = RecentBatches()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_workers": None, "recent": RecentBatches()}

    def _pinned(self, batch: Any) -> Any:
        return pin(batch) if self._pins else batch

    def _end_workers(self) -> None:
        if self._workers is not None:
            self._workers.end()


def serve_reads(read: Callable[[Any], Any], _given: None) -> Callable[[Any], list[Any]]:
    """Return the work of a `Pool` that reads groups of tasks, each up to the first that fails."""

    def results_of(tasks: tuple[Any, ...]) -> list[Any]:
        results = []
        try:
            for task in tasks:
                results.append(read(task))
        except Exception as error:
            results.append(Failed.of(error))
        return results

    return results_of


def task_groups(tasks: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Return groups of tasks, of `size` but for the last.

    >>> list(task_groups(range(5), 2))
    [(0, 1), (2, 3), (4,)]
    """
    left = iter(tasks)
    return iter(lambda: tuple(islice(left, size)), ())


def pin(batch: Any) -> Any:
    """Return a batch of any format with its tensors in pinned memory."""
    if isinstance(batch, dict):
        return {key: pin(value) for key, value in batch.items()}
    if hasattr(batch, "_fields"):  # a NamedTuple takes its values one by one
        return type(batch)(*map(pin, batch))
    if isinstance(batch, tuple | list):
        return type(batch)(pin(value) for value in batch)
    return batch.pin_memory() if hasattr(batch, "pin_memory") else batch


class SharedMemory:
    """The memory in torch's folder for shared memory, of which `num_ranks` get equal parts."""

    def __init__(self, num_ranks: int, folder: Path = SHARED_MEMORY) -> None:
        self._num_ranks = num_ranks
        self._folder = folder
        self.free: int | None = None
        """Free bytes, or None: torch will then use another location or raise its own error."""
        with suppress(OSError):
            status = os.statvfs(folder)
            self.free = status.f_bavail * status.f_frsize

    def has(self, num_bytes: int) -> bool:
        return self.free is None or self._num_ranks * num_bytes <= self.free

    def check(self, num_bytes: int) -> None:
        """Refuse workers if their batches, of `num_bytes` in each rank, do not fit."""
        if not self.has(num_bytes):
            raise ConfigError(
                f"{self._folder} has {self.free} bytes free, but workers hand batches over in it "
                f"and may need {self._num_ranks * num_bytes}; make it larger (docker: --shm-size), "
                "lower batch_size or prefetch_factor, or set num_workers=0, which needs none"
            )
