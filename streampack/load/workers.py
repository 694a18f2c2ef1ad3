"""Reading processes: plans in, batches out in order; a dead one is an error at once, by name.

::

    plans --torch's DataLoader--> worker 0  batches 0, 2, ...
                                  worker 1  batches 1, 3, ...      killed -> WorkerError, new ones

How a dead one is noticed: `iterations.py`. A worker's own failure comes as the error it was, after
what was read before it.

Cost: a hand-over of torch's, some 0.2 ms, for each group of tasks.
"""

from __future__ import annotations

import os
import pickle
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import Dataset

from streampack.errors import ConfigError, StreampackError
from streampack.load.iterations import SHARED_MEMORY, Iteration, Iterations, WorkersLoader

__all__ = ["ReadingWorkers", "SharedMemory", "WorkerOptions", "check_socket_path", "pin"]

QUEUE_LOCKS, EVENT_LOCKS = 3, 5  # files of multiprocessing's Queue and Event
MAX_SOCKET_PATH = 107  # bytes of a Unix socket's address
SOCKET_NAME = "/pymp-12345678/listener-12345678"  # how long torch's are, in the temporary folder


class Read(Protocol):
    """What a worker does with a task; both travel to it."""

    def __call__(self, task: Any, /) -> Any:
        """Read one planned batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How batches are read ahead; but for `prefetch_threads` torch's arguments of these names."""

    num_workers: int
    prefetch_factor: int
    prefetch_threads: int = 1
    pin_memory: bool = False
    persistent_workers: bool = True
    multiprocessing_context: str | None = None
    timeout: float = 0.0
    """Seconds; 0: no limit."""

    def for_torch(self) -> dict[str, Any]:
        """Return those that torch's `DataLoader` takes."""
        return {key: value for key, value in asdict(self).items() if key != "prefetch_threads"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Failed:
    """An error on its way to the loop."""

    error: StreampackError


class _Tasks:
    """What torch takes for its sampler: the tasks of the iteration that begins."""

    tasks: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tasks)


class _Reads(Dataset[Any]):
    """What a worker runs: some tasks for an index, as many batches for an item."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __getitem__(self, tasks: tuple[Any, ...]) -> deque[Any]:
        results: deque[Any] = deque()
        for task in tasks:
            results.append(self._result(task))
            if isinstance(results[-1], _Failed):
                break
        return results

    def _result(self, task: Any) -> Any:
        try:
            return self._read(task)
        except StreampackError as error:
            # torch would make a new error of its text alone.
            error.add_note(f"in reading worker {os.getpid()}")
            with suppress(Exception):
                pickle.dumps(error)
                return _Failed(error=error)
            raise


def _in_groups(tasks: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Yield tasks, `size` at a time.

    >>> list(_in_groups(range(5), 2))
    [(0, 1), (2, 3), (4,)]
    """
    left = iter(tasks)
    while group := tuple(islice(left, size)):
        yield group


def _as_it_is(batch: Any) -> Any:
    # torch's default would turn the tuples of some formats into lists.
    return batch


