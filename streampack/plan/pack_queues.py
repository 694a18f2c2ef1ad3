"""The pack queues of one device: delivered packs, snapshots, and packs by slot.

::

    slots     lane 0  lane 0  lane 2  lane 2          in any order, of any queues
                 |       |       |       |            gather: all packs of a queue together
    packs     [ a b ] [ c ]   [ d e f ] [ g ]         in slot order, one array

Delivered packs are recorded on demand and when a queue is planned further, so a batch costs the
same for one queue as for a hundred. Where a chapter begins, queues that it uses start it. Others
are parked: only a snapshot is kept, until they are used again.

Cost: about 10 ns a segment, and 10 us a queue when a chunk of its samples is planned or delivered;
at the start of a chapter, two windows a queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from streampack.plan.lane_stream import is_used
from streampack.plan.pack_order import copy_packs
from streampack.plan.pack_queue import PackQueue
from streampack.plan.recipe import Recipe
from streampack.plan.slot_kernels import LANE, PACK, QUEUE
from streampack.plan.slots import ENDLESS
from streampack.plan.spans import RunPlan
from streampack.types import NUM_COLUMNS, Int64Array, Packs, State


class PackQueues:
    """The pack queues of one device, by lane and queue.

    They begin in epoch or chapter `number` of a run. Queues without a snapshot are planned from its
    start, or from that of the run if it is endless.

    Attributes:
        passed: Delivered packs of each queue, shape (num_lanes, num_queues).
        num_changes: Number of times that a queue was planned further, or released packs.
    """

    def __init__(self, run: RunPlan, number: int, snapshots: list[State]) -> None:
        self._recipe = recipe = run.recipe(number)
        self._run = run
        self._first_epoch = 0 if recipe.is_endless else number
        delivered = np.zeros((recipe.num_lanes, recipe.num_queues), np.int64)
        self._loaded: dict[tuple[int, int], State] = {}
        # Packs of a queue before each chapter from one on, as far as they are known.
        self._chapter_begins: dict[tuple[int, int], dict[int, int]] = {}
        # Samples skipped by queues that are parked. Their snapshots may lack the last.
        self._parked_dropped: dict[tuple[int, int], Any] = {}
        for saved in snapshots:
            key, first = (saved["lane"], saved["queue"]), saved.get("chapter", 0) + 1
            self._chapter_begins[key] = dict(enumerate(saved.get("begins", ()), first))
            self._loaded[key], self._parked_dropped[key] = saved, saved["dropped"]
        self._queues: dict[tuple[int, int], PackQueue] = {}
        self._planned = np.zeros_like(delivered)  # known packs of each queue
        # Packs at which the next snapshot applies.
        self._crossings = np.full_like(delivered, ENDLESS)
        self._changed: set[tuple[int, int]] = set()
        self._saved: dict[tuple[int, int], list[State]] = {}
        view = run.view(number)
        # Each lane is counted by one device, although several may plan it.
        self._counted_lanes = range(view.place, recipe.num_lanes, view.num_devices)
        self._num_counted = self._num_summed = -1
        self._high_water = 0
        self._dropped = np.zeros(len(recipe.streams), np.int64)
        self.delivered = delivered
        self.num_changes = 0

    def __iter__(self) -> Iterator[PackQueue]:
        return iter(self._queues.values())

    @property
    def high_water_tokens(self) -> int:
        """The sum of the maximum number of tokens held by each packer."""
        if self._num_summed != self.num_changes:
            self._num_summed = self.num_changes
            self._high_water = sum([queue.windows.packer.high_water[0] for queue in self])
        return self._high_water

    @property
    def dropped(self) -> Int64Array:
        """Samples skipped so far in the counted lanes, shape (num_streams,)."""
        if self._num_counted != self.num_changes:
            self._num_counted = self.num_changes
            self._dropped = np.zeros(len(self._recipe.streams), np.int64)
            for (lane, _), pack_queue in self._queues.items():
                if lane in self._counted_lanes:
                    self._dropped += pack_queue.windows.dropped
            if self._recipe.chapter is not None:
                for lane, queue in self._loaded:
                    if lane in self._counted_lanes:
                        self._dropped += self._parked_dropped[lane, queue]
        return self._dropped.copy()

    def get(self, lane: int, queue: int) -> PackQueue:
        """Return a queue; create it on the first call."""
        pack_queue = self._queues.get((lane, queue))
        if pack_queue is None:
            pack_queue = self._make(lane, queue, self._loaded.pop((lane, queue), None))
            self._queues[lane, queue] = pack_queue
            self._note(lane, queue)
        return pack_queue

    def _make(self, lane: int, queue: int, snapshot: State | None) -> PackQueue:
        first = snapshot.get("chapter", 0) if snapshot else 0
        recipes = self._run.recipes
        pack_queue = PackQueue(recipes[first], lane, queue, self._first_epoch)
        if snapshot is not None:
            pack_queue.restore(snapshot)
        for chapter in range(first + 1, self._chapter + 1):
            pack_queue.start_chapter(recipes[chapter], self._begin_of(lane, queue, chapter))
        return pack_queue

    # Chapters.

    @property
    def _chapter(self) -> int:
        return self._recipe.chapter.number if self._recipe.chapter else 0

    def _begin_of(self, lane: int, queue: int, chapter: int) -> int:
        known = self._chapter_begins.get((lane, queue), {})
        if chapter in known:
            return int(known[chapter])
        return int(self._run.start(chapter).served[lane, queue])

    def start_chapter(self, recipe: Recipe, lanes: set[int]) -> None:
        """Begin a chapter after the packs that are delivered; this device plans `lanes` in it."""
        self._recipe = recipe
        for (lane, queue), pack_queue in list(self._queues.items()):
            if lane in lanes and is_used(recipe, lane, queue):
                pack_queue.start_chapter(recipe, int(self.delivered[lane, queue]))
                self._note(lane, queue)
            else:
                self._park(lane, queue, pack_queue)
        self.num_changes += 1

    def _park(self, lane: int, queue: int, pack_queue: PackQueue) -> None:
        key = lane, queue
        self._loaded[key] = pack_queue.rest(int(self.delivered[key]))
        self._parked_dropped[key] = pack_queue.windows.dropped
        del self._queues[key]
        self._saved.pop(key, None)
        self._changed.discard(key)
        self._planned[key], self._crossings[key] = 0, ENDLESS

    def extend(self, lane: int, queue: int) -> PackQueue:
        """Plan a queue one chunk further, and return it."""
        pack_queue = self.get(lane, queue)
        pack_queue.release(int(self.delivered[lane, queue]))
        pack_queue.extend()
        self._note(lane, queue)
        return pack_queue

    def know_delivered(self) -> None:
        """Plan every queue up to its delivered packs, and release those."""
        for (lane, queue), pack_queue in self._queues.items():
            delivered = int(self.delivered[lane, queue])
            pack_queue.know(delivered - 1, keep=delivered)
            self._note(lane, queue)

    def deliver(self, slots: Int64Array) -> None:
        """Record that the packs of these slots are delivered, in order."""
        # The packs of a queue ascend, and numpy keeps the last value written.
        queues = slots[:, QUEUE]
        delivered = self._recipe.shapes.packs_before(queues, slots[:, PACK] + 1)
        self.delivered[slots[:, LANE], queues] = delivered
        for lane, queue in np.argwhere(self.delivered >= self._crossings).tolist():
            self._queues[lane, queue].release(int(self.delivered[lane, queue]))
            self._note(lane, queue)

    def num_quiet(self, slots: Int64Array) -> int:
        """Return how many of these slots can be delivered before a snapshot changes."""
        queues = slots[:, QUEUE]
        delivered = self._recipe.shapes.packs_before(queues, slots[:, PACK] + 1)
        # The first slot with a pack behind the next snapshot of its queue.
        crossed = np.flatnonzero(delivered >= self._crossings[slots[:, LANE], queues])
        return int(crossed[0]) if len(crossed) else len(slots)

    def snapshots(self) -> list[State]:
        """Return, for each queue, the snapshot from which its undelivered packs can be planned."""
        for lane, queue in self._changed:
            self._saved[lane, queue] = [
                self._labelled(lane, queue, snapshot)
                for snapshot in self._queues[lane, queue].snapshot(int(self.delivered[lane, queue]))
            ]
        self._changed.clear()
        saved = [snapshot for key in self._queues for snapshot in self._saved[key]]
        if self._recipe.chapter is None:
            return saved
        return saved + [
            self._labelled(lane, queue, snapshot)
            for (lane, queue), snapshot in self._loaded.items()
            if not is_used(self._recipe, lane, queue)
        ]

    def _labelled(self, lane: int, queue: int, snapshot: State) -> State:
        labelled = {"lane": lane, "queue": queue, **snapshot}
        if self._recipe.chapter is not None:
            chapters = range(snapshot["chapter"] + 1, self._chapter + 1)
            labelled["begins"] = [self._begin_of(lane, queue, chapter) for chapter in chapters]
        return labelled

    def gather(self, slots: Int64Array) -> Packs:
        """Return the packs that begin in some slots, in order; all are known, see `know`."""
        slots = self._begins(slots)
        groups = self._by_queue(slots)
        begins, sizes = np.empty((2, len(slots)), np.int64)
        for pack_queue, rows in groups:
            begins[rows], sizes[rows] = pack_queue.places(slots[rows, PACK])
        ends = np.cumsum(sizes)
        starts = ends - sizes
        out = np.empty((int(ends[-1]), NUM_COLUMNS), np.int64)
        for pack_queue, rows in groups:
            copy_packs(pack_queue.segments, begins[rows], sizes[rows], starts[rows], out)
        return Packs(segments=out, ends=ends)

    def know(self, slots: Int64Array, num_slots: int) -> int:
        """Plan the first `num_slots` slots; return how many are known, with those after them."""
        self._plan(self._begins(slots[:num_slots]))
        lanes, queues = slots[:, LANE], slots[:, QUEUE]
        packs = self._recipe.shapes.packs_before(queues, slots[:, PACK])
        # What is known for free counts too.
        missing = np.flatnonzero(packs >= self._planned[lanes, queues])
        return int(missing[0]) if len(missing) else len(slots)

    def _begins(self, slots: Int64Array) -> Int64Array:
        """Return the slots at which packs begin, with the numbers of these packs."""
        if self._recipe.shapes.is_uniform:
            return slots
        slots = slots[slots[:, PACK] % self._recipe.shapes.slots_per_pack[slots[:, QUEUE]] == 0]
        slots[:, PACK] = self._recipe.shapes.packs_before(slots[:, QUEUE], slots[:, PACK])
        return slots

    def _by_queue(self, slots: Int64Array) -> list[tuple[PackQueue, Int64Array]]:
        """Group slots by queue; return each queue and the rows of its slots, in order."""
        numbers = slots[:, LANE] * self._recipe.num_queues + slots[:, QUEUE]
        # Stable: the slots of a queue stay in order.
        order = np.argsort(numbers, kind="stable")
        bounds = np.flatnonzero(np.diff(numbers[order])) + 1
        groups = np.split(order, bounds) if len(bounds) else [order]
        return [(self.get(*slots[rows[0], :PACK].tolist()), rows) for rows in groups]

    def _plan(self, slots: Int64Array) -> None:
        known = self._planned[slots[:, LANE], slots[:, QUEUE]]
        if (slots[:, PACK] < known).all():
            return
        for pack_queue, rows in self._by_queue(slots):
            packs = slots[rows, PACK]
            pack_queue.know(int(packs[-1]), keep=int(packs[0]))
            self._note(*slots[rows[0], :PACK].tolist())

    def _note(self, lane: int, queue: int) -> None:
        pack_queue = self._queues[lane, queue]
        self._planned[lane, queue] = pack_queue.num_known
        self._crossings[lane, queue] = pack_queue.next_crossing
        self._changed.add((lane, queue))
        self.num_changes += 1
