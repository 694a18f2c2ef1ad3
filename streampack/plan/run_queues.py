"""The pack queues of one device in a run of chapters.

::

    edge     queues that the next chapter uses    turn to it, after the packs that are delivered
             others                                are parked: a snapshot, until they are used again

Cost: as `plan/pack_queues.py`; at an edge, two windows a queue.
"""

from __future__ import annotations

import numpy as np

from streampack.plan.lane_stream import is_used
from streampack.plan.pack_queue import PackQueue
from streampack.plan.pack_queues import PackQueues
from streampack.plan.run_plan import RunPlan
from streampack.plan.run_queue import RunPackQueue
from streampack.plan.run_samples import num_substituted
from streampack.plan.slots import ENDLESS
from streampack.types import Int64Array, State


class RunQueues(PackQueues):
    """The pack queues of one device, by lane and queue.

    They begin or resume in `chapter`. Queues without a snapshot are planned from the start of the
    run. Samples over max_seq_len are counted in `counted_lanes`.
    """

    def __init__(
        self, run: RunPlan, chapter: int, snapshots: list[State], counted_lanes: range
    ) -> None:
        recipe = run.recipes[chapter]
        passed = np.zeros((recipe.num_lanes, recipe.num_queues), np.int64)
        super().__init__(recipe, 0, passed, snapshots, counted_lanes)
        self._run = run
        self._chapter = chapter
        # Packs of a queue before each chapter from one on, as the state says.
        self._starts = {
            (saved["lane"], saved["queue"]): dict(enumerate(saved["begins"], saved["chapter"] + 1))
            for saved in snapshots
        }
        # Samples left out by queues that are parked. Their snapshots may lack the last.
        self._parked_dropped = {key: saved["dropped"] for key, saved in self._loaded.items()}

    @property
    def dropped(self) -> Int64Array:
        """Samples left out so far in the counted lanes, shape (num_streams,)."""
        dropped = super().dropped
        for lane, queue in self._loaded:
            if lane in self._counted_lanes:
                dropped += self._parked_dropped[lane, queue]
        return dropped

    @property
    def num_substituted(self) -> int:
        """Draws of the counted lanes that went to other streams because theirs was exhausted."""
        counted = self._counted_lanes
        now = [
            pack_queue.num_substituted
            for (lane, _), pack_queue in self._queues.items()
            if lane in counted and isinstance(pack_queue, RunPackQueue)
        ]
        parked = [
            num_substituted(snapshot["arrivals"])
            for (lane, _), snapshot in self._loaded.items()
            if lane in counted
        ]
        return sum(now) + sum(parked)

    def begin_of(self, lane: int, queue: int, chapter: int) -> int:
        """Return the packs of a queue before a chapter."""
        known = self._starts.get((lane, queue), {})
        if chapter in known:
            return int(known[chapter])
        return int(self._run.start(chapter).served[lane, queue])

    def _make(self, lane: int, queue: int, snapshot: State | None) -> PackQueue:
        first = snapshot["chapter"] if snapshot else 0
        pack_queue = RunPackQueue(self._run.recipes[first], lane, queue)
        if snapshot is not None:
            pack_queue.restore(snapshot)
        for chapter in range(first + 1, self._chapter + 1):
            pack_queue.turn(self._run.recipes[chapter], self.begin_of(lane, queue, chapter))
        return pack_queue

    def turn(self, chapter: int, lanes: set[int]) -> None:
        """Begin a chapter after the packs that are delivered; this device plans `lanes` in it."""
        recipe = self._recipe = self._run.recipes[chapter]
        self._chapter = chapter
        for (lane, queue), pack_queue in list(self._queues.items()):
            if not isinstance(pack_queue, RunPackQueue):
                continue
            number = int(self.passed[lane, queue])
            self._starts.setdefault((lane, queue), {})[chapter] = number
            if lane in lanes and is_used(recipe, lane, queue):
                pack_queue.turn(recipe, number)
                self._note(lane, queue)
            else:
                self._park(lane, queue, pack_queue)
        for key in self._loaded:
            self._starts.setdefault(key, {})[chapter] = int(self.passed[key])
        self.num_changes += 1

    def _park(self, lane: int, queue: int, pack_queue: RunPackQueue) -> None:
        key = lane, queue
        self._loaded[key] = pack_queue.rest(int(self.passed[key]))
        self._parked_dropped[key] = pack_queue.dropped
        del self._queues[key]
        self._saved.pop(key, None)
        self._changed.discard(key)
        self._planned[key], self._crossings[key] = 0, ENDLESS

    def snapshots(self) -> list[State]:
        """Return, for each queue, the snapshot from which its undelivered packs can be planned."""
        parked = [
            self._labelled(lane, queue, snapshot)
            for (lane, queue), snapshot in self._loaded.items()
            if not is_used(self._recipe, lane, queue)
        ]
        return super().snapshots() + parked

    def _labelled(self, lane: int, queue: int, snapshot: State) -> State:
        chapters = range(snapshot["chapter"] + 1, self._chapter + 1)
        begins = [self.begin_of(lane, queue, chapter) for chapter in chapters]
        return {**super()._labelled(lane, queue, snapshot), "begins": begins}
