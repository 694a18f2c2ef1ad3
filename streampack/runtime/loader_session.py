"""What the loaders of both wings share: options, worker processes, and pinned memory.

::

    PlannedLoading    workers read what this process plans
    OnlineLoading     workers read and pack

A copy of a loader has no running iteration, and starts its own workers.
"""

from __future__ import annotations

from typing import Any, Generic

import torch

from streampack.runtime.reading_workers import pin
from streampack.runtime.resumable import Engine
from streampack.runtime.worker_pool import Pool
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

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_workers": None}

    def _pinned(self, batch: Any) -> Any:
        return pin(batch) if self._pins else batch

    def _end_workers(self) -> None:
        """End the workers; the next iteration starts new ones."""
        if self._workers is not None:
            self._workers.end()
