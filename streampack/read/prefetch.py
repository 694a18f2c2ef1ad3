"""Work a little ahead in threads, in order, within a bound.

With depth=3 and two threads::

    caller has       0        1        2        asking for the next gives the last one back
    thread A         1 made   3 ...    3 made   items are asked for one at a time, under a lock,
    thread B         2 ...    2 made   4 ...    and worked on at the same time

A thread asks for the items itself: were the caller to make them, the two would take turns waiting
for Python's lock, and a training step would pay for it. The threads start at the first item and end
with the iteration, so none is alive when a process forks. A failure surfaces where the result is
asked for, with its own traceback.

Cost: one hand-over an item, about 20 us. Memory: `depth` results.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeAlias, TypeVar

from streampack.errors import WorkerError

__all__ = ["work_ahead"]

ALIVE_S = 5.0  # how often whoever waits looks whether somebody works

Item = TypeVar("Item")
Result = TypeVar("Result")
Got = TypeVar("Got")
Cell: TypeAlias = "queue.SimpleQueue[tuple[Result | None, BaseException | None]]"


class _Maker(Generic[Item, Result]):
    """The threads' side: items in, results or the failure out."""

    def __init__(
        self,
        items: Iterable[Item],
        work: Callable[[Item], Result],
        depth: int,
        num_threads: int,
    ) -> None:
        self._items = iter(items)
        self._work = work
        # A permit for each result that may be alive; a queue, because a semaphore is slow Python.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self.give_back()
        self._asking = threading.Lock()
        self._is_over = False
        # A cell for each item, in order; into it comes (result, None), or (None, failure), or at
        # the end (None, None).
        self._cells: queue.SimpleQueue[Cell[Result]] = queue.SimpleQueue()
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

    def wait(self) -> tuple[Result | None, BaseException | None]:
        """Wait for the next result, as long as a thread lives.

        Raises:
            WorkerError: If all ended without a word, as in a child that was forked meanwhile.
        """
        return self._get(self._get(self._cells))

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
        """End the threads, whatever they do."""
        self._is_over = True
        for _ in self._threads:
            self.give_back()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            self._room.get()
            with self._asking:
                if self._is_over:
                    return
                cell: Cell[Result] = queue.SimpleQueue()
                self._cells.put(cell)
                try:
                    item = next(self._items)
                except StopIteration:
                    self._end(cell, None)
                    return
                except BaseException as failure:  # to be raised where the result is asked for
                    self._end(cell, failure)
                    return
            try:
                cell.put((self._work(item), None))
            except BaseException as failure:
                with self._asking:
                    self._end(cell, failure)
                return
            # Before the next item: the caller may be the last to hold on to this one.
            del item, cell

    def _end(self, cell: Cell[Result], failure: BaseException | None) -> None:
        """Ask for no more items, and wake those that wait for room to ask."""
        self._is_over = True
        cell.put((None, failure))
        for _ in self._threads:
            self.give_back()


def work_ahead(
    items: Iterable[Item], work: Callable[[Item], Result], depth: int, num_threads: int = 1
) -> Iterator[Result]:
    """Yield `work(item)` for each item, in order, working ahead in threads.

    Args:
        items: What to work on; asked for in the threads, by one at a time.
        work: Called in the threads; with more than one, several calls may be under way.
        depth: Results that may be alive, at least 1.
        num_threads: At least 1; more than `depth` have nothing to do.

    >>> list(work_ahead([1, 2, 3], lambda item: item * item, depth=2))
    [1, 4, 9]
    """
    maker = _Maker(items, work, depth, num_threads)
    maker.start()
    try:
        while True:
            result, failure = maker.wait()
            if failure is not None:
                raise failure
            if result is None:
                return
            yield result
            del result  # before there is room for another
            maker.give_back()
    finally:
        maker.leave()
