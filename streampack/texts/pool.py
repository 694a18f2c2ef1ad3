"""The processes that make token shards, for all streams of this process.

::

    thread 1  pool.run(task) --> worker 1     each blocks its thread until the task is done
    thread 2  pool.run(task) --> worker 2
    thread 3  pool.run(task)     waits for one of them

A worker starts when it is needed, and ends once it had nothing to do for a minute, or with this
process. A forked process starts its own.

Cost: about 0.4 s for a worker to start, 60 MB with a tokenizer; 0.2 ms for a task.
"""

from __future__ import annotations

import atexit
import os
import queue
import subprocess
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeAlias, TypeVar, cast

from streampack.errors import WorkerError
from streampack.texts.workers import end_workers, portable, receive, start_worker

IDLE_S = 60.0
WAY_OUT = "start again: what was tokenized is kept"

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
                outcome = self._ask(task)
            except WorkerError:
                outcome = self._ask(task)
        finally:
            self._room.put(None)
        if isinstance(outcome, BaseException):
            raise outcome
        return cast("T", outcome)

    def _ask(self, task: Callable[[], object]) -> object:
        pipe, process = worker = self._worker()
        try:
            with suppress(ConnectionError):  # it died, which `receive` explains
                pipe.send(task)
            outcome: object = receive(pipe, process, WAY_OUT)
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
        return start_worker(serve_tasks, 1)

    def close(self) -> None:
        """End the workers that have nothing to do."""
        with suppress(IndexError):
            while True:
                end_workers(dict([self._idle.pop()]))


_pools: dict[tuple[int, int], TokenizerPool] = {}


def tokenizer_pool(num_workers: int) -> TokenizerPool:
    """Return this process's pool of so many workers."""
    # Keyed by process: the workers of a parent are its own.
    key = os.getpid(), num_workers
    if key not in _pools:
        _pools.setdefault(key, TokenizerPool(num_workers))
    return _pools[key]


@atexit.register
def _close_pools() -> None:
    for (pid, _), pool in list(_pools.items()):
        if pid == os.getpid():
            pool.close()


def serve_tasks(descriptor: int, num_threads: int) -> None:
    """Call the functions that come through a pipe until it is closed; run in a worker.

    What a function returns is sent, and of a generator each item.
    """
    os.environ["RAYON_NUM_THREADS"] = str(num_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"
    pipe = Connection(descriptor)
    # Once the main process has gone, sending fails and this process ends.
    with suppress(EOFError, ConnectionError):
        while pipe.poll(IDLE_S):
            task = pipe.recv()
            try:
                outcome = task()
            except Exception as error:
                outcome = portable(error, WAY_OUT)
            for each in outcome if isinstance(outcome, Generator) else (outcome,):
                pipe.send(each)
