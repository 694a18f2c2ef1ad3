"""Which worker of a torch DataLoader, or of a `Pool`, this process is; only this file asks torch.

::

    training process    no worker: number 0 of 0
    worker              its number, that of all, and the seed that those of one iteration share

A `Pool` introduces its workers as torch does, because sources and formats of users ask torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.utils.data import _utils, get_worker_info


class TorchWorker(NamedTuple):
    """A worker process; in the training process, all values are 0."""

    number: int = 0
    num_workers: int = 0
    base_seed: int = 0

    def __bool__(self) -> bool:
        return self.num_workers > 0


def worker_here() -> TorchWorker:
    """Return the worker that this process is; it is false in the training process.

    >>> worker_here().num_workers, bool(worker_here())
    (0, False)
    """
    info: Any = get_worker_info()
    if info is None:
        return TorchWorker()
    return TorchWorker(info.id, info.num_workers, info.seed - info.id)


def introduce(worker: TorchWorker, dataset: Any) -> None:
    """Tell torch that this process is a worker."""
    number, num_workers, base_seed = worker
    _utils.worker._worker_info = _utils.worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=base_seed + number, dataset=dataset
    )


class _WatchedInfo:
    """A torch worker's info that knows whether its number, or that of workers, was asked for."""

    def __init__(self, info: Any) -> None:
        self._info, self.was_asked = info, False

    def __getattr__(self, name: str) -> Any:
        self.was_asked |= name in ("id", "num_workers")
        return getattr(self._info, name)


@contextmanager
def watch_asking(*, is_hidden: bool) -> Iterator[Callable[[], bool]]:
    """Note whether what runs inside asks torch for its worker; with `is_hidden`, it sees none."""
    info: Any = get_worker_info()
    seen = None if info is None or is_hidden else _WatchedInfo(info)
    _utils.worker._worker_info = seen  # type: ignore[assignment]
    try:
        yield lambda: seen is not None and seen.was_asked
    finally:
        _utils.worker._worker_info = info
