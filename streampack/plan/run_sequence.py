"""The canonical sequence of packs of a run of chapters, and the part of it that one device gets.

::

    chapter 0                     chapter 1               chapter 2
    ChapterSequence   --edge-->   ChapterSequence  ...    one after another, as one sequence
          '------------ RunQueues: the columns live on -------'

Each chapter has positions of its own, from 0. Steps to be skipped are walked, and planned only as
far as a lane needs them for what follows.

Cost: as `plan/sequence.py`, and two windows a column at each edge.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from streampack.plan.device import (
    DevicePlan,
    DeviceView,
    counted_lanes,
    expected_packs,
    touched_lanes,
)
from streampack.plan.recipe import Recipe
from streampack.plan.run_plan import RunPlan, exhausted
from streampack.plan.run_queues import RunQueues
from streampack.plan.sequence import EpochSequence
from streampack.plan.shard_window import ShardDelta
from streampack.plan.slot_kernels import TURN
from streampack.plan.slots import SlotWalker, WalkPlace
from streampack.plan.state import Progress
from streampack.types import Int64Array, State


def lanes_of(recipe: Recipe, view: DeviceView, start: WalkPlace, position: int) -> set[int]:
    """Return the lanes that a device plans in a chapter that begins at `start`."""
    first_lane = (int(start.turn[TURN]) + 1) % recipe.num_lanes
    return touched_lanes(recipe, view, position, first_lane * recipe.lane_run)


class ChapterSequence(EpochSequence):
    """One device's batches of one chapter, from a position on, which counts the chapter's packs.

    `columns` have turned to the chapter. The walk resumes from `place`, at or before the position;
    None: from the chapter's start.
    """

    def __init__(
        self,
        run: RunPlan,
        view: DeviceView,
        chapter: int,
        columns: RunQueues,
        *,
        position: int = 0,
        place: WalkPlace | None = None,
    ) -> None:
        recipe = run.recipes[chapter]
        self._set_up(recipe, view, chapter, position)
        start = place or run.start(chapter)
        self._is_carry = True
        self._columns = columns
        self._walk = SlotWalker(recipe, 0, expected_packs(recipe), self._extend_column, start)
        # A place inside a chapter begins a visit to a lane, or lies in one.
        self._own_lanes = lanes_of(recipe, view, run.start(chapter), position)
        num_slots = run.num_slots(chapter)
        if num_slots is not None:
            self._set_total(num_slots)
        if recipe.is_mixed:
            size = recipe.global_batch_size
            self._walk.skip(position // size * size - start.slot)
        self._first_slot = self._asked = self._released = self._walk.place().slot
        columns.passed[:] = self._walk.served
        self._pass_over(position)
        self._note_passed()
        self._open_columns()
        self._check_snapshots()

    def _set_total(self, num_packs: int) -> None:
        plan = self._recipe.chapter
        if plan is not None and num_packs != plan.num_slots:
            raise exhausted(self._recipe, num_packs)
        super()._set_total(num_packs)

    def _open_columns(self) -> None:
        for lane in self._own_lanes:
            for column in range(self._recipe.num_columns):
                if self._recipe.is_used(lane, column):
                    self._columns.queue(lane, column)

    def jump(self, position: int) -> None:
        """Move to a position without delivering what lies before it."""
        self.position = position
        self._pass_over(position)

    def end(self) -> WalkPlace:
        """Pass all slots on to the columns, once they are delivered; return where the walk ends."""
        self._note_passed()
        return self._walk.place()

    @property
    def places(self) -> deque[WalkPlace]:
        """The last places from which the chapter's walk can resume."""
        return self._walk.places


