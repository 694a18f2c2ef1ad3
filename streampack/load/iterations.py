"""torch's iterations over workers: begun, watched and ended without a place where they can hang.

::

    loader --begin--> Iteration --next--> batches
                          |                  '-- a worker is dead -> WorkerError, by name
                          '-- nobody holds it --> workers are told to end, and waited for

What torch does by itself, and what is done here:

- It looks every 5 s whether its workers live, and besides raises from a signal handler wherever the
  training loop happens to be, inside an optimizer step too, or inside a queue whose lock then stays
  taken. Here its handler never hears of the workers; whoever asks for a batch looks.
- With a `timeout` it raises after so many seconds without saying whom it waited for, and leaves the
  workers to be waited for. Here that one is named, and all of them are killed: one that is stopped
  hears nothing else.
- It ends its workers when its iterator is deleted. Where the garbage collector finds that, in a
  cycle such as a kept traceback makes, the queue of the message is closed before: torch then waits
  5 s for each worker, in whichever thread happened to collect, and a file may be closed twice. Here
  what ends the workers holds the iterator, so that the collector never finds it with its queues.
- It tells workers to end through an event and queues, whose locks a killed worker or an interrupted
  loop may have left taken, and waits for them. Here dead workers' companions are killed, and a lock
  that nobody gives back is given back.

Cost: a look at the workers is some microseconds a worker and batch.
"""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from streampack.errors import ConfigError, WorkerError

__all__ = ["SHARED_MEMORY", "Iteration", "Iterations", "WorkersLoader"]

SHARED_MEMORY = Path("/dev/shm")
DYING_S = 2.0
LOCKED_S = 1.0  # a queue's lock is held for microseconds by whoever lives
TIMED_OUT = "DataLoader timed out"  # how torch's error begins
REASONS = {
    signal.SIGKILL: "the system may have run out of memory: see `dmesg`, use fewer workers",
    signal.SIGBUS: f"{SHARED_MEMORY} may be full, or a shard was cut short: use num_workers=0",
}


class _Batches(_MultiProcessingDataLoaderIter):
    """torch's iterator over workers that its signal handler does not know."""

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        # The workers were started and made known just before; the first plans are sent here.
        if self._worker_pids_set:
            signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
            self._worker_pids_set = False
        try:
            super()._reset(loader, first_iter)
        except BaseException:  # of the first plans; nobody is given this iterator then
            if first_iter:
                _end(self, os.getpid())
            raise


class WorkersLoader(DataLoader[Any]):
    """torch's loader with `num_workers` > 0, for `Iterations`."""

    def _get_iterator(self) -> Any:
        self.check_worker_number_rationality()
        return _Batches(self)

    def keeps(self, batches: Any) -> bool:
        """Whether the next iteration takes the workers of an iterator."""
        return self._iterator is batches

    def forget_workers(self) -> None:
        """Make new workers for the next iteration."""
        self._iterator = None


