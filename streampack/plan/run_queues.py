"""The pack queues of one device in a run of chapters.

::

    edge     columns that the next chapter uses    turn to it, after the packs that are delivered
             others                                are parked: a snapshot, until they are used again

Cost: as `plan/pack_queues.py`; at an edge, two windows a column.
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
    """The pack queues of one device, by lane and column.

    They begin or resume in `chapter`. Columns without a snapshot are planned from the start of the
    run. Samples over max_seq_len are counted in `counted_lanes`.
    """

    def __init__(
        self, run: RunPlan, chapter: int, snapshots: list[State], counted_lanes: range
    ) -> None:
        recipe = run.recipes[chapter]
        passed = np.zeros((recipe.num_lanes, recipe.num_columns), np.int64)
        super().__init__(recipe, 0, passed, snapshots, counted_lanes)
        self._run = run
        self._chapter = chapter
        # Packs of a column before each chapter from one on, as the state says.
        self._starts = {
            (saved["lane"], saved["column"]): dict(enumerate(saved["begins"], saved["chapter"] + 1))
            for saved in snapshots
        }
        # Samples over max_seq_len of columns that are parked. Their snapshots may lack the last.
        self._parked_overlong = {key: saved["overlong"] for key, saved in self._loaded.items()}

    @property
    def overlong(self) -> Int64Array:
        """Samples over max_seq_len seen so far in the counted lanes, shape (num_streams,)."""
        overlong = super().overlong
        for lane, column in self._loaded:
            if lane in self._counted_lanes:
                overlong += self._parked_overlong[lane, column]
        return overlong

    @property
    def num_substituted(self) -> int:
        """Draws of the counted lanes that went to other streams because theirs was exhausted."""
        counted = self._counted_lanes
        now = [
            queue.num_substituted
            for (lane, _), queue in self._queues.items()
            if lane in counted and isinstance(queue, RunPackQueue)
        ]
        parked = [
            num_substituted(snapshot["arrivals"])
            for (lane, _), snapshot in self._loaded.items()
            if lane in counted
        ]
        return sum(now) + sum(parked)

    def begin_of(self, lane: int, column: int, chapter: int) -> int:
        """Return the packs of a column before a chapter."""
        known = self._starts.get((lane, column), {})
        if chapter in known:
            return int(known[chapter])
        return int(self._run.start(chapter).served[lane, column])

    def _make(self, lane: int, column: int, snapshot: State | None) -> PackQueue:
        first = snapshot["chapter"] if snapshot else 0
        queue = RunPackQueue(self._run.recipes[first], lane, column)
        if snapshot is not None:
            queue.restore(snapshot)
        for chapter in range(first + 1, self._chapter + 1):
            queue.turn(self._run.recipes[chapter], self.begin_of(lane, column, chapter))
        return queue

    def turn(self, chapter: int, lanes: set[int]) -> None:
        """Begin a chapter after the packs that are delivered; this device plans `lanes` in it."""
        recipe = self._recipe = self._run.recipes[chapter]
        self._chapter = chapter
        for (lane, column), queue in list(self._queues.items()):
            if not isinstance(queue, RunPackQueue):
                continue
            number = int(self.passed[lane, column])
            self._starts.setdefault((lane, column), {})[chapter] = number
            if lane in lanes and is_used(recipe, lane, column):
                queue.turn(recipe, number)
                self._note(lane, column)
            else:
                self._park(lane, column, queue)
        for key in self._loaded:
            self._starts.setdefault(key, {})[chapter] = int(self.passed[key])
        self.num_changes += 1

    def _park(self, lane: int, column: int, queue: RunPackQueue) -> None:
        key = lane, column
        self._loaded[key] = queue.rest(int(self.passed[key]))
        self._parked_overlong[key] = queue.overlong
        del self._queues[key]
        self._saved.pop(key, None)
        self._changed.discard(key)
        self._planned[key], self._crossings[key] = 0, ENDLESS

    def snapshots(self) -> list[State]:
        """Return, for each column, the snapshot from which its undelivered packs can be planned."""
        parked = [
            self._labelled(lane, column, snapshot)
            for (lane, column), snapshot in self._loaded.items()
            if not is_used(self._recipe, lane, column)
        ]
        return super().snapshots() + parked

    def _labelled(self, lane: int, column: int, snapshot: State) -> State:
        chapters = range(snapshot["chapter"] + 1, self._chapter + 1)
        begins = [self.begin_of(lane, column, chapter) for chapter in chapters]
        return {**super()._labelled(lane, column, snapshot), "begins": begins}
