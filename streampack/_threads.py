"""Threads: start them so that an interrupt cannot leave one half-started, and work ahead in them.

::

    caller          start_threads --> a thread without a name --> t1.start(), t2.start()
    signal          ^ raises here     ^ no handler runs here

A signal handler runs in the main thread, between almost any two bytecode instructions, and may
raise. If it raises inside `Thread.start`, locks stay taken and the new thread hangs. A call of a C
function is atomic in this respect, so a thread started by one calls `Thread.start`.

`ordered_thread_map` is an ordered, bounded pipeline, whose consumer executes queued work itself
where it would block. With depth=4, one thread, and a caller that is faster than the thread::

    thread   takes items 0, 1   makes 0      takes 2, 3      makes 2 ...
    caller                      makes 1      gets 0, 1       makes 3 ...

Threads take the items, so planning and waiting for shards never block a caller that has a result
ready. A caller that always finds a result, as a training loop does, never executes one itself.

The threads start at the first item and end with the iteration, so none is alive when a process
forks, except one that gets no item for several seconds. The end of the caller's frame ends them: a
weak reference's callback is a C function, which no interrupt can skip. A failure is raised where
the result is requested, with its own traceback. See docs/adr/0022 and 0054.

Cost: 50 us for all threads together; one hand-over per item, about 20 us. Memory: `depth` results
and `at_hand` items.
"""

from __future__ import annotations

import _thread
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import Thread, current_thread
from typing import Generic, TypeAlias, TypeVar

from streampack.errors import WorkerError, naming_limits

ALIVE_S = 5.0  # liveness poll interval while waiting
LEAVE_S = 5.0  # time limit for threads to end

Item = TypeVar("Item")
Result = TypeVar("Result")
Got = TypeVar("Got")
# A result is wrapped in a list, because it may itself be None or an exception.
Outcome: TypeAlias = list[Result] | BaseException | None
Cell: TypeAlias = "queue.SimpleQueue[Outcome[Result]]"

AT_HAND = 2  # items that wait to be worked on
AWAY_S = 2e-4  # a caller that is away for this long does other work
NUM_AWAY = 3  # times in a row before a thread starts


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


