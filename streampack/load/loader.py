"""`PackedDataLoader`: one loader for both ways in, with exact state.

::

    PackedStreamingDataset  --> PlannedLoading    plans here, reads in a thread or stateless workers
    PackedIterableDataset   --> IterableLoading   reads and packs in a thread, or in workers
    BucketedIterableDataset --> IterableLoading   likewise, by length

Both deliver the same batches whatever is read ahead, and the state is of the batch last delivered.

Cost: see the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import get_all_start_methods
from typing import Any

from streampack.assemble import Batch
from streampack.config import check_positive, is_weight, read_integer
from streampack.errors import ConfigError, suggest
from streampack.load.arguments import with_hints
from streampack.load.dataset import PackedStreamingDataset
from streampack.load.gathering import gather_state
from streampack.load.iterable import FlowDataset
from streampack.load.iterable_loading import IterableLoading
from streampack.load.planned_loading import PlannedLoading
from streampack.load.workers import WorkerOptions
from streampack.types import State

__all__ = ["PackedDataLoader"]

MAX_TIMEOUT_S = 10**6  # the system's own waits take no more than 2**31 ms


class PackedDataLoader:
    """Iterates a packed dataset: one epoch an iteration, and exact state.

    Args:
        dataset: What to iterate: a `PackedStreamingDataset`, `PackedIterableDataset` or
            `BucketedIterableDataset`.
        num_workers: Processes that read; 0 plans and reads in threads of this process, which is the
            quickest. Those of a `PackedIterableDataset` pack, too, so its state fits as many
            workers only.
        prefetch_factor: Batches that are read ahead, per worker, or by threads. Several are handed
            over at a time, up to 8 from a worker (of together 524,288 tokens) and up to 16 from a
            thread (of together 8 MiB), where `Buffers` and shared memory have room for them; these
            count as one. Threads read at least 4 ahead, or 8 such groups.
        prefetch_threads: With num_workers=0, threads that read; one of them plans, too, at a time,
            and a loop that would wait reads as well. A `PackedIterableDataset` has no use for more
            than one. 0 reads in the training loop alone.
        pin_memory: Put tensors into pinned memory, for quick copies to a GPU, if there is one.
        persistent_workers: Keep workers from one epoch to the next.
        multiprocessing_context: How workers are started: "fork", "spawn" or "forkserver".
        timeout: Seconds that the loop waits for a worker, its start included, before it is a
            WorkerError; 0 or None: for ever, as for one that is stopped.

    Raises:
        ConfigError: If the arguments cannot work together, `dataset.buffers` cannot hold one batch
            a worker, or shared memory cannot hold what the workers hand over.
    """

    @with_hints
    def __init__(  # noqa: PLR0913 - torch's arguments
        self,
        dataset: PackedStreamingDataset | FlowDataset,
        *,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        prefetch_threads: int = 1,
        pin_memory: bool = False,
        persistent_workers: bool = True,
        multiprocessing_context: str | None = None,
        timeout: float | None = None,
    ) -> None:
        # A None, as of torch's DataLoader, would be met only where batches are read.
        prefetch_factor = read_integer("prefetch_factor", prefetch_factor, "leave it out for 2")
        prefetch_threads = read_integer("prefetch_threads", prefetch_threads, "leave it out for 1")
        num_workers = read_integer("num_workers", num_workers, "0 reads in threads")
        check_positive("prefetch_factor", prefetch_factor)
        if prefetch_threads < 0:
            raise ConfigError(
                f"prefetch_threads={prefetch_threads} must be at least 0; 0 reads in the loop"
            )
        if num_workers < 0:
            raise ConfigError(f"num_workers={num_workers} must be at least 0; 0 reads in threads")
        methods = get_all_start_methods()
        if isinstance(multiprocessing_context, str) and multiprocessing_context not in methods:
            raise ConfigError(
                f"multiprocessing_context={multiprocessing_context!r} is not one of "
                f"{'|'.join(methods)}{suggest(multiprocessing_context, methods)}"
            )
        self.dataset = dataset
        self.num_workers = num_workers
        options = WorkerOptions(
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            prefetch_threads=prefetch_threads,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            timeout=_check_timeout(timeout, num_workers),
        )
        self._loading = _loading(dataset, options)

    def __repr__(self) -> str:
        return f"PackedDataLoader({self.dataset!r}, num_workers={self.num_workers})"

    def __len__(self) -> int:
        """Return the batches of this rank in a whole epoch: the one under way, or the next.

        Raises:
            TypeError: If the dataset goes over iterables, whose samples nobody knows.
        """
        return len(self._loading)

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next epoch, or go on from the state that was loaded, at the first batch."""
        return iter(self._loading)

    def state_dict(self) -> State:
        """Return where the run stands after the batch last delivered, as JSON."""
        return self._loading.state_dict()

    def gather_state(self, group: Any = None) -> State:
        """Return `state_dict()` with the snapshots of all ranks; all of them must call this.

        Any rank's own state resumes exactly, too. With this one no rank plans its lanes again.

        Args:
            group: torch's process group, of all ranks; None: torch's own.

        Raises:
            ResumeError: If the ranks do not stand at the same step, or it goes over iterables.
        """
        return gather_state(self.state_dict(), group)

    def load_state_dict(self, state: State) -> None:
        """Go on from `state` at the next iteration.

        Raises:
            ResumeError: If it belongs to another sequence; the difference is named.
        """
        self._loading.load_state_dict(state)

    def stats(self) -> dict[str, Any]:
        """Return what this rank delivered since the loader was made or a state was loaded.

        Per stream: samples and tokens delivered, split, truncated, dropped, shares and target; and
        packs, tokens, fill, slots served by another stream, high-water marks of the buffers, and
        shards: fetched by this process (ahead of their need or for lengths), with their bytes;
        waited for, and how long; the most bytes of shards that were here ahead of their end.
        Dropped samples are counted as they are met, up to a chunk of 4,096 samples ahead, and each
        by one rank.
        """
        return self._loading.stats()


def _check_timeout(timeout: float | None, num_workers: int) -> float:
    """Return how long a worker is waited for, in seconds; 0: for ever."""
    if timeout is not None and not (is_weight(timeout) and timeout <= MAX_TIMEOUT_S):
        raise ConfigError(
            f"timeout={timeout!r} must be a number of seconds, at least 0 and at most "
            f"{MAX_TIMEOUT_S}; 0 or None waits for ever"
        )
    if timeout and not num_workers:
        raise ConfigError(
            f"timeout={timeout} is for worker processes, and num_workers=0 has none; leave it out, "
            "or set num_workers: threads cannot be ended while they wait"
        )
    return float(timeout or 0)


def _loading(dataset: Any, options: WorkerOptions) -> PlannedLoading | IterableLoading:
    if isinstance(dataset, PackedStreamingDataset):
        return PlannedLoading(dataset, options)
    if isinstance(dataset, FlowDataset):
        return IterableLoading(dataset, options)
    raise ConfigError(
        "PackedDataLoader takes a PackedStreamingDataset, a PackedIterableDataset or a "
        f"BucketedIterableDataset, got {type(dataset).__name__}; iterate others with torch's "
        "DataLoader(dataset, batch_size=None)"
    )
