"""Walk the slots of the canonical sequence: the lane, queue and pack of each slot.

With lanes 0 and 1 and lane_turn=2; lane 0 runs dry after three packs::

    slot     0  1  2  3  4  5  6  7
    lane     0  0  1  1  0  1  1  1        a dry lane is skipped
    pack     0  1  0  1  2  2  3  4        numbered within the lane's queue

The walk knows neither tokens nor segments, only how many packs each queue has at least. Where that
is not enough, `slot_kernels` names the queue to learn more about.

Cost: about 10 ns a slot. Memory: a few thousand slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from streampack.mix.schedule import LinearShares, Schedule, ScheduleState
from streampack.plan.lane_stream import is_used
from streampack.plan.recipe import Recipe
from streampack.plan.slot_kernels import DRY, EXPECTED, LEFT, TURN, walk_slots
from streampack.types import Int64Array

ENDLESS = 1 << 62  # number of packs of a queue that never ends
NO_SLOTS = np.zeros((0, 4), np.int64)
PIECE = 4096  # slots walked together, and wanted queues computed together


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WalkState:
    """Where a chapter begins or ends."""

    served: Int64Array
    """Packs of the run taken from each queue before it, shape (num_lanes, num_queues)."""
    turn: Int64Array
    """The cursor of the walk, shape (5,)."""
    schedule: ScheduleState | None
    """Where the schedule is; None if packs mix streams."""


def expected_packs(recipe: Recipe) -> Int64Array:
    """Return the expected packs of each queue of a lane in an epoch, shape (num_queues,)."""
    per_lane = recipe.num_lanes * recipe.row_tokens
    if recipe.is_mixed:
        return np.array([-(-recipe.chosen_slots // per_lane)])
    return np.array([-(-stream.chosen_slots // per_lane) for stream in recipe.streams])


class SlotWalker:
    """The slots of one epoch, in order; with carry, those of the whole run, and `epoch` is 0.

    Where the walk needs to know more about a queue, it calls `extend_queue` with its lane and
    number, which must raise `known` there, or set `complete`. None: it knows where each queue ends.
    The walk of a chapter begins at `start`.

    Attributes:
        served: Packs taken from each queue so far, shape (num_lanes, num_queues).
        known: Lower bound on the packs of each queue; same shape, to be raised in place.
        slot: Slots of the epoch or chapter so far.
        complete: 1 if `known` is the exact number of packs; same shape, to be set in place.
    """

    def __init__(
        self,
        recipe: Recipe,
        epoch: int,
        extend_queue: Callable[[int, int], None] | None = None,
        start: WalkState | None = None,
    ) -> None:
        # Four numbers per queue, shape (4, num_lanes, num_queues).
        self._queues = np.zeros((4, recipe.num_lanes, recipe.num_queues), np.int64)
        self._queues[EXPECTED] = expected_packs(recipe)
        self.served, self.known, self.complete = self._queues[:EXPECTED]
        self._recipe = recipe
        self._extend_queue = extend_queue
        is_whole = recipe.mixing.batching_method == "per_stream"
        size, shapes = recipe.global_batch_size, recipe.shapes
        least = size if shapes.is_pure and not shapes.is_padded else 1
        self._sizes = (recipe.lane_turn, shapes.slots_together, size if is_whole else 0, least)
        self._turn = np.array([recipe.num_lanes - 1, 0, -1, 0, -1], np.int64)
        self._asked = np.zeros(0, np.int64)  # wanted queues of the next slots
        self.slot = 0
        self._schedule = self._make_schedule(epoch, start)
        self._wanted = self._wanted_queues()
        if start is not None:
            self.served[:], self._turn[:] = start.served, start.turn
            self.end_at(None)

    def end_at(self, ends: Int64Array | None) -> None:
        """Note after how many slots queues end, or None; or before they begin if nothing is used.

        `ends` has the shape (num_lanes, num_queues).
        """
        self.known[:] = ENDLESS if ends is None else ends
        self.complete[:] = ends is not None
        for lane, queue in np.ndindex(*self.known.shape):
            if not is_used(self._recipe, lane, queue):
                self.known[lane, queue], self.complete[lane, queue] = 0, 1

    def go_to_epoch(self, epoch: int) -> None:
        """Walk the epochs before this one (carry): lanes and shares continue where they stopped.

        No queue ends then, except for those that are always empty.
        """
        recipe = self._recipe
        self.end_at(None)
        if recipe.is_mixed:
            self.skip(epoch * recipe.packs_per_carry_epoch)
        else:
            for _ in range(epoch):
                self.walk_over(recipe.packs_per_carry_epoch)
                self._queues[EXPECTED] = self.served + expected_packs(recipe)
        self.slot = 0

    def skip(self, num_slots: int) -> None:
        """Skip the next slots, in O(lanes). Each lane must be endless or empty.

        Every slot must want queue 0, and the last lane's turn must be over.
        """
        lanes, lane_turn = np.flatnonzero(self.known[:, 0]), self._recipe.lane_turn
        lanes = np.roll(lanes, -int(np.searchsorted(lanes, self._turn[TURN], side="right")))
        turns, inside = divmod(num_slots, lane_turn)
        rounds, more = divmod(turns, len(lanes))
        self.served[lanes, 0] += (rounds + (np.arange(len(lanes)) < more)) * lane_turn
        self.served[lanes[more], 0] += inside
        # At the end of a turn, its lane is still current and has no packs left in its turn.
        self._turn[TURN] = lanes[more] if inside else lanes[more - 1]
        self._turn[LEFT] = lane_turn - inside if inside else 0
        self.slot += num_slots

    def walk_over(self, num_slots: int) -> int:
        """Walk the next slots, and return how many are missing because all lanes ran dry."""
        while num_slots and (walked := len(self.next(min(num_slots, PIECE)))):
            num_slots -= walked
        return num_slots

    def next(self, num_slots: int, *, may_extend: bool = True) -> Int64Array:
        """Return rows of LANE, QUEUE, PACK and SUBSTITUTED of the next slots, shape (n, 4).

        They are fewer if all lanes run dry. Without `may_extend`, the walk stops instead of calling
        `extend_queue`.
        """
        out = np.empty((num_slots, 4), np.int64)
        done = 0
        while done < num_slots:
            if not len(self._asked):
                self._asked = next(self._wanted)
            filled, lane, queue = walk_slots(
                self._asked,
                self._sizes,
                self._recipe.shapes.is_pure,
                self._turn,
                self._queues,
                out[done : done + len(self._asked)],
            )
            self._asked = self._asked[filled:]
            done += filled
            self.slot += filled
            if lane == DRY or (lane >= 0 and not may_extend):
                break
            if lane >= 0 and self._extend_queue is not None:
                self._extend_queue(lane, queue)
        return out[:done]

    def state(self) -> WalkState:
        """Return the position of the walk, where a chapter ends."""
        return WalkState(
            served=self.served.copy(),
            turn=self._turn.copy(),
            schedule=self._schedule.now.copy() if self._schedule else None,
        )

    def _make_schedule(self, epoch: int, start: WalkState | None) -> Schedule | None:
        """Return the streams of the choices of an epoch, or of a chapter from a state on."""
        recipe, chapter, per_choice = self._recipe, self._recipe.chapter, self._recipe.choice_slots
        if recipe.is_mixed:
            return None
        amounts: list[int] | LinearShares = [stream.chosen_slots for stream in recipe.streams]
        seed_path: tuple[str, int] = ("schedule", epoch)
        if start is not None and chapter is not None:
            num_slots = None if chapter.num_slots is None else chapter.num_slots // per_choice
            ramp_slots = chapter.ramp_slots // per_choice if chapter.ramps else None
            amounts = LinearShares(chapter.begin, chapter.end, num_slots, ramp_slots)
            seed_path = ("chapter", chapter.number)
        # With one stream per global batch, all lanes take the same stream.
        is_whole = recipe.mixing.batching_method == "per_stream"
        return Schedule(
            amounts,
            seed_path=seed_path,
            seed=recipe.order.seed,
            start=None if start is None else start.schedule,
            block=max(recipe.global_batch_size // per_choice, 1),
            num_lanes=1 if is_whole else recipe.num_lanes,
            lane_turn=recipe.lane_turn // per_choice or 1,
        )

    def _wanted_queues(self) -> Iterator[Int64Array]:
        size, per_choice = self._recipe.global_batch_size, self._recipe.choice_slots
        if self._schedule is None:
            while True:
                yield np.zeros(PIECE, np.int64)
        num_batches = max(PIECE // size, 1)
        for streams in self._schedule.chunks():
            for first in range(0, len(streams), num_batches):
                # Shape (global batches, choices per global batch).
                some = streams[first : first + num_batches]
                yield np.repeat(some, per_choice, axis=1)[:, :size].ravel()
