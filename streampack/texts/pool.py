"""Worker processes that read and tokenize rows, and the pool that all streams of a process share.

::

    thread 1  pool.run(task) --> worker 1     each blocks its thread until the task is done
    thread 2  pool.run(task) --> worker 2
    thread 3  pool.run(task)     waits for one of them

    start_worker()  --> Popen: python -c "from MODULE import serve_tasks; serve_tasks(...)"
    pipe.send(task) --> serve_tasks: pipe.recv()
    receive(pipe, process) <-- pipe.send(outcome)

A worker of the pool starts when it is needed, and ends once it had nothing to do for a minute, or
with this process. A forked process starts its own. They are not multiprocessing's: those import the
caller's script, and a script that makes a dataset of rows need not guard its lines by the name
"__main__". Forks would copy threads.

Cost: about 0.4 s for a worker to start, 60 MB with a tokenizer; 0.2 ms for a task.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, TypeAlias, TypeVar, cast

from streampack.errors import StreampackError, WorkerError, naming_limits

IDLE_S = 60.0
END_S = 5.0  # for a worker to end after SIGTERM
WAY_OUT = "run it again: what is finished is kept"

T = TypeVar("T")
Worker: TypeAlias = "tuple[Connection, subprocess.Popen[bytes]]"


class TokenizerPool:
    """Up to `num_workers` worker processes, of one thread each; any thread may use it."""

    def __init__(self, num_workers: int) -> None:
        # One permit per worker that may work; a queue, because semaphores are slow Python code.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(num_workers):
            self._room.put(None)
        self._idle: deque[Worker] = deque()

    def run(self, task: Callable[[], T]) -> T:
        """Call a function that can be pickled in a worker, and return or raise what it does.

        Raises:
            WorkerError: If two workers died of it.
        """
        self._room.get()
        try:
            try:
                outcome = self._ask(task, self._worker())
            except WorkerError:
                # A new one: those that were idle may all be about to end.
                outcome = self._ask(task, start_worker(1, IDLE_S))
        finally:
            self._room.put(None)
        if isinstance(outcome, BaseException):
            raise outcome
        return cast("T", outcome)

    def _ask(self, task: Callable[[], object], worker: Worker) -> object:
        pipe, process = worker
        try:
            with suppress(ConnectionError):  # it died, which `receive` explains
                pipe.send(task)
            outcome: object = receive(pipe, process)
        except BaseException:
            end_workers({pipe: process})  # its answer would be taken for another task's
            raise
        self._idle.append(worker)
        return outcome

    def _worker(self) -> Worker:
        with suppress(IndexError):
            while True:
                pipe, process = self._idle.pop()
                if process.poll() is None:
                    return pipe, process
                pipe.close()
        return start_worker(1, IDLE_S)

    def close(self) -> None:
        """End the workers that have nothing to do."""
        with suppress(IndexError):
            while True:
                end_workers(dict([self._idle.pop()]))


_pools: dict[tuple[int, tuple[int, int], int], TokenizerPool] = {}


def tokenizer_pool(num_workers: int) -> TokenizerPool:
    """Return this process's pool of so many workers."""
    # The workers of a parent are its own, and relative paths mean what they did at their start.
    # Its number is that of a directory that was renamed or deleted, too.
    directory = os.stat(".")
    key = os.getpid(), (directory.st_dev, directory.st_ino), num_workers
    if key not in _pools:
        _pools.setdefault(key, TokenizerPool(num_workers))
    return _pools[key]


@atexit.register
def _close_pools() -> None:
    for (pid, *_), pool in list(_pools.items()):
        if pid == os.getpid():
            pool.close()


class _Deferred(ModuleType):
    """A module that is imported when something of it is used.

    transformers imports torch for a tokenizer, which takes seconds, and does not use it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = find_spec(name)

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def serve_tasks(descriptor: int, num_threads: int, idle_s: float | None) -> None:
    """Call the functions that come through a pipe until it is closed, or none comes for `idle_s`.

    A worker process runs this. It sends what a function returns, and each item of a generator.
    """
    os.environ["RAYON_NUM_THREADS"] = str(num_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"
    sys.modules["torch"] = _Deferred("torch")
    pipe = Connection(descriptor)
    # Once the main process has gone, sending fails and this process ends.
    with suppress(EOFError, ConnectionError):
        while pipe.poll(idle_s):
            for outcome in outcomes(pipe.recv()):
                pipe.send(outcome)


def start_worker(
    num_threads: int, idle_s: float | None
) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start a process that serves tasks, and ends if idle for `idle_s`; return its pipe, too."""
    ours, theirs = multiprocessing.Pipe()
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve_tasks; "
        f"serve_tasks({theirs.fileno()}, {num_threads}, {idle_s})"
    )
    # The worker inherits the blocked signal from its first moment on: a terminal's Ctrl-C reaches
    # only this process, which then terminates it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with naming_limits():
            process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
    return ours, process


def receive(pipe: Connection, process: subprocess.Popen[bytes]) -> Any:
    """Return what a worker sent; a WorkerError says that it ended."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionError) as error:
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        code = process.returncode
        raise WorkerError(
            f"a worker process ended with exit code {code}"
            f"{' (killed: perhaps memory ran out; try fewer workers)' if code == -9 else ''}; "
            f"{WAY_OUT}"
        ) from error


def outcomes(task: Callable[[], object]) -> Iterator[Any]:
    """Yield what a function returns, or each item of a generator, and last an error that it raises.

    Another process can raise the error, which keeps its type if it is one of ours.
    """
    try:
        found = task()
        yield from found if isinstance(found, Generator) else (found,)
    except (StreampackError, OSError) as error:
        yield error.with_traceback(None)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        yield WorkerError(f"a task failed; {WAY_OUT}, or report this:\n{text}")


def end_workers(workers: Mapping[Connection, subprocess.Popen[bytes]]) -> None:
    """End worker processes, whatever they do."""
    for pipe, process in workers.items():
        pipe.close()
        process.terminate()
    for process in workers.values():
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
