"""Worker processes that serve one iteration after another.

::

    training loop                       worker 0, 1, ...
    (n, True, start)   --- socket --->  sets up the work of iteration n      worker_main.py
    (n, False, task)   -------------->  work(task)
    (n, results)       <--------------  results

    keeper, a thread    starts and ends the processes                        worker_processes.py

The loop marks a session as torn before it uses a socket, and as whole afterwards. One that a signal
handler left torn is never reused: its workers end, and the next iteration starts new ones; see
docs/adr/0021. The next request for a result notices a worker's death, or that it was silent for
`timeout` seconds.

Cost: 50 us per message, two copies of the tensors.
"""

from __future__ import annotations

import os
import select
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from streampack.errors import ConfigError, WorkerError
from streampack.runtime.memory_budget import SHARED_MEMORY
from streampack.runtime.worker_main import Failed, Serve, receive_parts, unpickled
from streampack.runtime.worker_processes import LEAVE_S, WorkerOptions, WorkerProcesses

REASONS = {
    signal.SIGKILL: "the system may have run out of memory: see `dmesg`, use fewer workers",
    signal.SIGBUS: f"{SHARED_MEMORY} may be full: use num_workers=0; or a local shard was cut "
    "short while it was read: rewrite the stream",
}


class _Session:
    """Workers that serve consecutive iterations, until one dies or the session is torn."""

    def __init__(self, serve: Serve, options: WorkerOptions) -> None:
        self.pid = os.getpid()
        self.iteration = 0
        self.is_torn = True
        self._timeout = options.timeout
        # Files that become ready when a worker dies: by worker; polled together; with its socket.
        self._order: list[int] = []
        self._polls: list[Any] = []
        self._sentinels: Any = select.poll()
        self.kept = WorkerProcesses(serve, options, self)

    def begin(self, given: Any) -> None:
        is_first = not self.iteration
        if is_first:
            self._watch()
        else:
            self.check()
        self.is_torn = True
        self.iteration += 1
        for worker in range(len(self.kept.pids)):
            self.send(worker, given, is_begin=True)
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
        if ready := self._sentinels.poll(0):
            raise self._death(ready) from None

    def send(self, worker: int, task: Any, *, is_begin: bool = False) -> None:
        was_torn, self.is_torn = self.is_torn, True
        try:
            self.kept.sockets[worker].send((self.iteration, is_begin, task))
        except OSError as error:
            raise self._broken(worker, error) from error
        self.is_torn = was_torn

    def receive(self, worker: int) -> Any:
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
                iteration, parts = receive_parts(ours)
            except (EOFError, OSError) as error:
                raise self._broken(worker, error) from error
            if iteration == self.iteration and (not parts) == is_begin:
                return None if is_begin else unpickled(parts)

    def _broken(self, worker: int, error: Exception) -> Exception:
        if isinstance(error, BlockingIOError):
            return self._silence(worker)
        # A dying worker's files, its sentinel among them, are closed before its death is visible.
        ready = self._sentinels.poll(LEAVE_S * 1000)
        return self._death(ready) if ready else error

    def _death(self, ready: list[tuple[int, int]]) -> WorkerError:
        dead = [self._order.index(fd) for fd, _ in ready if fd in self._order]
        self.is_torn = True
        self.kept.end(is_urgent=True)
        codes = self.kept.exitcodes
        worker = next((number for number in dead if codes[number]), dead[0])
        return self._failure(worker, f"died: {_exit_text(codes[worker])}")

    def _silence(self, worker: int) -> WorkerError:
        self.is_torn = True
        self.kept.end(is_urgent=True)
        text = f"gave nothing for {self._timeout} s (timeout): it is stopped, waits for what does "
        return self._failure(worker, f"{text}not come, or needs longer")

    def _failure(self, worker: int, text: str) -> WorkerError:
        return WorkerError(
            f"reading worker {worker} (pid {self.kept.pids[worker]}) {text}; load the "
            "last state into the loader and restart the iteration"
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
                    self._check_current(session, number)
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

    def _check_current(self, session: _Session, number: int) -> None:
        if session.pid != os.getpid():
            raise ConfigError(
                f"this iteration began in process {session.pid}, and its workers belong to that "
                f"process; begin a new one in the forked process {os.getpid()}"
            )
        if number != self._num_begun:
            raise ConfigError(
                "a later iteration of this loader has begun, and num_workers="
                f"{self._options.num_workers} serve only one at a time; end one before the next, "
                "or make a PackedDataLoader for each"
            )


def _give(session: _Session, worker: int, tasks: Iterator[Any], waiting: deque[int]) -> None:
    for task in tasks:
        session.send(worker, task)
        waiting.append(worker)
        return


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