class _Maker(Generic[Item, Result]):
    def __init__(
        self,
        items: Iterable[Item],
        work: Callable[[Item], Result],
        depth: int,
        num_threads: int,
        at_hand: int,
    ) -> None:
        self._items = iter(items)
        self._work = work
        self._at_hand = at_hand
        # One permit per result that may be alive; a queue, because semaphores are slow Python code.
        self._room: queue.SimpleQueue[object] = queue.SimpleQueue()
        for _ in range(depth):
            self.give_back()
        self._asking = threading.Lock()
        self._is_over = False  # no more items
        self._is_left = False  # no more results either
        # One cell per item, in order. It receives the result or the failure, or None at the end.
        self._cells: queue.SimpleQueue[Cell[Result]] = queue.SimpleQueue()
        # Items not yet worked on; the caller sees a cell only once its item is here.
        self._to_do: deque[tuple[Item, Cell[Result]]] = deque()
        self._threads = [
            threading.Thread(target=self._serve, name=f"streampack-read-{number}", daemon=True)
            for number in range(num_threads)
        ]

    def start(self, caller: Holder) -> None:
        """Start the threads, which end when `caller` is freed."""
        self._caller = weakref.ref(caller, self._room.put)
        start_threads(self._threads, ", or set prefetch_threads=0")

    def give_back(self) -> None:
        self._room.put(None)

    def next(self) -> Outcome[Result]:
        cell = self._get(self._cells)
        while cell.empty():
            job = self._take_with_room()
            if job is None:
                break
            self._do(*job, caught=Exception)  # an interrupt is raised here, in the caller
        return self._get(cell)

    def _get(self, waited_for: queue.SimpleQueue[Got]) -> Got:
        while True:
            # Checked before the wait: a thread that has ended has already put its last message.
            is_alive = any(thread.is_alive() for thread in self._threads)
            try:
                return waited_for.get(timeout=ALIVE_S if is_alive else 0)
            except queue.Empty:
                if not is_alive:
                    raise WorkerError(
                        f"the reading threads of process {os.getpid()} are gone and left no "
                        "result; iterate in the process that began the iteration"
                    ) from None

    def leave(self) -> None:
        """End the threads after their current items, and wait for them up to a limit."""
        self._stop()
        # A thread that waits for an item ends when it arrives, or with the process.
        join_threads(self._threads, LEAVE_S)

    def _stop(self) -> None:
        self._is_over = self._is_left = True
        self._to_do.clear()
        for _ in self._threads:
            self.give_back()

    def _serve(self) -> None:
        while True:
            # While another thread waits for an item, work on those that it has taken.
            if self._asking.acquire(blocking=not self._to_do):
                try:
                    self._ask()
                finally:
                    self._asking.release()
            if self._room.get() is not None:  # the weak reference to the caller
                self._stop()
            # Checked before an item is taken: one may have arrived since `_stop` cleared them, and
            # working on it would use up the permit that ends this thread.
            if self._is_left:
                return
            job = self._take()
            if job is not None:
                self._do(*job, caught=BaseException)
            else:
                self.give_back()
                if self._is_over:
                    return
            # Before the next item: the caller may hold the last reference to this one.
            del job

    def _ask(self) -> None:
        while len(self._to_do) < self._at_hand and not self._is_over:
            cell: Cell[Result] = queue.SimpleQueue()
            try:
                self._to_do.append((next(self._items), cell))
            except StopIteration:
                self._end(cell, None)
            except BaseException as failure:  # raised where the result is requested
                self._end(cell, failure)
            self._cells.put(cell)

    def _take(self) -> tuple[Item, Cell[Result]] | None:
        try:
            return self._to_do.popleft()
        except IndexError:
            return None

    def _take_with_room(self) -> tuple[Item, Cell[Result]] | None:
        """Return an item to work on, unless a thread has the permit for it."""
        try:
            self._room.get_nowait()
        except queue.Empty:
            return None
        job = self._take()
        if job is None:
            self.give_back()
        return job

    def _do(self, item: Item, cell: Cell[Result], caught: type[BaseException]) -> None:
        try:
            cell.put([self._work(item)])
        except caught as failure:
            self._end(cell, failure)

    def _end(self, cell: Cell[Result], failure: BaseException | None) -> None:
        self._is_over = True
        cell.put(failure)


def ordered_thread_map(
    items: Iterable[Item],
    work: Callable[[Item], Result],
    depth: int,
    num_threads: int = 1,
    at_hand: int = AT_HAND,
) -> Iterator[Result]:
    """Yield `work(item)` for each item, in order, working ahead in threads.

    Args:
        items: The items; the threads iterate over them, one thread at a time.
        work: Called in the threads, and in the caller while it waits; calls may run concurrently.
        depth: Results that may be alive, at least 1.
        num_threads: At least 1; more than `depth` are idle.
        at_hand: Items that wait to be worked on, at least 1. They do not count as results.

    >>> list(ordered_thread_map([1, 2, 3], lambda item: item * item, depth=2))
    [1, 4, 9]
    """
    maker = _Maker(items, work, depth, num_threads, at_hand)
    caller = Holder()  # referenced by this frame only
    try:
        maker.start(caller)
        while True:
            outcome = maker.next()
            if outcome is None:
                return
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome.pop()  # keeps no reference to the result, which frees its permit
            maker.give_back()
    finally:
        maker.leave()


def prefetched(items: Iterable[Item], depth: int) -> Iterator[Item]:
    """Yield `items`, advanced by a thread once the caller does other work between them.

    `depth` items, at least 1, may be alive in addition to the one that is being made.

    >>> list(prefetched(range(3), depth=2))
    [0, 1, 2]
    """
    source, num_away = iter(items), 0
    for held in map(_hold, source):
        left_s = time.perf_counter()
        yield held.pop()  # keeps no reference to the item
        num_away = num_away + 1 if time.perf_counter() - left_s >= AWAY_S else 0
        if num_away == NUM_AWAY:
            yield from ordered_thread_map(map(_hold, source), list.pop, depth, at_hand=1)
            return


def _hold(item: Item) -> list[Item]:
    return [item]
