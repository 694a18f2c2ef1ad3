"""The canonical sequence of packs of a run of chapters, and the part of it that one device gets.

::

    chapter 0            chapter 1            chapter 2
    a walk    --edge-->  a walk    --edge-->  ...          one after another, as one sequence
        '----- PackQueues: the queues live on ----'

Each chapter has positions of its own, from 0. Steps to be skipped are walked, and planned only as
far as a lane needs them for what follows.

Cost: as `plan/sequence.py`, and two windows a queue at each edge.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from streampack.plan.device import (
    DevicePlan,
    DeviceView,
    counted_lanes,
    touched_lanes,
)
from streampack.plan.lane_stream import is_used
from streampack.plan.pack_queues import PackQueues
from streampack.plan.run_plan import RunPlan, exhausted
from streampack.plan.sequence import EpochSequence
from streampack.plan.slot_kernels import TURN
from streampack.plan.slots import SlotWalker, WalkState
from streampack.plan.state import Progress


class RunSequence(EpochSequence):
    """One device's batches of a run of chapters, from a position on; `epoch` is the chapter.

    `views` are the parts of the chapters that this device gets, and `walk` is what
    `walk_state` returned at `start`. Steps of the run in `skips`, ranges [first, stop), are not
    delivered. `stop` is one past the last chapter to deliver; None: the run's last.
    """

    def __init__(
        self,
        run: RunPlan,
        views: Sequence[DeviceView],
        start: Progress | None = None,
        *,
        walk: WalkState | None = None,
        skips: Sequence[tuple[int, int]] = (),
        stop: int | None = None,
    ) -> None:
        self._run = run
        self._stop = len(run) if stop is None else stop
        self._walk_states: dict[int, deque[WalkState]] = {}
        self._views = list(views)
        self._skips = sorted(skips)
        self._substituted_before = 0  # in chapters before
        start = start or Progress()
        chapter = start.epoch
        recipe = run.recipes[chapter]
        counted, served = counted_lanes(recipe, views[chapter]), run.start(0).served
        self._queues = PackQueues(recipe, 0, served, start.snapshots, counted, run)
        self._begin(chapter, start.position, walk)
        num_slots = run.num_slots(chapter)
        if num_slots is not None and start.position >= num_slots and chapter + 1 < self._stop:
            self._turn()

    def _begin(self, chapter: int, position: int, walk: WalkState | None = None) -> None:
        """Begin a chapter that the queues have turned to; its walk resumes from `walk`."""
        recipe = self._run.recipes[chapter]
        self._set_up(recipe, self._views[chapter], chapter, position)
        self._is_carry = True
        start = walk or self._run.start(chapter)
        self._walk = SlotWalker(recipe, 0, self._extend_queue, start)
        self._walk_states[chapter] = self._walk.states
        self._own_lanes = self._lanes(chapter, position)
        num_slots = self._run.num_slots(chapter)
        if num_slots is not None:
            self._set_total(num_slots)
        drains = self._run.chapters[chapter].drains
        if recipe.is_mixed and not drains:
            size = recipe.global_batch_size
            self._walk.skip(position // size * size - start.slot)
        self._first_slot = self._asked = self._released = self._walk.state().slot
        self._queues.passed[:] = self._walk.served
        self._pass_over(position)
        self._note_passed()
        self._open_queues()
        self._queues.check_passed(self.position)

    def _lanes(self, chapter: int, position: int) -> set[int]:
        """Return the lanes that this device plans in a chapter from a position on."""
        recipe = self._run.recipes[chapter]
        # A state inside a chapter begins a visit to a lane, or lies in one.
        first_lane = (int(self._run.start(chapter).turn[TURN]) + 1) % recipe.num_lanes
        return touched_lanes(recipe, self._views[chapter], position, first_lane * recipe.lane_run)

    def _set_total(self, num_packs: int) -> None:
        drains = self._run.chapters[self.epoch].drains
        if num_packs != self._run.num_slots(self.epoch) and not drains:
            raise exhausted(self._recipe, num_packs)
        super()._set_total(num_packs)

    def _count(self, end: int) -> int:
        return end  # a chapter has whole global batches, padding included

    def _open_queues(self) -> None:
        for lane in self._own_lanes:
            for queue in range(self._recipe.num_queues):
                if is_used(self._recipe, lane, queue):
                    self._queues.get(lane, queue)

    @property
    def is_finished(self) -> bool:
        """Whether the run has no step after this position."""
        return super().is_finished and self.epoch + 1 == self._stop

    @property
    def substituted(self) -> int:
        """Slots that went to another stream because theirs was exhausted; with "random", draws.

        Draws count when they are planned, each on one device.
        """
        if self._recipe.is_mixed:
            return self._queues.num_substituted
        return self._substituted_before + super().substituted

    def next(self, most: int = 1, *, fetch: bool = True) -> DevicePlan | None:
        """Return the plan of this device's next batches, or None at the run's end."""
        while True:
            most_here = self._skip(most) if self._skips else most
            plan = super().next(most_here, fetch=fetch)
            if plan is not None or self.epoch + 1 == self._stop:
                return plan
            self._turn()

    def _skip(self, most: int) -> int:
        """Pass over steps that are skipped; return the batches that may follow, up to `most`."""
        size = self._recipe.global_batch_size
        before = self._run.steps_before(self.epoch)
        for first, stop in self._skips:
            step = before + self.position // size
            # A step that has begun is delivered to its end.
            if first <= step < stop and self.position % size == 0:
                last = stop - before
                if self.num_slots is not None:
                    last = min(last, self.num_slots // size)
                self.num_skipped += last - (step - before)
                self.position = last * size
                self._pass_over(self.position)
        step = before + self.position // size
        nexts = [first for first, _ in self._skips if first > step]
        if nexts:
            left = (nexts[0] - before) * size - self.position
            most = min(most, max(left // self._window, 1))
        return most

    def _turn(self) -> None:
        """Begin the next chapter."""
        self._substituted_before += super().substituted
        self._note_passed()
        self._run.note_end(self.epoch, self._walk.state())
        self.close()
        chapter = self.epoch + 1
        self._queues.turn(self._run.recipes[chapter], self._lanes(chapter, 0))
        self._begin(chapter, 0)

    def walk_state(self, chapter: int, position: int) -> WalkState | None:
        """Return the last known state at or before a position from which the walk resumes."""
        known = [state for state in self._walk_states.get(chapter, ()) if state.slot <= position]
        return known[-1] if known else None
