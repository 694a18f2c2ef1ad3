"""Start threads so that an interrupt cannot leave one half-started, and wait for their end.

::

    caller          start_threads --> a thread without a name --> t1.start(), t2.start()
    signal          ^ raises here     ^ no handler runs here

A signal handler runs in the main thread, between almost any two bytecode instructions, and may
raise. If it raises inside `Thread.start`, locks stay taken and the new thread hangs. A call of a C
function is atomic in this respect, so a thread started by one calls `Thread.start`.

Cost: 50 us for all threads together.
"""

from __future__ import annotations

import _thread
import queue
import time
from collections.abc import Iterable
from threading import Thread, current_thread

from streampack.errors import naming_limits


class Holder:
    """A finalizer anchor: it dies with the frame that contains it, and its weakref ends threads."""


def start_threads(threads: Iterable[Thread], way_out: str = "") -> None:
    """Start threads, and return once all of them run; see `naming_limits` for `way_out`."""
    outcome: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()

    def _start() -> None:
        failure = None
        try:
            for thread in threads:
                thread.start()
        except RuntimeError as error:
            failure = error
        outcome.put(failure)

    with naming_limits(way_out):
        _thread.start_new_thread(_start, ())
        if failure := outcome.get():
            raise failure


def join_threads(threads: Iterable[Thread], limit_s: float) -> None:
    """Wait until threads end, for at most `limit_s` seconds in all.

    The caller may be one of them, since garbage collection runs in any thread. A thread that an
    interrupt kept from starting is skipped: it ends as soon as it starts.
    """
    deadline_s = time.monotonic() + limit_s
    for thread in threads:
        if thread.ident is not None and thread is not current_thread():
            thread.join(max(deadline_s - time.monotonic(), 0))
