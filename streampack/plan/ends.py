"""Where the columns end that this process does not plan: bounds while they do, the truth when due.

::

    packs of a column   |-- a token a sample --|-- lengths, a block at a time --|-- planned --|
    asked for           at once                as the walk gets there           once all are known

A lower bound is enough to walk on. Only where a column could be out must all of it be planned,
integers only: a thread begins with that once three quarters of what is certain are served.

Cost: the lengths of a block of samples at a time, and at the end about 1 us a sample. Memory: a few
integers a column, and one planner while it counts.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from threading import Event, Lock, Thread

from streampack.config import SHUFFLE_BLOCK_SIZE
from streampack.plan.planner import ColumnPlanner
from streampack.plan.recipe import Recipe
from streampack.types import Int64Array

__all__ = ["ColumnEnds", "count_packs", "packs_in", "slots_in"]

PLAN_AHEAD = 0.75  # of a column's certain packs: from here on its end is looked for in a thread


def _count_column(
    recipe: Recipe, epoch: int, lane: int, column: int, stop: Event | None = None
) -> int:
    """Plan one column to the epoch's end, or until nobody wants to know; return its packs."""
    planner = ColumnPlanner(recipe, lane, column, epoch)
    while not planner.is_complete and not (stop and stop.is_set()):
        planner.extend()
        planner.release(planner.num_known)
    return planner.num_known


def count_packs(recipe: Recipe, epoch: int, lane: int) -> list[int]:
    """Plan one lane to the epoch's end and return the packs of each column."""
    return [_count_column(recipe, epoch, lane, column) for column in range(recipe.num_columns)]


def packs_in(recipe: Recipe, num_planned: int) -> int:
    """Return how many of an epoch's packs are delivered: with epoch_end="drop" whole batches."""
    size = recipe.global_batch_size
    return num_planned // size * size if recipe.mixing.epoch_end == "drop" else num_planned


def slots_in(recipe: Recipe, num_planned: int) -> int:
    """Return the slots of an epoch of so many packs, the padding of its last batch included."""
    size = recipe.global_batch_size
    return -(-packs_in(recipe, num_planned) // size) * size


class _LeastPacks:
    """How many packs a column has at least, from the lengths of ever more of its samples."""

    def __init__(self, recipe: Recipe, epoch: int, lane: int, column: int) -> None:
        self._recipe = recipe
        self._epoch = epoch
        self._lane = lane
        self._numbers = range(len(recipe.streams)) if recipe.is_mixed else [column]
        self._num_looked: int | None = None  # samples of each stream, their lengths counted
        self._tokens = 0
        self.num_packs = 0
        self.is_final = False

    def grow(self) -> None:
        """Know more: at first without any length, then by those of one more block of samples."""
        begin = self._num_looked or 0
        end = 0 if self._num_looked is None else begin + SHUFFLE_BLOCK_SIZE
        beyond = 0
        self.is_final = True
        for number in self._numbers:
            tokens, at_least, is_all = self._recipe.lane_stream(number, self._lane).tokens_in(
                self._epoch, begin, end
            )
            self._tokens += tokens
            beyond += at_least
            self.is_final &= is_all
        self._num_looked = end
        tokens = self._tokens + beyond
        self.num_packs = max(self.num_packs, -(-tokens // self._recipe.packing.max_seq_len))


class ColumnEnds:
    """What is known of columns in lanes of other processes.

    Args:
        recipe: What the sequence is a function of.
        epoch: Which epoch.
    """

    def __init__(self, recipe: Recipe, epoch: int) -> None:
        self._recipe = recipe
        self._epoch = epoch
        self._least: dict[tuple[int, int], _LeastPacks] = {}
        self._counts: dict[tuple[int, int], Future[int]] = {}
        self._asked: deque[tuple[int, int]] = deque()  # columns that nobody counts yet
        self._lock = Lock()
        self._is_finding = False
        self._closed = Event()

    def learn(self, lane: int, column: int) -> tuple[int, bool]:
        """Know more of a column; return its packs, and whether these are all."""
        least = self._least.get((lane, column))
        if least is None:
            least = _LeastPacks(self._recipe, self._epoch, lane, column)
            self._least[lane, column] = least
        if least.is_final:
            return self._count(lane, column).result(), True
        least.grow()
        return least.num_packs, False

    def look_ahead(self, served: Int64Array) -> None:
        """Look for the ends of columns of which most of what is certain is served, in a thread."""
        for (lane, column), least in self._least.items():
            if least.is_final and served[lane, column] >= PLAN_AHEAD * least.num_packs:
                self._count(lane, column)

    def _count(self, lane: int, column: int) -> Future[int]:
        with self._lock:
            if (lane, column) not in self._counts:
                self._counts[lane, column] = Future()
                self._asked.append((lane, column))
                if not self._is_finding:
                    self._is_finding = True
                    # A daemon, as no executor has: the interpreter's exit does not wait for it.
                    Thread(target=self._find, name="streampack-lane-ends", daemon=True).start()
            return self._counts[lane, column]

    def _find(self) -> None:
        """Count what is asked for, one column at a time."""
        while (key := self._next()) is not None:
            count = self._counts[key]
            if not count.set_running_or_notify_cancel():
                continue
            try:
                count.set_result(_count_column(self._recipe, self._epoch, *key, self._closed))
            except BaseException as failure:  # to be raised where the count is asked for
                count.set_exception(failure)

    def _next(self) -> tuple[int, int] | None:
        with self._lock:
            self._is_finding = bool(self._asked)
            return self._asked.popleft() if self._asked else None

    def close(self) -> None:
        """End the thread, if there is one."""
        self._closed.set()
        for count in self._counts.values():
            count.cancel()
