"""Worker processes, and the messages between them and the training loop.

::

    training loop                       worker 0, 1, ...
    (n, BEGIN, start)  --- socket --->  sets up the work of iteration n
    (n, None, task)    -------------->  work(task)
    (n, results)       <--------------  a pickle, then the bytes of all tensors

    keeper, a thread    starts the processes      waits for a request      ends them

A signal handler runs in the main thread, between almost any two instructions, and may raise. So:

- The keeper starts and ends the processes, because signal handlers never run in its thread.
- The loop marks a session as torn before it uses a socket, and as whole afterwards. A session left
  torn by an interrupt is never reused: its workers end, and the next iteration starts new ones.
- A weak reference tells the keeper that the session is no longer referenced. Its callback is a C
  function, so no interrupt can skip it, even one that skips other clean-up.

A worker's death, or its silence for `timeout` seconds, is noticed by the next request for a result.
Workers ignore Ctrl-C. They end when the other end of their socket closes, as it does when the
training process dies. A forked child closes its copies of the sockets.

Cost: 50 us per message, two copies of the tensors.
"""

from __future__ import annotations

import _thread
import atexit
import copy
import multiprocessing
import os
import pickle
import queue
import random
import select
import signal
import socket
import struct
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import _utils

from streampack.errors import ConfigError, WorkerError, naming_limits
from streampack.runtime.flat_batch import FlatBatch, by_value, flatten

SHARED_MEMORY = Path("/dev/shm")
LEAVE_S = 2.0  # time limit for workers to end by themselves
ORPHANED_S = 5.0  # time limit for the task of a worker that is no longer needed
AWAKE_S = 0.1  # poll interval while waiting for the keeper
REASONS = {
    signal.SIGKILL: "the system may have run out of memory: see `dmesg`, use fewer workers",
    signal.SIGBUS: f"{SHARED_MEMORY} may be full: use num_workers=0; or a local shard was cut "
    "short while it was read: write the stream again",
}

# From a task to results; to an empty list if the worker has no more in this iteration.
Work: TypeAlias = Callable[[Any], list[Any]]
Serve: TypeAlias = Callable[[Any], Work]


class _Mark(Enum):
    """Marks messages other than tasks and results."""

    BEGIN = 0
    """To a worker: begin an iteration. From it: it has begun."""


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Failed:
    """An error on its way to the training loop."""

    error: Exception

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """Wrap an error in a picklable form; one that cannot be rebuilt is sent as its text."""
        told = "".join(traceback.format_exception(error))
        try:
            pickle.dumps(copy.copy(error))
        except Exception:
            error = RuntimeError(told)
        error.add_note(f"in reading worker {os.getpid()}")
        if error.__traceback__ is not None:
            error.add_note(told)
        return cls(error=error)


class _Kept:
    """The processes of a session; all methods but `end` and `wait_until` run in the keeper.

    Args:
        serve: Makes the work of an iteration, in each worker.
        options: How the processes are started.
        session: The loop's session; when it is freed, the processes end.
    """

    def __init__(self, serve: Serve, options: WorkerOptions, session: object) -> None:
        self._serve = serve
        self._options = options
        self._base_seed = int(torch.empty((), dtype=torch.int64).random_().item())
        self.processes: list[Any] = []
        self.sockets: list[Any] = []
        self.is_started = self.is_over = False
        self.pids: list[int] = []
        self.exitcodes: list[int | None] = []
        self.failure: Exception | None = None
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._session = weakref.ref(session, self._asked.put)
        _thread.start_new_thread(self._keep, ())

    def end(self, *, at_once: bool = False) -> None:
        """End the processes and wait for them; with `at_once`, cancel their tasks."""
        self._asked.put(at_once)
        self.wait_until(lambda: self.is_over)

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait for the keeper."""
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
        at_once = self._asked.get() is True
        with _FORKING[0]:
            for each in self.sockets:
                each.close()
        if not at_once:
            self._join()
        for process in self.processes:
            if process.is_alive():
                process.kill()  # it holds only kernel locks, which are released
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
            info = (number, self._options.num_workers, self._base_seed)
            process = context.Process(target=_work, args=(theirs, self._serve, info), daemon=True)
            try:
                with _FORKING[0]:
                    process.start()
            finally:
                theirs.close()
            self.processes.append(process)
            self.pids.append(process.pid)

    def _join(self) -> None:
        deadline_s = time.monotonic() + LEAVE_S
        for process in self.processes:
            process.join(max(0.0, deadline_s - time.monotonic()))


_KEPT: set[_Kept] = set()

# Held while a socket is closed, and while a worker is forked: between the close of a file and the
# note of it, its number may already belong to the new worker, which would close its own socket.
_FORKING = [threading.Lock()]


def _forget_all() -> None:
    """Close a forked child's copies: workers would not notice the end of the training process."""
    _FORKING[0] = threading.Lock()  # whose holder is not here
    for kept in list(_KEPT):
        kept.is_over = True  # the keeper is not in this process
        for each in kept.sockets:
            each.close()
    _KEPT.clear()


