"""Reading processes: plans in, batches out in order; a dead one is an error at once, by name.

::

    plans --torch's DataLoader--> worker 0  batches 0, 2, ...
                                  worker 1  batches 1, 3, ...      killed -> WorkerError, new ones

torch looks every 5 s whether its workers live, and besides raises from a signal handler wherever
the training loop happens to be, inside an optimizer step too. Here the loop itself looks, each time
it asks for a batch; a worker's own failure comes as the error it was.

Cost: a look is some microseconds a worker and batch.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from mmap import PAGESIZE
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from streampack.errors import ConfigError, StreampackError, WorkerError
from streampack.load.iterations import Iteration, Iterations

__all__ = ["ReadingWorkers", "WorkerOptions", "check_shared_memory", "check_socket_path", "pin"]

SHARED_MEMORY = Path("/dev/shm")
QUEUE_LOCKS, EVENT_LOCKS = 3, 5  # files of multiprocessing's Queue and Event
DYING_S = 2.0
MAX_SOCKET_PATH = 107  # bytes of a Unix socket's address
SOCKET_NAME = "/pymp-12345678/listener-12345678"  # how long torch's are, in the temporary folder
REASONS = {
    signal.SIGKILL: "the system may have run out of memory: see `dmesg`, use fewer workers",
    signal.SIGBUS: f"{SHARED_MEMORY} may be full, or a shard was cut short: use num_workers=0",
}


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
    """What a worker runs: a task for an index, a batch for an item."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __getitem__(self, task: Any) -> Any:
        try:
            return self._read(task)
        except StreampackError as error:
            # torch would make a new error of its text alone.
            error.add_note(f"in reading worker {os.getpid()}")
            with suppress(Exception):
                pickle.dumps(error)
                return _Failed(error=error)
            raise


def _as_it_is(batch: Any) -> Any:
    # torch's default would turn the tuples of some formats into lists.
    return batch


class ReadingWorkers:
    """Worker processes that hold no state; new ones are made where they died.

    Args:
        read: What they run.
        options: How they are started.
    """

    def __init__(self, read: Read, options: WorkerOptions) -> None:
        self._read = read
        self._options = options
        self._sampler = _Tasks()
        self._iterations = self._make()

    def _make(self) -> Iterations:
        loader = DataLoader(
            _Reads(self._read),
            sampler=self._sampler,
            batch_size=None,
            collate_fn=_as_it_is,
            **self._options.for_torch(),
        )
        return Iterations(loader)

    def results(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield what workers made of some tasks, in order.

        Raises:
            WorkerError: If a worker died; the next call makes new ones.
            StreampackError: What a worker raised.
        """
        self._sampler.tasks = tasks
        results = self._begin()
        _unwatch(results.batches)
        processes = list(getattr(results.batches, "_workers", ()))
        while True:
            self._check(processes, None)
            try:
                result = next(results)
            except StopIteration:
                return
            except (RuntimeError, EOFError, OSError) as error:
                _await_death(processes)
                self._check(processes, error)
                raise
            if isinstance(result, _Failed):
                raise result.error
            yield result
            del result

    def _begin(self) -> Iteration:
        try:
            return self._iterations.begin()
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            self._iterations = self._make()
            raise WorkerError(f"a reading worker died at its start: {error}") from error

    def _check(self, processes: list[Any], error: Exception | None) -> None:
        """Raise if a worker died, and make new workers."""
        dead = [n for n, process in enumerate(processes) if not process.is_alive()]
        if not dead:
            return
        number = next((n for n in dead if processes[n].exitcode), dead[0])
        process = processes[number]
        for other in processes:
            other.terminate()  # it holds nothing but locks of the kernel's, which are freed
        _remove_remains(processes)
        self._iterations = self._make()
        raise WorkerError(
            f"reading worker {number} (pid {process.pid}) died: {_exit_text(process.exitcode)}; "
            "load the last state into the loader and iterate again"
        ) from error


def _await_death(processes: list[Any]) -> None:
    """Wait a moment for the death of a worker whose end of the hand-over broke."""
    # Its files are closed before it is seen dead, and its sentinel is one of them.
    broken = connection.wait([process.sentinel for process in processes], DYING_S)
    for process in processes:
        if process.sentinel in broken:
            process.join(DYING_S)


def _remove_remains(processes: list[Any]) -> None:
    """Remove what workers of ours were about to hand over when they died."""
    deadline_s = time.monotonic() + DYING_S
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
        if not process.is_alive():
            # torch gives a tensor's memory a name, and takes it back once the tensor arrived.
            for path in SHARED_MEMORY.glob(f"torch_{process.pid}_*"):
                path.unlink(missing_ok=True)


def _unwatch(batches: Any) -> None:
    """Let torch's signal handler forget the workers of an iteration; where it cannot, it stays."""
    if getattr(batches, "_worker_pids_set", False):
        with suppress(AttributeError, ValueError):
            signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
            batches._worker_pids_set = False


def _exit_text(exitcode: int | None) -> str:
    """Say how a process ended.

    >>> _exit_text(1)
    'exit code 1'
    >>> _exit_text(-11)
    'killed by SIGSEGV'
    """
    if exitcode is None or exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        number = signal.Signals(-exitcode)
    except ValueError:
        return f"killed by signal {-exitcode}"
    reason = REASONS.get(number)
    return f"killed by {number.name}" + (f" ({reason})" if reason else "")


def pin(batch: Any) -> Any:
    """Return a batch, of whatever format, with its tensors in pinned memory."""
    if isinstance(batch, dict):
        return {key: pin(value) for key, value in batch.items()}
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


def check_shared_memory(
    num_bytes: int, num_workers: int, num_ranks: int, folder: Path = SHARED_MEMORY
) -> None:
    """Refuse workers whose batches do not fit where they are handed over.

    Args:
        num_bytes: What the batches of a rank take there.
        num_workers: Workers of a rank; the locks of their queues lie there, too.
        num_ranks: Ranks that share the folder.
        folder: Where torch puts them.

    Raises:
        ConfigError: Naming the bytes needed, and those that are free.
    """
    try:
        status = os.statvfs(folder)
    except OSError:
        return  # torch will use another place, or say so
    free = status.f_bavail * status.f_frsize
    # A queue for each worker and one for all, and an event; each lock takes a page.
    num_locks = (num_workers + 1) * QUEUE_LOCKS + EVENT_LOCKS
    needed = num_ranks * (num_bytes + num_locks * PAGESIZE)
    if needed > free:
        raise ConfigError(
            f"{folder} has {free} bytes free, but workers hand batches over in it and may need "
            f"{needed}; make it larger (docker: --shm-size), lower batch_size or prefetch_factor, "
            "or set num_workers=0, which needs none"
        )
