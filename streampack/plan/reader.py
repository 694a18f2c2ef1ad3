"""Reads the plan of a run from a place on: chapter after chapter, or epoch after epoch.

::

    run, start --> PackSequence --> part --> part --> ...  --> stop
                                    its packs, and the slot at which each begins

Simulations, reports, `at`, `where` and `diff` read plans with it: of `RunPlan.whole`, or of some
`lanes_of` it only.

Cost: planning, about 0.4 us a sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np

from streampack.plan.device_plan import DevicePlan, DeviceView, Totals
from streampack.plan.lane_stream import is_used
from streampack.plan.recipe import Recipe
from streampack.plan.sequence import PackSequence
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress
from streampack.types import Float64Array, Int64Array

MOST = 512  # batches planned per call

Place: TypeAlias = tuple[int, int]
"""An epoch or a chapter, and a position in it."""
END: Place = (1 << 62, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotPack:
    """A pack in its place."""

    slot: int
    """Its first slot in the epoch or chapter."""
    num_slots: int
    """Its length, in slots."""
    segments: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanPart:
    """Consecutive batches of a device, and where their packs are."""

    plan: DevicePlan
    recipe: Recipe
    """That of the epoch or chapter."""
    begin: int
    """The position at which the first of the batches begins."""
    slots: Int64Array
    """The slot of the epoch or chapter at which each pack begins, shape (num_packs,)."""
    shares: Float64Array | None
    """Shares that the chapter asks for, shape (num_streams,), or None if the run has epochs."""

    def pack(self, number: int) -> SlotPack:
        """Return one of the packs."""
        return SlotPack(
            slot=int(self.slots[number]),
            num_slots=self.plan.slots_per_pack,
            segments=self.plan.packs[number],
        )


class PlanReader:
    """Reads a plan part by part; an epoch without a batch ends it.

    Steps of the run in `skips`, ranges [first, stop), are omitted.

    Attributes:
        stop: The place before which the last batch begins. It may be set again to read on.
    """

    def __init__(
        self,
        run: RunPlan,
        start: Progress | None = None,
        *,
        skips: Sequence[tuple[int, int]] = (),
        stop: Place = END,
    ) -> None:
        self._run, self._skips = run, skips
        self.stop = stop
        self._before = Totals(dropped=np.zeros(len(run.recipes[0].streams), np.int64))
        self._begin(start or Progress())

    def _begin(self, start: Progress) -> None:
        self._sequence = PackSequence(self._run, start, skips=self._skips)
        self._is_empty = not start.position

    @property
    def totals(self) -> Totals:
        """What was dropped, substituted, omitted and skipped so far."""
        return self._before + self._sequence.totals

    def next(self, most: int = MOST) -> PlanPart | None:
        """Return the next part, of at most so many batches, or None at the end."""
        while (self._sequence.epoch, self._sequence.position) < self.stop:
            if (part := self._next(most)) is not None:
                return part
            if self._run.chapters or self._is_empty or self.stop <= (self._sequence.epoch + 1, 0):
                break
            self._before = self.totals
            is_carried = self._run.recipes[0].is_endless
            snapshots = self._sequence.snapshots() if is_carried else []
            self.close()
            self._begin(Progress(epoch=self._sequence.epoch + 1, snapshots=snapshots))
        return None

    def _next(self, most: int) -> PlanPart | None:
        sequence, (last, position) = self._sequence, self.stop
        if sequence.epoch == last:
            stride = self._run.view(last).stride
            most = min(most, -(-(position - sequence.position) // stride))
        plan = sequence.next(most)
        if plan is None:
            return None
        self._is_empty = False
        view, shares = self._run.view(plan.epoch), sequence.shares_of(plan)
        begin = sequence.position - plan.num_batches * view.stride
        if plan.epoch >= last:  # skipped steps, or a new chapter, may lead past the end
            plan = plan.slice(0, max(-(-(position - begin) // view.stride), 0))
        if not plan.num_batches:
            return None
        batches, rows = np.divmod(np.arange(len(plan.packs)), plan.num_rows)
        return PlanPart(
            plan=plan,
            recipe=self._run.recipe(plan.epoch),
            begin=begin,
            slots=view.first_slot(begin) + batches * view.stride + rows * plan.slots_per_pack,
            shares=shares,
        )

    def __iter__(self) -> Iterator[PlanPart]:
        while (part := self.next()) is not None:
            yield part

    def close(self) -> None:
        """Stop the thread that counts lane ends, if there is one."""
        self._sequence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def num_parts(run: RunPlan) -> int:
    """Return the greatest number of parts into which `lanes_of` can divide the lanes.

    1 where lanes may run dry, since their slots then go to other lanes.
    """
    recipes, lanes = run.recipes, range(run.recipes[0].num_lanes)
    if not all(recipe.is_endless for recipe in recipes) or run.ends_with_passes:
        return 1
    for recipe in recipes:
        for queue in range(recipe.num_queues):
            if len({is_used(recipe, lane, queue) for lane in lanes}) > 1:
                return 1

    def fits(parts: int) -> bool:
        sizes = [recipe.global_batch_size % (parts * recipe.lane_turn) for recipe in recipes]
        return len(lanes) % parts == 0 and not any(sizes)

    return next((parts for parts in range(len(lanes), 1, -1) if fits(parts)), 1)


def lanes_of(run: RunPlan, part: int, parts: int) -> RunPlan:
    """Return a run as a device gets it that plans lanes part, part + parts, ...: `num_parts`."""
    views = []
    for number, recipe in enumerate(run.recipes):
        # Each chapter begins at another lane, and the device keeps its own.
        place = (part - run.lane_offset(number) // recipe.lane_turn) % parts
        views.append(DeviceView(place=place, num_devices=parts, batch_size=recipe.lane_turn))
    return run.seen(views)
