"""Work a little ahead in threads, in order, within a bound; who would wait, helps.

With depth=4 and one thread, and a caller that asks for more than one thread can make::

    thread   asks for 0 and 1   makes 0      asks for 2, 3   makes 2 ...
    caller                      makes 1      takes 0, 1      makes 3 ...

Threads ask for the items: planning and waiting for shards never stop a caller that has a result to
take. A thread asks for at least one item more than it works on, so that there is something to help
with; a caller that always finds a result, as a training loop does, never works on one itself.

The threads start at the first item and end with the iteration, so none is alive when a process
forks, but for one whose items do not come for some seconds. A failure surfaces where the result is
asked for, with its own traceback.

Cost: one hand-over an item, about 20 us. Memory: `depth` results.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeAlias, TypeVar

from streampack.errors import WorkerError

__all__ = ["AT_HAND", "work_ahead"]

ALIVE_S = 5.0  # how often whoever waits looks whether somebody works
LEAVE_S = 5.0  # how long threads are waited for that are to end

Item = TypeVar("Item")
Result = TypeVar("Result")
Got = TypeVar("Got")
# A result comes as a list of it alone: one that is None, or an exception, is a result too.
Outcome: TypeAlias = list[Result] | BaseException | None
Cell: TypeAlias = "queue.SimpleQueue[Outcome[Result]]"

AT_HAND = 2  # items that a thread asks for before it works on one of them


class _Maker(Generic[Item, Result]):
    """Items in, results or the failure out."""

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
        # A permit for each result that may be alive; a queue, because a semaphore is slow Python.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self.give_back()
        self._asking = threading.Lock()
        self._is_over = False
        # A cell for each item, in order; into it comes its result, or the failure, or at the end
        # None.
        self._cells: queue.SimpleQueue[Cell[Result]] = queue.SimpleQueue()
        # What nobody works on yet; a cell is seen by the caller only once its item is here.
        self._to_do: deque[tuple[Item, Cell[Result]]] = deque()
        self._threads = [
            threading.Thread(target=self._run, name=f"streampack-read-{number}", daemon=True)
            for number in range(num_threads)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def give_back(self) -> None:
        """Make room for one more result."""
        self._room.put(None)

    def next(self) -> Outcome[Result]:
        """Return what came of the next item, working on what is to be done until it is there.

        Raises:
            WorkerError: If the threads ended without a word, as in a child that was forked.
        """
        cell = self._get(self._cells)
        while cell.empty():
            job = self._take()
            if job is None:
                break
            self._do(*job, caught=Exception)  # an interrupt is raised where it came
        return self._get(cell)

    def _get(self, waited_for: queue.SimpleQueue[Got]) -> Got:
        while True:
            # Asked before the wait: what a thread says last is there once it is gone.
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
        """End the threads, once they have done what they are at; wait for them a while."""
        self._is_over = True
        self._to_do.clear()
        for _ in self._threads:
            self.give_back()
        # Whoever leaves may be one of them: the garbage collector runs in any thread. And what they
        # wait for may not come: then they end once it does, or with the process.
        deadline_s = time.monotonic() + LEAVE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline_s - time.monotonic(), 0))

    def _run(self) -> None:
        while True:
            with self._asking:
                self._ask()
            job = self._take()
            if job is not None:
                self._do(*job, caught=BaseException)
            elif self._is_over:
                return
            # Before the next item: the caller may be the last to hold on to this one.
            del job

    def _ask(self) -> None:
        """Ask for items, and wait for room only if there is nothing to do."""
        while len(self._to_do) < self._at_hand and not self._is_over:
            try:
                self._room.get(block=not self._to_do)
            except queue.Empty:
                return
            if self._is_over:
                return
            cell: Cell[Result] = queue.SimpleQueue()
            try:
                self._to_do.append((next(self._items), cell))
            except StopIteration:
                self._end(cell, None)
            except BaseException as failure:  # to be raised where the result is asked for
                self._end(cell, failure)
            self._cells.put(cell)

    def _take(self) -> tuple[Item, Cell[Result]] | None:
        try:
            return self._to_do.popleft()
        except IndexError:
            return None

    def _do(self, item: Item, cell: Cell[Result], caught: type[BaseException]) -> None:
        try:
            cell.put([self._work(item)])
        except caught as failure:
            self._end(cell, failure)

    def _end(self, cell: Cell[Result], failure: BaseException | None) -> None:
        """Ask for no more items, and wake those that wait for room to ask."""
        self._is_over = True
        cell.put(failure)
        for _ in self._threads:
            self.give_back()


def work_ahead(
    items: Iterable[Item],
    work: Callable[[Item], Result],
    depth: int,
    num_threads: int = 1,
    at_hand: int = AT_HAND,
) -> Iterator[Result]:
    """Yield `work(item)` for each item, in order, working ahead in threads.

    Args:
        items: What to work on; asked for in the threads, by one at a time.
        work: Called in the threads, and where the next result is waited for; several calls may be
            under way.
        depth: Results that may be alive, at least 1.
        num_threads: At least 1; more than `depth` have nothing to do.
        at_hand: Items that a thread asks for before it works on one of them, at least 1.

    >>> list(work_ahead([1, 2, 3], lambda item: item * item, depth=2))
    [1, 4, 9]
    """
    maker = _Maker(items, work, depth, num_threads, at_hand)
    maker.start()
    try:
        while True:
            outcome = maker.next()
            if outcome is None:
                return
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome.pop()  # nothing here holds it any more once there is room for another
            maker.give_back()
    finally:
        maker.leave()