def _end_all() -> None:
    """End the workers before the interpreter clears its modules."""
    for kept in list(_KEPT):
        kept.end()


os.register_at_fork(after_in_child=_forget_all)
atexit.register(_end_all)


def _limit(ours: Any, timeout_s: float) -> None:
    """Limit each read from a worker, or write to it, to this many seconds."""
    if timeout_s:
        seconds = int(timeout_s)
        limit = struct.pack("ll", seconds, int((timeout_s - seconds) * 1e6) or 1)
        with socket.socket(fileno=os.dup(ours.fileno())) as each:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


class _Session:
    """Workers that serve consecutive iterations, until one dies or the session is torn.

    Args:
        serve: Makes the work of an iteration, in each worker.
        options: How the workers are started.
    """

    def __init__(self, serve: Serve, options: WorkerOptions) -> None:
        self.pid = os.getpid()
        self.iteration = 0
        self.is_torn = True
        self._timeout = options.timeout
        # Files that become ready when a worker dies: by worker; polled together; with its socket.
        self._order: list[int] = []
        self._polls: list[Any] = []
        self._sentinels: Any = select.poll()
        self.kept = _Kept(serve, options, self)

    def begin(self, given: Any) -> None:
        """Begin an iteration with its setup data.

        Raises:
            WorkerError: If the workers cannot be started, or one died.
            ConfigError: If the system's limits leave no room for them.
        """
        is_first = not self.iteration
        if is_first:
            self._watch()
        else:
            self.check()
        self.is_torn = True
        self.iteration += 1
        for worker in range(len(self.kept.pids)):
            self.send(worker, given, _Mark.BEGIN)
        if not is_first:
            # Tasks left over from the last iteration may write to the memory of this one.
            for worker in range(len(self.kept.pids)):
                self._receive(worker, is_begin=True)
        self.is_torn = False

    def _watch(self) -> None:
        kept = self.kept
        kept.wait_until(lambda: kept.is_started)
        if isinstance(kept.failure, ConfigError):
            raise kept.failure
        if kept.failure is not None:
            raise WorkerError(f"reading workers cannot be started: {kept.failure}") from (
                kept.failure
            )
        self._order = [process.sentinel for process in kept.processes]
        self._polls = [select.poll() for _ in self._order]
        for polled, ours in zip(self._polls, kept.sockets, strict=True):
            polled.register(ours.fileno(), select.POLLIN)
        for polled in (self._sentinels, *self._polls):
            for sentinel in self._order:
                polled.register(sentinel, select.POLLIN)

    def check(self) -> None:
        """Check that all workers are alive.

        Raises:
            WorkerError: If one died; the next iteration starts new ones.
        """
        if ready := self._sentinels.poll(0):
            raise self._death(ready) from None

    def send(self, worker: int, task: Any, mark: _Mark | None = None) -> None:
        """Send a message to a worker."""
        was_torn, self.is_torn = self.is_torn, True
        try:
            self.kept.sockets[worker].send((self.iteration, mark, task))
        except OSError as error:
            raise self._broken(worker, error) from error
        self.is_torn = was_torn

    def receive(self, worker: int) -> Any:
        """Wait for the outcome of the oldest task of a worker.

        Raises:
            WorkerError: If a worker died or timed out; the next iteration starts new ones.
        """
        self.check()
        self.is_torn = True
        result = self._receive(worker)
        self.is_torn = False
        return result

    def _receive(self, worker: int, *, is_begin: bool = False) -> Any:
        """Return the next message of this iteration: that it has begun, or a result."""
        ours = self.kept.sockets[worker]
        while True:
            ready = self._polls[worker].poll(self._timeout * 1000 or None)
            if not ready:
                raise self._silence(worker)
            if any(fd != ours.fileno() for fd, _ in ready):
                raise self._death(ready)
            try:
                iteration, content, num_bytes = ours.recv()
                block = _read(ours.fileno(), num_bytes)
            except (EOFError, OSError) as error:
                raise self._broken(worker, error) from error
            if iteration == self.iteration and (content is _Mark.BEGIN) == is_begin:
                return FlatBatch(block, content).unfold()

    def _broken(self, worker: int, error: Exception) -> Exception:
        """Return the error to raise for a broken socket."""
        if isinstance(error, BlockingIOError):
            return self._silence(worker)
        # A dying worker's files, its sentinel among them, are closed before its death is visible.
        ready = self._sentinels.poll(LEAVE_S * 1000)
        return self._death(ready) if ready else error

    def _death(self, ready: list[tuple[int, int]]) -> WorkerError:
        dead = [self._order.index(fd) for fd, _ in ready if fd in self._order]
        self.is_torn = True
        self.kept.end(at_once=True)
        codes = self.kept.exitcodes
        worker = next((each for each in dead if codes[each]), dead[0])
        return self._failure(worker, f"died: {_exit_text(codes[worker])}")

    def _silence(self, worker: int) -> WorkerError:
        self.is_torn = True
        self.kept.end(at_once=True)
        text = f"gave nothing for {self._timeout} s (timeout): it is stopped, waits for what does "
        return self._failure(worker, f"{text}not come, or needs longer")

    def _failure(self, worker: int, text: str) -> WorkerError:
        return WorkerError(
            f"reading worker {worker} (pid {self.kept.pids[worker]}) {text}; load the "
            "last state into the loader and iterate again"
        )


