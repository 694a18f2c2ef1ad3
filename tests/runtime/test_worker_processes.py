"""Worker processes: sockets inherited by other children, and signals to the whole group."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streampack.runtime import worker_processes
from streampack.runtime.worker_pool import Pool
from streampack.runtime.worker_processes import WorkerOptions, WorkerProcesses

pytestmark = pytest.mark.processes


def _answering(_given: None) -> Any:
    return lambda task: [task]


class _Session:
    """The object that a loop keeps alive for as long as it needs its workers."""


FORKED = WorkerOptions(num_workers=2, prefetch_factor=2, multiprocessing_context="fork")


def _started(session: _Session) -> WorkerProcesses:
    kept = WorkerProcesses(_answering, FORKED, session)
    kept.wait_until(lambda: kept.is_started)
    assert kept.failure is None
    return kept


def test_a_child_forked_while_sockets_close_keeps_the_files_that_took_their_numbers(monkeypatch):
    session = _Session()
    kept = _started(session)
    outcomes: list[int] = []
    parent = os.getpid()

    def close_and_fork(connection: Any) -> None:
        number = connection.fileno()
        os.close(number)
        if os.getpid() != parent:
            return
        ends = os.pipe()
        if number not in ends:
            os.dup2(ends[0], number)
        child = os.fork()
        if not child:
            try:
                os.fstat(number)
            except OSError:
                os._exit(1)
            os._exit(0)
        outcomes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        for end in {*ends, number}:
            os.close(end)

    monkeypatch.setattr(multiprocessing.connection.Connection, "_close", close_and_fork)
    kept.end()
    assert outcomes == [0, 0]


def test_workers_end_although_others_hold_copies_of_their_sockets():
    session = _Session()
    kept = _started(session)
    copies = [os.dup(ours.fileno()) for ours in kept.sockets]
    try:
        kept.end()
    finally:
        for copied in copies:
            os.close(copied)
    assert kept.exitcodes == [0, 0]


GROUP_SIGNALS = [
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGALRM,  # as `sbatch --signal` allows
]


@pytest.fixture
def handled(tmp_path: Path) -> Iterator[Path]:
    """A file in which the trainer's handler records the process it ran in."""
    path = tmp_path / "handled"
    path.touch()

    def note(*_: object) -> None:
        with path.open("a") as file:
            file.write(f"{os.getpid()}\n")

    before = {number: signal.signal(number, note) for number in GROUP_SIGNALS}
    yield path
    for number, handler in before.items():
        signal.signal(number, handler)


def _pids(_given: None) -> Any:
    return lambda task: [(task, os.getpid())]


def _pids_and_variables(_given: None) -> Any:
    return lambda task: [(task, os.getpid(), os.environ.get("STREAMPACK_TEST_CHANGED"))]


@pytest.mark.own_start
@pytest.mark.parametrize(("method", "num_workers"), [("fork", 2), ("forkserver", 2), ("spawn", 1)])
def test_signals_reach_no_handler_of_the_trainer_in_a_worker_and_stop_none(
    handled, monkeypatch, method, num_workers
):
    monkeypatch.setenv("STREAMPACK_TEST_CHANGED", "here")
    options = WorkerOptions(
        num_workers=num_workers, prefetch_factor=1, multiprocessing_context=method
    )
    pool = Pool(_pids_and_variables, options)
    workers = {pid for _, pid, _ in pool.results(range(4))}
    numbers = GROUP_SIGNALS if method == "fork" else GROUP_SIGNALS[:5]
    for number in numbers:
        for pid in [os.getpid(), *workers]:
            os.kill(pid, number)
    results = list(pool.results(range(4)))
    pool.end()

    assert [task for task, _, _ in results] == [0, 1, 2, 3]
    assert {pid for _, pid, _ in results} == workers
    assert {variable for *_, variable in results} == {"here"}
    assert set(map(int, handled.read_text().split())) == {os.getpid()}


def test_a_signal_that_arrives_as_a_worker_starts_reaches_no_handler_of_the_trainer(
    handled, monkeypatch
):
    run_worker = worker_processes.run_worker

    def signalled(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        run_worker(*args)

    monkeypatch.setattr(worker_processes, "run_worker", signalled)
    pool = Pool(_pids, FORKED)
    tasks = [task for task, _ in pool.results(range(4))]
    pool.end()

    assert tasks == [0, 1, 2, 3]
    assert handled.read_text() == ""


def test_a_program_that_a_source_starts_in_a_worker_can_be_terminated():
    def starting(_given: None) -> Any:
        def work(_task: int) -> list[Any]:
            started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            started.terminate()
            return [started.wait(30)]

        return work

    pool = Pool(starting, FORKED)
    codes = list(pool.results(range(1)))
    pool.end()

    assert codes == [-signal.SIGTERM]


def test_a_worker_ends_when_the_trainer_terminates_its_children():
    session = _Session()
    kept = _started(session)
    for child in multiprocessing.active_children():
        if child.pid in kept.pids:
            child.terminate()
            child.join(30)
            assert child.exitcode == -signal.SIGKILL
    kept.end()