class Iteration:
    """torch's iterator over its workers, which end when nobody holds this any more."""

    def __init__(self, batches: Any, loader: WorkersLoader) -> None:
        self.batches = batches
        self.pid = os.getpid()
        self._loader = loader
        self._workers: list[Any] = list(batches._workers)
        self.end = weakref.finalize(self, _end, batches, self.pid)
        """Ends the workers now."""
        self.end.atexit = False  # torch has its own

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            WorkerError: If a worker died, or gave nothing for the loader's `timeout`; the next
                iteration makes new ones.
        """
        self.check()
        try:
            return next(self.batches)
        except (RuntimeError, EOFError, OSError) as error:
            if str(error).startswith(TIMED_OUT):
                number = self.batches._task_info[self.batches._rcvd_idx][0]
                text = f"gave nothing for {self._loader.timeout} s (timeout): it is stopped, waits"
                raise self._failure(
                    number, f"{text} for what does not come, or needs longer"
                ) from error
            _await_death(self._workers)
            dead = [n for n, worker in enumerate(self._workers) if not worker.is_alive()]
            self._check(dead, error)
            raise

    def check(self) -> None:
        """Look whether all workers live.

        Raises:
            WorkerError: If one died; the next iteration makes new ones.
        """
        self._check([n for n, worker in enumerate(self._workers) if worker.exitcode], None)

    def _check(self, dead: list[int], error: Exception | None) -> None:
        """Raise for dead workers."""
        if dead:
            number = next((n for n in dead if self._workers[n].exitcode), dead[0])
            text = f"died: {_exit_text(self._workers[number].exitcode)}"
            raise self._failure(number, text) from error

    def _failure(self, number: int, text: str) -> WorkerError:
        """End and forget all workers; return what is to be raised of one of them."""
        _kill(self._workers)
        _remove_remains(self._workers)
        self._loader.forget_workers()
        return WorkerError(
            f"reading worker {number} (pid {self._workers[number].pid}) {text}; load the last "
            "state into the loader and iterate again"
        )


class Iterations:
    """The iterations of a torch loader with workers, one after the other.

    Args:
        loader: With `num_workers` > 0.
    """

    def __init__(self, loader: WorkersLoader) -> None:
        self._loader = loader
        self._last: Iteration | None = None

    def begin(self) -> Iteration:
        """Begin the next one; workers that live on are those of the one before.

        Raises:
            WorkerError: If a worker died, since the last iteration or while they were started.
            ConfigError: If those that live on are of the process that this one was forked from.
        """
        last, self._last = self._last, None
        if last is not None and self._loader.keeps(last.batches):
            self._check_last(last)
        try:
            batches = iter(self._loader)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            self._loader.forget_workers()
            raise WorkerError(f"a reading worker died at its start: {error}") from error
        is_same = last is not None and last.batches is batches
        begun = last if last is not None and is_same else Iteration(batches, self._loader)
        if self._loader.persistent_workers:
            self._last = begun
        return begun

    def _check_last(self, last: Iteration) -> None:
        if last.pid == os.getpid():
            last.check()
            return
        self._last = last
        raise ConfigError(
            f"the workers of this loader serve process {last.pid}, from which this one was forked; "
            "make a PackedDataLoader here, or set persistent_workers=False"
        )


def _end(batches: Any, pid: int) -> None:
    if os.getpid() != pid:
        batches._shutdown = True  # a forked child must not end its parent's workers
        return
    _free_queues(batches)
    if any(worker.exitcode for worker in batches._workers):
        _end_killed(batches)
    else:
        batches._shutdown_workers()
        _kill(batches._workers)  # one that is stopped did not hear of it
    for queue in batches._index_queues:
        if queue._thread is not None:
            queue._thread.join(LOCKED_S)


def _end_killed(batches: Any) -> None:
    """End what torch would wait for: a killed worker may hold the lock of its event."""
    batches._shutdown = True
    _kill(batches._workers)
    for queue in batches._index_queues:
        queue.cancel_join_thread()
        queue.close()
    if hasattr(batches, "_pin_memory_thread_done_event"):
        batches._pin_memory_thread_done_event.set()


def _free_queues(batches: Any) -> None:
    """Give back the locks with which an interrupt left this process's side of the queues."""
    for queue in batches._index_queues:
        lock = queue._notempty
        lock.acquire(timeout=LOCKED_S)
        lock.release()


def _kill(workers: list[Any]) -> None:
    for worker in workers:
        worker.terminate()  # it holds nothing but locks of the kernel's, which are freed
    _await_all(workers)
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    _await_all(workers)


def _await_all(workers: list[Any]) -> None:
    deadline_s = time.monotonic() + DYING_S
    for worker in workers:
        worker.join(max(0.0, deadline_s - time.monotonic()))


def _await_death(workers: list[Any]) -> None:
    """Wait a moment for the death of a worker whose end of the hand-over broke."""
    # Its files are closed before it is seen dead, and its sentinel is one of them.
    broken = connection.wait([worker.sentinel for worker in workers], DYING_S)
    for worker in workers:
        if worker.sentinel in broken:
            worker.join(DYING_S)


def _remove_remains(workers: list[Any]) -> None:
    """Remove what workers of ours were about to hand over when they died."""
    for worker in workers:
        if not worker.is_alive():
            # torch gives a tensor's memory a name, and takes it back once the tensor arrived.
            for path in SHARED_MEMORY.glob(f"torch_{worker.pid}_*"):
                path.unlink(missing_ok=True)


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