class RunSequence:
    """One device's batches of a run of chapters, from a position on; as `EpochSequence`.

    Attributes:
        epoch: The current chapter.
        position: Packs of the chapter before the next step, over all ranks.
        num_skipped: Steps that were skipped.
        num_omitted: 0, as chapters are whole global batches.

    Args:
        run: The chapters.
        views: The part of each chapter that this device gets.
        start: The chapter to begin in, as epoch, with the position and snapshots there.
        place: The result of `place` at that position.
        skips: Ranges [first, stop) of steps of the run that are not delivered.
        stop: One past the last chapter; None: the run's last.
    """

    def __init__(
        self,
        run: RunPlan,
        views: Sequence[DeviceView],
        start: Progress | None = None,
        *,
        place: WalkPlace | None = None,
        skips: Sequence[tuple[int, int]] = (),
        stop: int | None = None,
    ) -> None:
        self._run = run
        self._stop = len(run) if stop is None else stop
        self._places: dict[int, deque[WalkPlace]] = {}
        self._views = list(views)
        self._skips = sorted(skips)
        self._substituted = 0
        self.num_skipped = 0
        self.num_omitted = 0
        start = start or Progress()
        chapter = start.epoch
        counted = counted_lanes(run.recipes[chapter], views[chapter])
        self._columns = RunQueues(run, chapter, start.snapshots, counted)
        self._begin(chapter, start.position, place)
        num_slots = run.num_slots(chapter)
        if num_slots is not None and start.position >= num_slots and chapter + 1 < self._stop:
            self._turn()

    def _begin(self, chapter: int, position: int, place: WalkPlace | None) -> None:
        self._part = ChapterSequence(
            self._run, self._views[chapter], chapter, self._columns, position=position, place=place
        )
        self._places[chapter] = self._part.places

    @property
    def epoch(self) -> int:
        """The current chapter."""
        return self._part.epoch

    @property
    def position(self) -> int:
        """Packs of the chapter before the next step, over all ranks."""
        return self._part.position

    @property
    def num_slots(self) -> int | None:
        """Slots of the chapter; None: it has no end."""
        return self._part.num_slots

    @property
    def is_finished(self) -> bool:
        """Whether the run has no step after this position."""
        return self._part.is_finished and self.epoch + 1 == self._stop

    @property
    def substituted(self) -> int:
        """Slots that went to another stream because theirs was exhausted; with "random", draws.

        Draws count when they are planned, each on one device.
        """
        if self._run.recipes[self.epoch].is_mixed:
            return self._columns.num_substituted
        return self._substituted + self._part.substituted

    @property
    def buffered_tokens(self) -> int:
        """The sum of the maximum number of tokens held by each packer of this device."""
        return self._columns.high_water_tokens

    @property
    def overlong(self) -> Int64Array:
        """Samples over max_seq_len seen since the run began, per stream."""
        return self._columns.overlong

    @property
    def straggler(self) -> tuple[float, float] | None:
        """Mean time of a global batch over the ideal in this chapter; None: none dealt."""
        return self._part.straggler

    def next(self, most: int = 1, *, fetch: bool = True) -> DevicePlan | None:
        """Return the plan of this device's next batches, or None at the run's end."""
        while True:
            most_here = self._skip(most) if self._skips else most
            plan = self._part.next(most_here, fetch=fetch)
            if plan is not None or self.epoch + 1 == self._stop:
                return plan
            self._turn()

    def _skip(self, most: int) -> int:
        """Pass over steps that are skipped; return the batches that may follow, up to `most`."""
        part = self._part
        size = self._run.recipes[part.epoch].global_batch_size
        before = self._run.steps_before(part.epoch)
        for first, stop in self._skips:
            step = before + part.position // size
            # A step that has begun is delivered to its end.
            if first <= step < stop and part.position % size == 0:
                last = stop - before
                if part.num_slots is not None:
                    last = min(last, part.num_slots // size)
                self.num_skipped += last - (step - before)
                part.jump(last * size)
        step = before + part.position // size
        nexts = [first for first, _ in self._skips if first > step]
        if nexts:
            left = (nexts[0] - before) * size - part.position
            most = min(most, max(left // self._views[part.epoch].window, 1))
        return most

    def _turn(self) -> None:
        """Begin the next chapter."""
        part, chapter = self._part, self._part.epoch + 1
        self._substituted += part.substituted
        self._run.note_end(part.epoch, part.end())
        part.close()
        recipe, view = self._run.recipes[chapter], self._views[chapter]
        lanes = lanes_of(recipe, view, self._run.start(chapter), 0)
        self._columns.turn(chapter, lanes, counted_lanes(recipe, view))
        self._begin(chapter, 0, None)

    def snapshots(self) -> list[State]:
        """Return the snapshots from which this device can plan the packs that come next."""
        return self._part.snapshots()

    def place(self, chapter: int, position: int) -> WalkPlace | None:
        """Return the last known place at or before a position from which the walk resumes."""
        known = [place for place in self._places.get(chapter, ()) if place.slot <= position]
        return known[-1] if known else None

    def shards_ahead(self) -> ShardDelta | None:
        """Return the shards that are needed, and those finished since the last call."""
        return self._part.shards_ahead()

    def close(self) -> None:
        """End the sequence."""
        self._part.close()
