"""A prefetch thread that works only while its caller is away.

::

    a loop that trains       next()  trains ...............  next()  trains ...
    thread                             reads 1, reads 2      (gets 1)  reads 3
    a loop that only reads   next(), which reads 0   next(), which reads 1   next() ...
    thread                                           sees the caller again and waits longer

One of the two reads at any time, because the items come from one iterator. A caller that finds
nothing ready reads the next item itself. The thread reads once the caller has been away for
`AWAY_S`. Until then it would only compete for the interpreter lock: a loop that consumes batches as
fast as they come was a quarter slower with a thread that always works ahead. For a loop that was
never away, no thread is started.

The end of the caller's frame ends the thread, as in `thread_map`.

Cost: about 1 us per item. Memory: `depth` items beside the one that the caller holds.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from streampack._threads import Holder, join_threads, start_threads
from streampack.errors import WorkerError

ALIVE_S = 5.0  # liveness poll interval while waiting
LEAVE_S = 5.0  # time limit for the thread to end
AWAY_S = 2e-4  # a caller that is away for this long does other work
MAX_PAUSE_S = 0.02  # between looks at a caller that is never away

Item = TypeVar("Item")


class _Prefetcher(Generic[Item]):
    """An iterator that the caller and a thread advance in turns."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._items = items
        self._depth = depth
        self._advancing = threading.Lock()
        # Each item in a list, because it may itself be None or an exception.
        self._ready: deque[list[Item]] = deque()
        self._failure: BaseException | None = None
        self._is_over = False
        # The caller adds 1 as it comes for an item and 1 as it leaves with one, so the number is
        # even and the same at two looks of the thread if the caller was away between them.
        self._num_moves = 0
        self._is_idle = False  # the thread waits until an item is taken
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="streampack-read-0", daemon=True)

    def start(self, caller: Holder) -> None:
        """Start the thread, which ends when `caller` is freed.

        Raises:
            ConfigError: If the thread cannot be started.
        """
        self._caller = weakref.ref(caller, self._messages.put)
        start_threads([self._thread], ", or set prefetch_threads=0")

    def next(self) -> list[Item] | None:
        """Return the next item in a list, or None at the end.

        Raises:
            WorkerError: If the thread ended while it read, as in a forked child.
        """
        self._num_moves += 1
        if not self._ready:
            while not self._advancing.acquire(timeout=ALIVE_S):
                if not self._thread.is_alive():
                    raise WorkerError(
                        f"the reading thread of process {os.getpid()} is gone and left no result; "
                        "iterate in the process that began the iteration"
                    )
            try:
                if not self._ready:
                    self._advance()
            finally:
                self._advancing.release()
        item = self._ready.popleft() if self._ready else None
        if item is None and self._failure is not None:
            raise self._failure
        if self._is_idle:
            self._messages.put(None)
        self._num_moves += 1
        return item

    def _advance(self) -> None:
        """Read an item; the caller of this function holds the lock."""
        if self._is_over:
            return
        try:
            self._ready.append([next(self._items)])
        except StopIteration:
            self._is_over = True
        except BaseException as failure:  # raised where the item is requested
            self._is_over, self._failure = True, failure

    def _run(self) -> None:
        pause_s = AWAY_S
        while not self._is_over:
            num_moves = self._num_moves
            try:
                if self._messages.get(timeout=pause_s) is not None:  # the reference to the caller
                    return
                pause_s = AWAY_S  # an item was taken
            except queue.Empty:
                if num_moves % 2 or num_moves != self._num_moves:
                    pause_s = min(2 * pause_s, MAX_PAUSE_S)
                    continue
                pause_s = AWAY_S
                self._read_ahead(num_moves)
                if not self._is_over and len(self._ready) >= self._depth and self._rest():
                    return

    def _read_ahead(self, num_moves: int) -> None:
        """Read items until enough are ready, or the caller comes for one."""
        while len(self._ready) < self._depth and num_moves == self._num_moves:
            # Never wait: who holds the lock is the caller, which reads for itself.
            if self._is_over or not self._advancing.acquire(blocking=False):
                return
            try:
                self._advance()
            finally:
                self._advancing.release()

    def _rest(self) -> bool:
        """Wait until an item is taken; return whether the caller left instead."""
        self._is_idle = True
        try:
            # Looked at after the flag is set: an item taken before that sent no message.
            return len(self._ready) >= self._depth and self._messages.get() is not None
        finally:
            self._is_idle = False

    def leave(self) -> None:
        """End the thread after its current item, and wait for it up to a limit."""
        self._is_over = True
        self._messages.put(self)
        join_threads([self._thread], LEAVE_S)
        self._ready.clear()


def prefetched(items: Iterable[Item], depth: int) -> Iterator[Item]:
    """Yield `items`, read by a thread while the caller does other work.

    Args:
        items: Advanced in the thread and in the caller, never in both at a time.
        depth: Items that may wait, at least 1.

    >>> list(prefetched(range(3), depth=2))
    [0, 1, 2]
    """
    source = iter(items)
    for held in map(_hold, source):
        left_s = time.perf_counter()
        yield held.pop()  # keeps no reference to the item
        if time.perf_counter() - left_s >= AWAY_S:
            break
    else:
        return
    prefetcher = _Prefetcher(source, depth)
    caller = Holder()  # referenced by this frame only
    try:
        prefetcher.start(caller)
        while (outcome := prefetcher.next()) is not None:
            yield outcome.pop()
    finally:
        prefetcher.leave()


def _hold(item: Item) -> list[Item]:
    return [item]
