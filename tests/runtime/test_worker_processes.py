"""The sockets of worker processes, as children that other libraries fork see them."""

from __future__ import annotations

import multiprocessing.connection
import os
from typing import Any

import pytest

from streampack.runtime.worker_processes import WorkerOptions, WorkerProcesses

pytestmark = pytest.mark.processes


def _answering(_given: None) -> Any:
    return lambda task: [task]


class _Session:
    """What a loop holds on to while it wants its workers."""


def _started(session: _Session) -> WorkerProcesses:
    options = WorkerOptions(num_workers=2, prefetch_factor=2, multiprocessing_context="fork")
    kept = WorkerProcesses(_answering, options, session)
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