class Pool:
    """Worker processes for one iteration at a time, the latest; dead workers are replaced.

    Args:
        serve: Called in each worker for each iteration, with its setup data; returns the function
            that makes the results of a task.
        options: How workers are started, and how many tasks each has in flight.
    """

    def __init__(self, serve: Serve, options: WorkerOptions) -> None:
        self._serve = serve
        self._options = options
        self._session: _Session | None = None
        self._num_begun = 0
        self._pid = os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """Whether the pool was made in this process, not before a fork."""
        return self._pid == os.getpid()

    def end(self) -> None:
        """End the workers; the next iteration starts new ones."""
        if self._session is not None:
            self._session.kept.end()

    def results(self, tasks: Iterable[Any], *, first: int = 0, given: Any = None) -> Iterator[Any]:
        """Yield the results of all tasks, in order; workers take turns.

        Args:
            tasks: The tasks; the next is taken while a result is awaited.
            first: The worker that begins.
            given: Setup data for `serve`.

        Raises:
            WorkerError: If a worker died or timed out; the next call starts new ones.
            ConfigError: If another call was made since, or this process was forked since.
            Exception: The original error of a worker.
        """
        session = self._begin(given)
        number = self._num_begun
        try:
            for answer in self._answers(session, iter(tasks), first):
                results = deque(answer)
                del answer
                while results:
                    result = results.popleft()
                    if isinstance(result, Failed):
                        raise result.error
                    yield result
                    del result  # do not keep it while the next is made
                    self._check_turn(session, number)
                    session.check()
        finally:
            if session.is_torn or not self._options.persistent_workers:
                session.kept.end()

    def _answers(self, session: _Session, tasks: Iterator[Any], first: int) -> Iterator[list[Any]]:
        num_workers = self._options.num_workers
        turns = [(first + turn) % num_workers for turn in range(num_workers)]
        waiting: deque[int] = deque()  # workers by the order of their tasks
        for worker in turns * self._options.prefetch_factor:
            _give(session, worker, tasks, waiting)
        while waiting:
            worker = waiting.popleft()
            answer = session.receive(worker)
            if answer:
                _give(session, worker, tasks, waiting)
                yield answer
            else:
                waiting = deque(other for other in waiting if other != worker)
            del answer

    def _begin(self, given: Any) -> _Session:
        session = self._session
        if session is not None and (session.is_torn or not self._options.persistent_workers):
            session.kept.end()  # they would write to the memory of the new ones
        if session is None or session.kept.is_over:
            session = self._session = _Session(self._serve, self._options)
        self._num_begun += 1
        session.begin(given)
        return session

    def _check_turn(self, session: _Session, number: int) -> None:
        if session.pid != os.getpid():
            raise ConfigError(
                f"this iteration was begun in process {session.pid}, whose workers serve it; "
                f"iterate the loader again in the forked process {os.getpid()}"
            )
        if number != self._num_begun:
            raise ConfigError(
                "a later iteration of this loader has begun, and num_workers > 0 serve one at a "
                "time; end one before the next, or make a PackedDataLoader for each"
            )


