"""The part of each source that one worker takes, among all ranks and workers."""

from __future__ import annotations

from dataclasses import dataclass


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
