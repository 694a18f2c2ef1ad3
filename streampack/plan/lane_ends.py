"""Pack counts of lanes planned by other processes: a lower bound, and the exact count when needed.

::

    packs of a queue    |-- a token a sample --|-- lengths, a block at a time --|-- planned --|
    computed            immediately            as the walk gets there           when all are used up

The walk over slots can continue on a lower bound. Only where a queue might be exhausted must it be
planned to its end, as integers only. A thread starts that when three quarters of the packs known to
exist have been served.

Cost: the lengths of one block of samples at a time; at the end about 1 us a sample.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from threading import Event, Lock, Thread

import numpy as np

from streampack._threads import join_threads, start_threads
from streampack.config.order import SHUFFLE_BLOCK_SIZE
from streampack.errors import ConfigError
from streampack.plan.lane_stream import LaneStream, is_used
from streampack.plan.pack_queue import PackQueue
from streampack.plan.recipe import Recipe
from streampack.types import Int64Array

LEAVE_S = 1.0  # time limit for the thread to end
PLAN_AHEAD = 0.75  # fraction of the known packs served at which a thread starts to count the rest


def count_queue(
    recipe: Recipe, epoch: int, lane: int, queue: int, stop: Event | None = None
) -> int:
    """Plan one queue to the epoch's end, or until `stop` is set, and return its packs."""
    pack_queue = PackQueue(recipe, lane, queue, epoch, is_shuffled=False)
    while not pack_queue.is_complete and not (stop and stop.is_set()):
        pack_queue.extend()
        pack_queue.release(pack_queue.num_known)
    return pack_queue.num_known


def queue_slots(recipe: Recipe, epoch: int) -> Int64Array:
    """Plan all queues to their ends; return the slots that they serve, (num_lanes, num_queues)."""
    slots = np.zeros((recipe.num_lanes, recipe.num_queues), np.int64)
    for lane, queue in np.ndindex(slots.shape):
        if is_used(recipe, lane, queue):
            num_packs = count_queue(recipe, epoch, lane, queue)
            slots[lane, queue] = recipe.shapes.slots_of(queue, num_packs, is_all=True)
    return slots


def count_slots(recipe: Recipe, epoch: int) -> int:
    """Return the slots that all lanes serve in an epoch. Without carry, plan it to its end."""
    if recipe.mixing.epoch_end == "carry":
        return recipe.packs_per_carry_epoch
    shapes, totals = recipe.shapes, queue_slots(recipe, epoch).sum(axis=0).tolist()
    if not shapes.is_pure or recipe.mixing.batching_method != "per_stream":
        return sum(totals)
    return sum(shapes.whole(total, recipe.global_batch_size) for total in totals)


def packs_in(recipe: Recipe, num_planned: int) -> int:
    """Return the number of packs delivered. With epoch_end="drop", only whole batches are."""
    size = recipe.global_batch_size
    return num_planned // size * size if recipe.mixing.epoch_end == "drop" else num_planned


def slots_in(recipe: Recipe, num_planned: int) -> int:
    """Return the slots of an epoch with this many packs, including padding in its last batch."""
    size = recipe.global_batch_size
    return -(-packs_in(recipe, num_planned) // size) * size


class _LeastPacks:
    """A lower bound on the packs of a queue, refined by loading more lengths."""

    def __init__(self, recipe: Recipe, epoch: int, lane: int, queue: int) -> None:
        self._recipe = recipe
        self._epoch = epoch
        self._lane = lane
        self._numbers = recipe.streams_in(queue)
        self._packing = recipe.shapes.packings[queue]
        self._num_looked: int | None = None  # counted samples of each stream
        self._tokens = 0
        self.num_packs = 0
        self.is_final = False

    def grow(self) -> None:
        """Refine the bound: first without lengths, then by one more block of samples per call."""
        begin = self._num_looked or 0
        end = 0 if self._num_looked is None else begin + SHUFFLE_BLOCK_SIZE
        beyond = 0
        self.is_final = True
        for number in self._numbers:
            tokens, at_least, is_all = LaneStream(self._recipe, number, self._lane).tokens_in(
                self._epoch, begin, end
            )
            self._tokens += tokens
            beyond += at_least
            self.is_final &= is_all
        self._num_looked = end
        tokens = self._tokens + beyond
        self.num_packs = max(self.num_packs, -(-tokens // self._packing.row_tokens))


class LaneEndFinder:
    """Finds the ends of queues in lanes planned by other processes."""

    def __init__(self, recipe: Recipe, epoch: int) -> None:
        self._recipe = recipe
        self._epoch = epoch
        self._least: dict[tuple[int, int], _LeastPacks] = {}
        self._counts: dict[tuple[int, int], Future[int]] = {}
        self._asked: deque[tuple[int, int]] = deque()  # queues that still have to be counted
        self._lock = Lock()
        self._is_finding = False
        self._closed = Event()
        self._threads: list[Thread] = []  # the one that counts, if any

    def refine(self, lane: int, queue: int) -> tuple[int, bool]:
        """Refine the bound of a queue. Return its packs, and whether that count is exact."""
        least = self._least.get((lane, queue))
        if least is None:
            least = _LeastPacks(self._recipe, self._epoch, lane, queue)
            self._least[lane, queue] = least
        if least.is_final:
            return self._count(lane, queue).result(), True
        least.grow()
        return least.num_packs, False

    def look_ahead(self, served: Int64Array) -> None:
        """Start counting, in a thread, queues once most of their known packs are served."""
        for (lane, queue), least in self._least.items():
            slots = least.num_packs * int(self._recipe.shapes.slots_per_pack[queue])
            if least.is_final and served[lane, queue] >= PLAN_AHEAD * slots:
                self._count(lane, queue)

    def _count(self, lane: int, queue: int) -> Future[int]:
        with self._lock:
            if (lane, queue) not in self._counts:
                self._counts[lane, queue] = Future()
                self._asked.append((lane, queue))
            count = self._counts[lane, queue]
            starts = bool(self._asked) and not self._is_finding
            self._is_finding |= starts
        if starts:
            # A daemon thread, unlike an executor's, does not delay the interpreter's exit.
            self._threads = [Thread(target=self._find, name="streampack-lane-ends", daemon=True)]
            try:
                start_threads(self._threads)
            except ConfigError:  # the system allows no more threads: count in this one
                self._find()
        return count

    def _find(self) -> None:
        while True:
            with self._lock:
                self._is_finding = bool(self._asked)
                if not self._asked:
                    return
                key = self._asked.popleft()
            count = self._counts[key]
            if not count.set_running_or_notify_cancel():
                continue
            try:
                count.set_result(count_queue(self._recipe, self._epoch, *key, self._closed))
            except BaseException as failure:  # re-raised by result()
                count.set_exception(failure)

    def close(self) -> None:
        """Stop the thread, if there is one, and wait for its end."""
        self._closed.set()
        for count in self._counts.values():
            count.cancel()
        join_threads(self._threads, LEAVE_S)
