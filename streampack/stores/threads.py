"""An attempt in a thread of its own, which is abandoned once it is overdue.

::

    caller --start--> thread: request --> answer --> result
       '---- deadline: its answer is cut off, and the caller continues without it

A thread cannot be ended from outside. One that waits for the first byte of an answer ends when the
store's own time limit is over. It is a daemon, so no process waits for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from streampack.errors import naming_limits

_T = TypeVar("_T")


class AttemptThread(threading.Thread):
    """A daemon thread of one attempt, or of a part of the attempt that creates it."""

    def __init__(self, work: Callable[[], object], deadline: float | None = None) -> None:
        super().__init__(name="streampack-fetch", daemon=True)
        self._work = work
        self.scope = _current.scope if deadline is None else _Scope(deadline)
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        _current.scope = self.scope
        try:
            self.result = self._work()
        except BaseException as error:  # re-raised in the waiting thread
            self.error = error
        finally:
            _ending.append(threading.get_native_id())


_ending: deque[int] = deque(maxlen=64)  # threads of the operating system, whose attempts are over


def _await_ending() -> None:
    # OpenSSL frees what it keeps for a thread under a lock, when Python has already joined the
    # thread. A process that is forked just then would find this lock taken, and wait forever.
    end_s = time.monotonic() + 1
    while _ending and time.monotonic() < end_s:
        if os.path.exists(f"/proc/self/task/{_ending[0]}"):
            time.sleep(0.001)
        else:
            _ending.popleft()


os.register_at_fork(before=_await_ending)


class _Scope:
    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline
        self.is_abandoned = False
        self.cuts: list[Callable[[], object]] = []

    def abandon(self) -> None:
        self.is_abandoned = True
        for cut in list(self.cuts):
            with suppress(Exception):  # the answer may have ended
                cut()


class _Current(threading.local):
    def __init__(self) -> None:
        self.scope = _Scope()


_current = _Current()


def within_time(work: Callable[[], _T], timeout_s: float) -> _T:
    """Return the result of `work` from a thread of its own, or raise its exception.

    Raises:
        TimeoutError: If it is overdue. The thread is abandoned, and ends on its own.
        ConfigError: If no thread can be started.
    """
    thread = AttemptThread(work, time.monotonic() + timeout_s)
    with naming_limits():
        thread.start()
    try:
        thread.join(max(0.0, timeout_s))
    finally:
        if is_overdue := thread.is_alive():
            thread.scope.abandon()
    if is_overdue:
        threads = [each for each in threading.enumerate() if isinstance(each, AttemptThread)]
        num_open = sum(each.scope.is_abandoned for each in threads)
        count = f", {num_open} overdue requests are still open" if num_open > 1 else ""
        raise TimeoutError(f"not done within {timeout_s:.1f} s{count}")
    if thread.error is not None:
        raise thread.error
    result: _T = thread.result
    return result


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
    scope.cuts.append(cut)
    try:
        if scope.is_abandoned:
            scope.abandon()
        yield
    finally:
        scope.cuts.remove(cut)
