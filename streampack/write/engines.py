"""Engines: where the parts of a job are written.

::

    tasks --> this process            one part after another
          --> worker processes        one part each at a time, dealt in order
          --> Ray                     a Ray task for each part, on any machine of a cluster
                 '--> Event: counts so far, or the result of a part

Parts may finish in any order. Each is written whole by one process, so an engine has no influence
on bytes. Whatever ends an engine early, finished parts stay.

Cost: 0.4 s to start the worker processes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

from streampack.errors import ConfigError, StreampackError, WorkerError
from streampack.write.part import PartCounts, PartResult, PartTask, write_part

REPORT_S = 0.5  # between reports of a worker
END_S = 5.0  # for a worker to end after SIGTERM
AGAIN = "run the same command again: finished parts are kept"


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to the part of a task."""

    number: int
    """Number of the task."""
    counts: PartCounts
    """Its counts so far."""
    result: PartResult | None = None
    """The part's result, once it is done."""


Report: TypeAlias = Callable[[Event], None]


def run_here(tasks: Sequence[PartTask], report: Report) -> None:
    """Write parts in this process; the tokenizer uses all cores."""
    for number, task in enumerate(tasks):
        result = write_part(task, partial(_report_counts, report, number))
        report(Event(number, result.counts, result))


def _report_counts(report: Report, number: int, counts: PartCounts) -> None:
    report(Event(number, counts))


@dataclass(slots=True)
class _Worker:
    process: Any
    pipe: Connection
    number: int
    """Number of its task."""


def run_in_processes(tasks: Sequence[PartTask], num_workers: int, report: Report) -> None:
    """Write parts in worker processes of this machine.

    Raises:
        WorkerError: If a worker died.
    """
    pending = deque(enumerate(tasks))
    workers: list[_Worker] = []
    # The cores that are left when there are fewer parts than cores.
    num_threads = max(1, (os.cpu_count() or 1) // num_workers)
    try:
        while pending and len(workers) < num_workers:
            workers.append(_start_worker(pending.popleft(), num_threads))
        while workers:
            for pipe in wait([worker.pipe for worker in workers]):
                worker = next(worker for worker in workers if worker.pipe is pipe)
                event = _receive(worker)
                report(event)
                if event.result is None:
                    continue
                if pending:
                    worker.number, task = pending.popleft()
                    worker.pipe.send((worker.number, task))
                else:
                    workers.remove(worker)
                    _end([worker])
    finally:
        _end(workers)


def run_on_ray(tasks: Sequence[PartTask], num_workers: int | None, report: Report) -> None:
    """Write parts as tasks of Ray: of the cluster that it finds, or else of this machine.

    Raises:
        ConfigError: If Ray is not installed, or its cluster cannot be reached.
        WorkerError: If Ray gave up on a part.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"engine='ray' needs Ray ({error}); pip install 'streampack[ray]', or set "
            "engine='processes'"
        ) from error
    is_own = not ray.is_initialized()
    if is_own:
        _connect(ray)
    try:
        remote = ray.remote(num_cpus=1, max_retries=3)(_write_quietly)
        pending = deque(enumerate(tasks))
        running: dict[Any, int] = {}
        limit = num_workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        while pending or running:
            while pending and len(running) < limit:
                number, task = pending.popleft()
                running[remote.remote(task)] = number
            done, _ = ray.wait(list(running), num_returns=1)
            number = running.pop(done[0])
            outcome = _ray_result(ray, done[0])
            report(Event(number, outcome.counts, outcome))
    finally:
        if is_own:
            ray.shutdown()


def _connect(ray: Any) -> None:
    """Connect to a cluster of Ray, or start one on this machine."""
    try:
        ray.init(log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        address = os.environ.get("RAY_ADDRESS", "auto")
        raise ConfigError(
            f"RAY_ADDRESS={address!r}: {error}; start the cluster, set RAY_AUTH_MODE=token if it "
            "asks for a token, as clusters of Ray 2.60 do by default, or set engine='processes'"
        ) from error


def _write_quietly(task: PartTask) -> PartResult | BaseException:
    """Write a part in a Ray task; an error is a value, so that it keeps its type."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        return write_part(task, _ignore)
    except Exception as error:
        return _portable(error)


def _ignore(counts: PartCounts) -> None:
    """Ignore the counts of a task, which Ray does not carry."""
    del counts


def _ray_result(ray: Any, reference: Any) -> PartResult:
    try:
        outcome = ray.get(reference)
    except ray.exceptions.RayError as error:
        raise WorkerError(f"Ray gave up on a part ({error}); {AGAIN}") from error
    if isinstance(outcome, BaseException):
        raise outcome
    result: PartResult = outcome
    return result


def _start_worker(numbered: tuple[int, PartTask], num_threads: int) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # Fresh processes, not forks: the caller may run threads, e.g. for a progress bar.
    process = context.Process(target=_work, args=(theirs, num_threads), daemon=True)
    with _interrupts_blocked():
        process.start()
    theirs.close()
    ours.send(numbered)
    return _Worker(process, ours, numbered[0])


def _receive(worker: _Worker) -> Event:
    try:
        message = worker.pipe.recv()
    except (EOFError, ConnectionError) as error:
        worker.process.join(END_S)
        code = worker.process.exitcode
        raise WorkerError(
            f"a worker process ended with exit code {code}"
            f"{' (killed: perhaps memory ran out; try fewer workers)' if code == -9 else ''}; "
            f"{AGAIN}"
        ) from error
    if isinstance(message, BaseException):
        raise message
    event: Event = message
    return event


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.pipe.close()
        worker.process.terminate()
    for worker in workers:
        worker.process.join(END_S)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _work(pipe: Connection, num_threads: int) -> None:
    """Write parts until the pipe is closed; run in a worker process."""
    os.environ["RAYON_NUM_THREADS"] = str(num_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"
    # Once the main process has gone, reports fail and this process ends.
    with suppress(EOFError, ConnectionError):
        while True:
            number, task = pipe.recv()
            try:
                result = write_part(task, _reporter(pipe, number))
            except ConnectionError:
                raise
            except Exception as error:
                pipe.send(_portable(error))
            else:
                pipe.send(Event(number, result.counts, result))
    sys.exit(0)


def _reporter(pipe: Connection, number: int) -> Callable[[PartCounts], None]:
    last = time.monotonic()

    def report(counts: PartCounts) -> None:
        """Send the counts, at most once every REPORT_S seconds."""
        nonlocal last
        now = time.monotonic()
        if now - last >= REPORT_S:
            last = now
            pipe.send(Event(number, counts))

    return report


def _portable(error: Exception) -> BaseException:
    """Return an error that another process can load."""
    if isinstance(error, (StreampackError, OSError)):
        error.__traceback__ = None
        return error
    text = "".join(traceback.format_exception(error))
    return WorkerError(f"a part failed; {AGAIN}, or report this:\n{text}")


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start processes that ignore a terminal's Ctrl-C; this process terminates them."""
    # Child processes inherit the blocked signals from their first moment on.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
