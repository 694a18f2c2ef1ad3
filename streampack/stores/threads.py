"""An attempt in a thread of its own, which is abandoned once it is overdue.

::

    caller --start--> thread: request --> answer --> result
       '---- deadline: its answer is cut off, and the caller continues without it

A thread cannot be ended from outside. One that waits for the first byte of an answer ends when the
store's own time limit is over. It is a daemon, so no process waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from streampack.errors import naming_limits

_T = TypeVar("_T")


def run_attempt(work: Callable[[], _T], timeout_s: float) -> _T:
    """Return what `work` returns in a thread of its own; raise its exception.

    Raises:
        TimeoutError: If it is overdue. The thread is abandoned, and ends on its own.
        ConfigError: If no thread can be started.
    """
    results: list[_T] = []
    thread = AttemptThread(lambda: results.append(work()))
    thread.scope.deadline = time.monotonic() + timeout_s
    with naming_limits():
        thread.start()
    try:
        thread.ended.wait(max(0.0, timeout_s))
    finally:
        is_abandoned = thread.abandon()
    if is_abandoned:
        raise TimeoutError(f"not done within {timeout_s:.1f} s{_waiting_threads()}")
    if thread.error is not None:
        raise thread.error
    return results[0]


def _waiting_threads() -> str:
    threads = [thread for thread in threading.enumerate() if isinstance(thread, AttemptThread)]
    num_waiting = sum(thread.scope.is_abandoned for thread in threads)
    return f", {num_waiting} overdue requests are still open" if num_waiting > 1 else ""


class AttemptThread(threading.Thread):
    """A daemon thread of one attempt, or of a part of the attempt that creates it."""

    def __init__(self, work: Callable[[], object], *, is_part: bool = False) -> None:
        super().__init__(name="streampack-fetch", daemon=True)
        self._work = work
        self.scope = _current.scope if is_part else _Scope()
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do the work, and keep its exception."""
        _current.scope = self.scope
        try:
            self._work()
        except BaseException as error:  # re-raised in the waiting thread
            self.error = error
        with self.scope.lock:
            self.ended.set()

    def abandon(self) -> bool:
        """Cut off the work unless it has ended; return whether it is abandoned."""
        with self.scope.lock:
            self.scope.is_abandoned = not self.ended.is_set()
            cuts = list(self.scope.cuts) if self.scope.is_abandoned else []
        for cut in cuts:
            _call_quietly(cut)
        return self.scope.is_abandoned


class _Scope:
    """What the threads of one attempt share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_abandoned = False
        self.deadline: float | None = None
        self.cuts: list[Callable[[], object]] = []


class _Current(threading.local):
    def __init__(self) -> None:
        self.scope = _Scope()


_current = _Current()


def is_abandoned() -> bool:
    """Return whether the attempt of this thread is abandoned."""
    return _current.scope.is_abandoned


def seconds_left() -> float | None:
    """Return the time until this thread's attempt is overdue; None if it has no limit."""
    deadline = _current.scope.deadline
    return None if deadline is None else max(0.01, deadline - time.monotonic())


@contextmanager
def cut_when_abandoned(cut: Callable[[], object]) -> Iterator[None]:
    """Call `cut` from another thread if this attempt is abandoned within the block."""
    scope = _current.scope
    with scope.lock:
        scope.cuts.append(cut)
        is_late = scope.is_abandoned
    try:
        if is_late:
            _call_quietly(cut)
        yield
    finally:
        with scope.lock:
            scope.cuts.remove(cut)


def _call_quietly(cut: Callable[[], object]) -> None:
    with suppress(Exception):  # the answer may have ended
        cut()
