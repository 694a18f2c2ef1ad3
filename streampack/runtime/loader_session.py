"""What the loaders of both wings share: worker processes, pinned memory, and how they end."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from streampack.runtime.provenance import RecentBatches
from streampack.runtime.resumable import Engine
from streampack.runtime.worker_pool import Pool
from streampack.runtime.worker_processes import WorkerOptions

_T = TypeVar("_T")


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
        return pin_memory(batch) if self._pins else batch  # type: ignore[no-untyped-call]


_under_way: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()


def close_at_exit(iteration: Generator[_T, None, None]) -> Iterator[_T]:
    """Return an iterator that is closed at the interpreter's exit if it is still referenced.

    One that is finalized later cannot join its threads: module globals are gone by then.
    """
    _under_way.add(iteration)
    return iteration


@atexit.register
def _end() -> None:
    for iteration in list(_under_way):
        with suppress(ValueError):  # another thread is running it
            iteration.close()