class ReadingWorkers:
    """Worker processes that hold no state; new ones are made where they died.

    They serve one iteration at a time, the latest: what they read, and where they put it, is its.

    Args:
        read: What they run.
        options: How they are started.
        at_once: Tasks that go to a worker together, and whose results come back together.
    """

    def __init__(self, read: Read, options: WorkerOptions, *, at_once: int = 1) -> None:
        self._at_once = at_once
        self._sampler = _Tasks()
        loader = WorkersLoader(
            _Reads(read),
            sampler=self._sampler,
            batch_size=None,
            collate_fn=_as_it_is,
            **options.for_torch(),
        )
        self._iterations = Iterations(loader)
        self._is_lasting = options.persistent_workers
        self._begun: weakref.ref[Iteration] | None = None
        self._num_begun = 0
        self._pid = os.getpid()

    @property
    def are_of_this_process(self) -> bool:
        """Whether they were made here, and not before this process was forked."""
        return self._pid == os.getpid()

    def results(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield what workers made of some tasks, in order.

        Raises:
            WorkerError: If a worker died, or time was up; the next call makes new ones.
            ConfigError: If another call came after this one, or this process was forked since.
            StreampackError: What a worker raised.
        """
        iteration = self._begin(tasks)
        number = self._num_begun
        self._check_turn(number)
        for results in iteration:
            while results:
                result = results.popleft()
                if isinstance(result, _Failed):
                    raise result.error
                yield result
                del result
                self._check_turn(number)
                iteration.check()

    def _begin(self, tasks: Iterable[Any]) -> Iteration:
        before = None if self._begun is None else self._begun()
        if before is not None and not self._is_lasting:
            before.end()  # its workers would go on to write where the new ones do
        self._sampler.tasks = _in_groups(tasks, self._at_once)
        begun = self._iterations.begin()
        self._begun = weakref.ref(begun)
        self._num_begun += 1
        return begun

    def _check_turn(self, number: int) -> None:
        if not self.are_of_this_process:
            raise ConfigError(
                f"this iteration was begun in process {self._pid}, whose workers serve it; in the "
                f"forked process {os.getpid()} iterate the loader anew"
            )
        if number != self._num_begun:
            raise ConfigError(
                "a later iteration of this loader has begun, and num_workers > 0 serve one at a "
                "time; end one before the next, or make a PackedDataLoader for each"
            )


def pin(batch: Any) -> Any:
    """Return a batch, of whatever format, with its tensors in pinned memory."""
    if isinstance(batch, dict):
        return {key: pin(value) for key, value in batch.items()}
    if hasattr(batch, "_fields"):  # a NamedTuple takes its values one by one
        return type(batch)(*map(pin, batch))
    if isinstance(batch, tuple | list):
        return type(batch)(pin(value) for value in batch)
    return batch.pin_memory() if hasattr(batch, "pin_memory") else batch


def check_socket_path(folder: str) -> None:
    """Refuse workers whose sockets cannot be named: torch would wait for their batches for ever.

    Args:
        folder: The system's temporary folder.

    Raises:
        ConfigError: Naming the bytes of a path that there may be.
    """
    num_bytes = len(os.fsencode(folder + SOCKET_NAME))
    if num_bytes > MAX_SOCKET_PATH:
        raise ConfigError(
            f"the temporary folder {folder} is too long for workers: their sockets' paths would "
            f"have {num_bytes} bytes, and may have {MAX_SOCKET_PATH}; set TMPDIR to a shorter one, "
            "or num_workers=0"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """What is free where workers hand batches over, and what each rank may take of it."""

    folder: Path
    free: int | None
    """Bytes; None: nobody knows, torch will use another place, or say so."""
    lock_bytes: int
    """What a rank takes for the locks of its queues, which lie there, too."""
    num_ranks: int

    @classmethod
    def asked(cls, num_workers: int, num_ranks: int, folder: Path = SHARED_MEMORY) -> SharedMemory:
        """Ask the system.

        Args:
            num_workers: Workers of a rank.
            num_ranks: Ranks that share the folder.
            folder: Where torch puts batches.
        """
        free = None
        with suppress(OSError):
            status = os.statvfs(folder)
            free = status.f_bavail * status.f_frsize
        # A queue for each worker and one for all, and an event; each lock takes a page.
        num_locks = (num_workers + 1) * QUEUE_LOCKS + EVENT_LOCKS
        return cls(folder=folder, free=free, lock_bytes=num_locks * PAGESIZE, num_ranks=num_ranks)

    def _needed(self, num_bytes: int) -> int:
        return self.num_ranks * (num_bytes + self.lock_bytes)

    def has(self, num_bytes: int) -> bool:
        """Whether every rank can have this many bytes for its batches."""
        return self.free is None or self._needed(num_bytes) <= self.free

    def check(self, num_bytes: int) -> None:
        """Refuse workers whose batches do not fit where they are handed over.

        Args:
            num_bytes: What the batches of a rank take there.

        Raises:
            ConfigError: Naming the bytes needed, and those that are free.
        """
        if not self.has(num_bytes):
            raise ConfigError(
                f"{self.folder} has {self.free} bytes free, but workers hand batches over in it "
                f"and may need {self._needed(num_bytes)}; make it larger (docker: --shm-size), "
                "lower batch_size or prefetch_factor, or set num_workers=0, which needs none"
            )
