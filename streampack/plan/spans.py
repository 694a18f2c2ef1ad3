"""The epochs or the chapters of a run, and where each begins: counts of packs, lanes and debts.

::

    epoch_end=pad, drop    each epoch has a walk of its own, and drains
    epoch_end=carry        each epoch has so many packs of one walk
    chapter 0 --walk--> counts by lane and queue, lags --edge--> chapter 1 --walk--> ...

At a chapter's edge, counts continue. The next chapter begins with a new visit to the next lane.
What a stream is behind its share is kept too, as long as a choice of the schedule has as many
tokens.

Cost: about 100 ns a slot of the chapters before, and only if a state does not say where they end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from streampack.errors import ConfigError
from streampack.mix.schedule import OWED_STEP, ScheduleState, rounded_debts
from streampack.philox import random_bits
from streampack.plan.device_plan import DeviceView, touched_lanes
from streampack.plan.lane_ends import count_slots, queue_slots, slots_in
from streampack.plan.recipe import Recipe
from streampack.plan.slot_kernels import TURN
from streampack.plan.slots import SlotWalker, WalkState
from streampack.types import Int64Array


class RunPlan:
    """The chapters of a run, which have the same streams and lanes, and where each of them begins.

    A run without chapters has one recipe, that of all its epochs, and no `chapters`. `views` are
    what a device gets, of all epochs or of each chapter. `last_slots` are those of each queue in a
    last chapter of whole passes, shape (num_lanes, num_queues); see `run_of`.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        views: Sequence[DeviceView] = (),
        last_slots: Int64Array | None = None,
    ) -> None:
        self.views = list(views)
        self._last_slots = last_slots
        self.recipes = list(recipes)
        self.chapters = [recipe.chapter for recipe in recipes if recipe.chapter is not None]
        # Steps before each chapter, and of all if the last one ends.
        self._steps = [0]
        for recipe, chapter in zip(recipes, self.chapters, strict=False):
            if chapter.num_slots is not None:
                self._steps.append(self._steps[-1] + chapter.num_slots // recipe.global_batch_size)
        self._counted: dict[int, int] = {}  # slots that lanes serve in epochs
        self._starts: dict[int, WalkState] = {}
        if self.chapters:
            self._starts[0] = start_of_run(self.recipes[0])

    def __len__(self) -> int:
        return len(self.recipes)

    @property
    def ends_with_passes(self) -> bool:
        """Whether the last chapter ends where lanes run dry, after whole passes of its stream."""
        return self._last_slots is not None

    def uses(self, last: int | None = None) -> set[str]:
        """Return the streams with a share in a chapter up to `last`, or in any."""
        recipes = self.recipes[: None if last is None else last + 1]
        return {each.names[number] for each in recipes for number in each.used}

    def recipe(self, number: int) -> Recipe:
        """Return the recipe of an epoch or a chapter."""
        return self.recipes[number if self.chapters else 0]

    def view(self, number: int) -> DeviceView:
        """Return the part of an epoch or a chapter that a device gets."""
        return self.views[number if self.chapters else 0]

    def seen(self, views: Sequence[DeviceView]) -> Self:
        """Return the same run, as a device with other views gets it."""
        run = copy.copy(self)
        run.views = list(views)
        return run

    def whole(self) -> Self:
        """Return the same run, as a device gets it that has the batches of all, in order."""
        return self.seen([DeviceView(batch_size=view.batch_size) for view in self.views])

    def counted(self, epoch: int) -> int:
        """Return the slots that all lanes serve in an epoch, which are counted once."""
        if epoch not in self._counted:
            self._counted[epoch] = count_slots(self.recipes[0], epoch)
        return self._counted[epoch]

    def num_slots(self, number: int) -> int | None:
        """Return the slots of an epoch or a chapter, padding included, or None if it has no end."""
        if self.chapters:
            return self.chapters[number].num_slots
        return slots_in(self.recipes[0], self.counted(number))

    @property
    def num_steps(self) -> int | None:
        """Steps of a run of chapters, or None if the run has no end."""
        return self.stop_step(len(self) - 1) if self.chapters else None

    def stop_step(self, number: int) -> int | None:
        """Return the steps of the run to the end of an epoch or a chapter, or None: no end."""
        is_endless = self.chapters and self.chapters[number].num_slots is None
        return None if is_endless else self.first_step(number + 1)

    def first_step(self, number: int) -> int:
        """Return the steps of the run before an epoch or a chapter: its global batches."""
        if self.chapters:
            return self._steps[number]
        recipe, size = self.recipes[0], self.recipes[0].global_batch_size
        if recipe.is_endless:
            return number * (recipe.packs_per_carry_epoch // size)
        return sum(slots_in(recipe, self.counted(epoch)) // size for epoch in range(number))

    def step_of(self, number: int, position: int) -> int:
        """Return the step of the run to which the pack at a position belongs."""
        return self.first_step(number) + position // self.recipe(number).global_batch_size

    def lane_offset(self, number: int) -> int:
        """Return the slots before an epoch or a chapter, modulo a round of all lanes."""
        recipe = self.recipe(number)
        if not self.chapters:
            return number * recipe.packs_per_carry_epoch if recipe.is_endless else 0
        # Each chapter begins a visit to a lane.
        first_lane = (int(self.start(number).turn[TURN]) + 1) % recipe.num_lanes
        return first_lane * recipe.lane_turn

    def lanes(self, number: int, position: int) -> set[int]:
        """Return the lanes that the device plans from a position of an epoch or a chapter on."""
        before = self.lane_offset(number)
        return touched_lanes(self.recipe(number), self.view(number), position, before)

    def walker(
        self, number: int, position: int, extend_queue: Callable[[int, int], None]
    ) -> SlotWalker:
        """Return the walk of an epoch, or of a chapter on the way to `position`."""
        recipe = self.recipe(number)
        if not self.chapters:
            walker = SlotWalker(recipe, 0 if recipe.is_endless else number, extend_queue)
            if recipe.is_endless:
                walker.go_to_epoch(number)
            return walker
        walker = SlotWalker(recipe, 0, extend_queue, self.start(number))
        if self._last_slots is not None and number + 1 == len(self):
            walker.end_at(self.start(number).served + self._last_slots)
        elif recipe.is_mixed:
            size = recipe.global_batch_size
            walker.skip(position // size * size)
        return walker

    def start(self, chapter: int) -> WalkState:
        """Return the state in which a chapter begins; walks those before it if needed."""
        if chapter not in self._starts:
            before = chapter - 1
            recipe, num_slots = self.recipes[before], self.chapters[before].num_slots or 0
            walker = SlotWalker(recipe, 0, start=self.start(before))
            if recipe.is_mixed:
                walker.skip(num_slots)
            else:
                walker.walk_over(num_slots)
            self.note_end(before, walker.state())
        return self._starts[chapter]

    def note_end(self, chapter: int, end: WalkState) -> None:
        """Record where a chapter ends."""
        if chapter + 1 < len(self.recipes):
            recipes = self.recipes[chapter : chapter + 2]
            self._starts[chapter + 1] = start_after(end, *recipes)


def run_of(recipes: Sequence[Recipe]) -> RunPlan:
    """Return the run of some chapters.

    A last one of whole passes is as long as its queues. They are counted here, at about 1 us a
    sample; no chapter before uses its stream, so each begins with the first sample.
    """
    *before, recipe = recipes
    plan = recipe.chapter
    if plan is None or plan.passes is None:
        return RunPlan(recipes)
    slots = queue_slots(recipe, 0)
    if not slots.any():
        [number] = recipe.used
        raise ConfigError(
            f"chapters[{plan.number}] takes whole passes of stream {recipe.names[number]!r}, and "
            f"none of its samples is left at max_seq_len={recipe.packing.max_seq_len}; omit the "
            "chapter, or set overflow to split or truncate"
        )
    size = recipe.global_batch_size
    num_slots = -(-int(slots.sum()) // size) * size
    recipes = [*before, replace(recipe, chapter=replace(plan, num_slots=num_slots))]
    return RunPlan(recipes, last_slots=slots)


def start_of_run(recipe: Recipe) -> WalkState:
    """Return the state in which a run begins."""
    names, num_lanes = recipe.names, recipe.num_lanes
    schedule = None
    if not recipe.is_mixed:
        # Start from random debts, so that the lanes do not all begin with the same stream. A
        # stream's are its own, so that another one changes nothing.
        seed = recipe.order.seed
        bits = np.array([random_bits(num_lanes, seed, "debts", name) for name in names])
        owed = np.ascontiguousarray((bits >> np.uint64(34)).astype(np.int64).T)
        owed = owed >> OWED_STEP << OWED_STEP
        schedule = ScheduleState(lags=np.zeros(len(names), np.int64), owed=owed)
    return WalkState(
        served=np.zeros((num_lanes, recipe.num_queues), np.int64),
        turn=np.array([num_lanes - 1, 0, -1, 0, -1], np.int64),
        schedule=schedule,
    )


def start_after(end: WalkState, before: Recipe, after: Recipe) -> WalkState:
    """Return the state in which a chapter begins, from the end of the one before."""
    schedule = end.schedule
    if schedule is not None:
        tokens = [recipe.choice_slots * recipe.row_tokens for recipe in (before, after)]
        is_alike = tokens[0] == tokens[1]
        lags = _lags_after(schedule.lags, after) if is_alike else 0 * schedule.lags
        schedule = ScheduleState(lags=lags, owed=rounded_debts(schedule.owed))
    turn = np.array([end.turn[TURN], 0, -1, 0, -1], np.int64)
    return WalkState(served=end.served.copy(), turn=turn, schedule=schedule)


def _lags_after(lags: Int64Array, after: Recipe) -> Int64Array:
    """Return what the streams of a chapter are behind, in sum nothing; others keep their lags."""
    lags = lags.copy()
    used = after.used
    whole = int(lags[used].sum())
    shares = [after.chapter.begin[n] if after.chapter else 0 for n in used]
    lags[used] -= np.array([int(whole * share) for share in shares], np.int64)
    lags[used[shares.index(max(shares))]] -= int(lags[used].sum())
    return lags