def _give(session: _Session, worker: int, tasks: Iterator[Any], waiting: deque[int]) -> None:
    """Send a worker the next task, if there is one."""
    for task in tasks:
        session.send(worker, task)
        waiting.append(worker)
        return


def _read(fd: int, num_bytes: int) -> torch.Tensor:
    """Read the bytes that follow a message."""
    block = torch.empty(num_bytes, dtype=torch.uint8)
    left = memoryview(block.numpy())  # type: ignore[arg-type]
    while len(left):
        num_read = os.readv(fd, [left])
        if not num_read:
            raise EOFError
        left = left[num_read:]
    return block


def _exit_text(exitcode: int | None) -> str:
    """Describe how a process ended.

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


# Run in a worker.


class _Inbox:
    """Messages sent to a worker, and its latest iteration."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self.messages: queue.SimpleQueue[tuple[int, _Mark | None, Any] | None] = queue.SimpleQueue()
        self.latest = 0
        threading.Thread(target=self._listen, name="streampack-tasks", daemon=True).start()

    def _listen(self) -> None:
        # In a thread, so that a training process that sends never waits for a busy worker.
        with suppress(EOFError, OSError):
            while True:
                message = self._theirs.recv()
                self.latest = message[0]
                self.messages.put(message)
        self.latest = -1
        self.messages.put(None)
        time.sleep(ORPHANED_S)
        os._exit(1)


class _Outbox:
    """Messages from a worker, sent in a thread so that the worker need not wait for the reader."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self._messages: queue.SimpleQueue[tuple[Any, torch.Tensor]] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="streampack-results", daemon=True).start()

    def put(self, iteration: int, result: Any) -> None:
        """Send a result."""
        folded = flatten(result)
        try:
            message = ForkingPickler.dumps((iteration, folded.content, folded.block.nbytes))
        except Exception as error:  # of a batch that cannot be pickled
            folded = flatten([Failed.of(error)])
            message = ForkingPickler.dumps((iteration, folded.content, 0))
        self._messages.put((message, folded.block))

    def _send(self) -> None:
        with suppress(OSError):  # the reader is gone
            while True:
                message, block = self._messages.get()
                self._theirs.send_bytes(message)
                left = memoryview(block.numpy())  # type: ignore[arg-type]
                while len(left):
                    left = left[os.write(self._theirs.fileno(), left) :]
                del message, block, left


def _work(theirs: Any, serve: Serve, info: tuple[int, int, int]) -> None:
    """Run a worker until the other end of its socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training loop handles Ctrl-C
    _introduce(serve, *info)
    ForkingPickler.register(torch.Tensor, by_value)
    inbox, outbox = _Inbox(theirs), _Outbox(theirs)
    work: Work | None = None
    while (message := inbox.messages.get()) is not None:
        iteration, mark, task = message
        if mark is _Mark.BEGIN:
            work = None  # do not keep it while the next is made
            work = _begun(serve, task)
            outbox.put(iteration, _Mark.BEGIN)
        elif work is not None and iteration == inbox.latest:
            outbox.put(iteration, _results(work, task))


def _introduce(dataset: Any, number: int, num_workers: int, base_seed: int) -> None:
    """Seed the process and set torch's worker info, which sources and formats query."""
    seed = base_seed + number
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    _utils.worker._worker_info = _utils.worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=seed, dataset=dataset
    )


def _begun(serve: Serve, given: Any) -> Work:
    try:
        return serve(given)
    except Exception as error:
        failed = Failed.of(error)
        return lambda _: [failed]


def _results(work: Work, task: Any) -> list[Any]:
    try:
        return work(task)
    except Exception as error:
        return [Failed.of(error)]
