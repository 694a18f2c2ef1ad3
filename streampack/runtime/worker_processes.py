"""Start and end worker processes in a thread that no signal handler interrupts.

::

    keeper, a thread    starts the processes      waits for a request      ends them

A weak reference's callback, a C function, tells the keeper that the session is no longer
referenced. A forked child closes its copies of the sockets.
"""

from __future__ import annotations

import _thread
import atexit
import multiprocessing
import os
import queue
import signal
import socket
import struct
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from streampack.errors import naming_limits
from streampack.runtime.torch_worker import TorchWorker
from streampack.runtime.worker_main import Serve, run_worker

LEAVE_S = 2.0  # time limit for workers to end by themselves
AWAKE_S = 0.1  # poll interval while waiting for the keeper


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of prefetching; except `prefetch_threads`, torch's arguments of the same names."""

    num_workers: int
    prefetch_factor: int
    prefetch_threads: int = 1
    pin_memory: bool = False
    persistent_workers: bool = True
    multiprocessing_context: str | None = None
    timeout: float = 0.0
    """Seconds; 0: no limit."""


class WorkerProcesses:
    """The processes of a session, which end when it is freed.

    All methods but `end` and `wait_until` run in the keeper.
    """

    def __init__(self, serve: Serve, options: WorkerOptions, session: object) -> None:
        self._serve = serve
        self._options = options
        self._base_seed = int(torch.empty((), dtype=torch.int64).random_().item())
        self.processes: list[Any] = []
        self.sockets: list[Any] = []
        self.is_started = self.is_closing = self.is_over = False
        self.pids: list[int] = []
        self.exitcodes: list[int | None] = []
        self.failure: Exception | None = None
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._session = weakref.ref(session, self._asked.put)
        _thread.start_new_thread(self._keep, ())

    def end(self, *, is_urgent: bool = False) -> None:
        """End the processes and wait for them; with `is_urgent`, cancel their tasks."""
        self._asked.put(is_urgent)
        self.wait_until(lambda: self.is_over)

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        # The queue only wakes: an interrupt may lose its item, so the condition is polled again.
        while not is_done():
            with suppress(queue.Empty):
                self._told.get(timeout=AWAKE_S)

    def _keep(self) -> None:
        _KEPT.add(self)
        try:
            with naming_limits(", or set num_workers=0"):
                self._start()
        except Exception as failure:  # raised in the loop
            self.failure = failure
        self.is_started = True
        self._told.put(None)
        is_urgent = self._asked.get() is True
        self._close()
        if not is_urgent:
            self._join()
        for process in self.processes:
            if process.is_alive():
                process.kill()  # it has only kernel locks, which are released
        self._join()
        self.exitcodes = [process.exitcode for process in self.processes]
        # Here, so that no interrupt can arrive while the loop drops the last reference to them.
        self.processes.clear()
        _KEPT.discard(self)
        self.is_over = True
        self._told.put(None)

    def _start(self) -> None:
        context: Any = multiprocessing.get_context(self._options.multiprocessing_context)
        for number in range(self._options.num_workers):
            ours, theirs = context.Pipe()
            self.sockets.append(ours)
            _limit(ours, self._options.timeout)
            worker = TorchWorker(number, self._options.num_workers, self._base_seed)
            method = context.get_start_method()
            # A fork server keeps the variables that were set when it was started.
            environment = dict(os.environ) if method == "forkserver" else None
            # So that a forked worker runs no handler of the trainer before it drops them.
            blocked = signal.valid_signals() if method == "fork" else ()
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
            try:
                process = context.Process(
                    target=run_worker,
                    args=(theirs, self._serve, worker, mask, environment),
                    daemon=True,
                )
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                theirs.close()
            # Workers ignore SIGTERM, which multiprocessing sends at exit before it waits.
            process._popen.terminate = process._popen.kill
            self.processes.append(process)
            self.pids.append(process.pid)

    def _close(self) -> None:
        # Before the first close: until it is noted, a closed socket's number may belong to another
        # file, and a child that any library forks in between would close that.
        self.is_closing = True
        for ours in self.sockets:
            with suppress(OSError), _socket_of(ours) as copied:
                copied.shutdown(socket.SHUT_RDWR)  # such a child keeps a copy: no end by itself
            ours.close()

    def forget(self) -> None:
        """Close a forked child's copies: workers would not notice the end of the training process.

        The keeper is not in that process.
        """
        self.is_over = True
        if not self.is_closing:
            for ours in self.sockets:
                ours.close()

    def _join(self) -> None:
        deadline_s = time.monotonic() + LEAVE_S
        for process in self.processes:
            process.join(max(0.0, deadline_s - time.monotonic()))


_KEPT: set[WorkerProcesses] = set()


def _forget_all() -> None:
    for kept in list(_KEPT):
        kept.forget()
    _KEPT.clear()


def _end_all() -> None:
    """End the workers before the interpreter clears its modules."""
    for kept in list(_KEPT):
        kept.end()


os.register_at_fork(after_in_child=_forget_all)
atexit.register(_end_all)


def _limit(connection: Any, timeout_s: float) -> None:
    """Limit each read from a worker, or write to it, to this many seconds."""
    if timeout_s:
        seconds = int(timeout_s)
        limit = struct.pack("ll", seconds, int((timeout_s - seconds) * 1e6) or 1)
        with _socket_of(connection) as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _socket_of(connection: Any) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))
