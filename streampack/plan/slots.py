"""Walk the slots of the canonical sequence: the lane, column and pack of each slot.

With lanes 0 and 1 and lane_run=2; lane 0 runs dry after three packs::

    slot     0  1  2  3  4  5  6  7
    lane     0  0  1  1  0  1  1  1        a dry lane is skipped
    pack     0  1  0  1  2  2  3  4        numbered within the lane's column

The walk knows neither tokens nor segments, only how many packs each column has at least. Where that
is not enough, it stops and names the column to learn more about. If a global batch holds
one stream, the stream is chosen when the batch begins, and must have packs left in some lane.

Cost: about 10 ns a slot. Memory: a few thousand slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from streampack._numba import compiled, kernel_holding_gil
from streampack.mix import LinearShares, Schedule, SchedulePlace
from streampack.plan.recipe import Recipe
from streampack.types import Int64Array

ENDLESS = 1 << 62  # number of packs of a column that never ends
DRY = -2
# Of a column: packs taken, packs known, whether that is all, and packs expected.
SERVED, KNOWN, COMPLETE, EXPECTED = range(4)
# Cursor of the walk: the current lane, the packs left in its run, the stream chosen for a whole
# global batch, the slots for which that choice still holds, and the column that serves the run.
TURN, LEFT, CHOSEN, HOLDS, SERVING = range(5)
# Of a slot. SUBSTITUTED counts choices served by another stream: the slot's own, and in the first
# slot of a global batch with one stream, also the batch's.
LANE, COLUMN, PACK, SUBSTITUTED = range(4)
NO_SLOTS = np.zeros((0, 4), np.int64)
KEPT_PLACES = 4
PIECE = 4096  # slots walked together, and wanted columns computed together


@compiled
def _serve(columns: Int64Array, lane: int, wanted: int) -> tuple[int, int]:
    """Return the column that serves a slot of a lane, or a column to learn about first.

    Returns:
        (column, -1), or (-1, column to learn about), or (-1, -1) if the lane is dry.
    """
    served, known = columns[SERVED, lane], columns[KNOWN, lane]
    if served[wanted] < known[wanted]:
        return wanted, -1
    if not columns[COMPLETE, lane, wanted]:
        return -1, wanted
    # The wanted column is exhausted: take the live one with the most expected packs left.
    best, most = -1, 0
    for other in range(len(served)):
        left = columns[EXPECTED, lane, other] - served[other]
        if served[other] < known[other]:
            if best < 0 or left > most:
                best, most = other, left
        elif not columns[COMPLETE, lane, other]:
            return -1, other
    return best, -1


@compiled
def _serve_turn(
    columns: Int64Array,
    turn: Int64Array,
    wanted: int,
    sizes: tuple[int, int, int, int],
    is_pure: bool,
) -> tuple[int, int]:
    """Return as `_serve` the column that serves a slot of the current lane.

    A column serves whole runs, if there are any. With `is_pure`, no other stream takes the place of
    one that is chosen for a global batch.
    """
    _, run, holds, _ = sizes
    if turn[LEFT] < run:
        return turn[SERVING], -1
    lane = turn[TURN]
    if not is_pure or not holds:
        return _serve(columns, lane, wanted)
    if columns[SERVED, lane, wanted] < columns[KNOWN, lane, wanted]:
        return wanted, -1
    return -1, -1 if columns[COMPLETE, lane, wanted] else wanted


@compiled
def _look_at(columns: Int64Array, stream: int, least: int) -> tuple[bool, int, int]:
    """Check whether a stream has at least this many slots left in all lanes together.

    Returns:
        Whether it is known to have them; the first lane that may have more than is known, or -1;
        the packs that all lanes are expected to have left.
    """
    open_lane = -1
    left = num_known = 0
    for lane in range(columns.shape[1]):
        served = columns[SERVED, lane, stream]
        left += columns[EXPECTED, lane, stream] - served
        num_known += min(max(columns[KNOWN, lane, stream] - served, 0), least)
        if open_lane < 0 and not columns[COMPLETE, lane, stream]:
            open_lane = lane
    return num_known >= least, open_lane, left


@compiled
def _choose(columns: Int64Array, wanted: int, least: int) -> tuple[int, int, int]:
    """Return the stream of a global batch, or a column to learn about first.

    A stream with fewer than `least` slots left is exhausted.

    Returns:
        (stream, -1, -1), or (-1, lane, column to learn about), or (-1, DRY, -1) if all lanes are
        dry.
    """
    is_live, open_lane, _ = _look_at(columns, wanted, least)
    if is_live:
        return wanted, -1, -1
    if open_lane >= 0:
        return -1, open_lane, wanted
    # It is exhausted in all lanes: take the live one with the most expected packs left.
    best, best_lane, most = -1, DRY, 0
    for other in range(columns.shape[2]):
        is_live, open_lane, left = _look_at(columns, other, least)
        if (is_live or open_lane >= 0) and (best < 0 or left > most):
            best, best_lane, most = other, -1 if is_live else open_lane, left
    return (best, -1, -1) if best_lane == -1 else (-1, best_lane, best)


@kernel_holding_gil
def _walk(
    wanted: Int64Array,
    sizes: tuple[int, int, int, int],
    is_pure: bool,
    turn: Int64Array,
    columns: Int64Array,
    out: Int64Array,
) -> tuple[int, int, int]:
    """Fill `out` (n, 4) with the next slots, given their `wanted` columns (n,).

    Args:
        wanted: Columns, shape (n,).
        sizes: Slots of a lane's run; of these, slots that one column serves together, which are 1
            or all, and in which columns are known; slots over all lanes for which a choice of
            stream holds, or 0 if slots choose separately; the least slots of a stream for which it
            is chosen.
        is_pure: Whether a choice of stream skips lanes without packs of it. If no lane has any,
            empty packs complete the global batch.
        turn: Cursor of the walk. Updated.
        columns: Four numbers per column. Updated.
        out: Filled.

    Returns the number of slots filled, and the lane and column to learn about before the next one.
    These are -1 if all slots are filled. The lane is DRY if all lanes are dry.
    """
    lane_run, _, holds, least = sizes
    num_lanes = columns.shape[1]
    num_dry = 0
    filled = 0
    while filled < len(out):
        asked = wanted[filled]
        if holds:
            if turn[HOLDS] == 0:
                turn[CHOSEN], lane, unknown = _choose(columns, asked, least)
                if turn[CHOSEN] < 0:
                    return filled, lane, unknown
                turn[HOLDS] = holds
            asked = turn[CHOSEN]
        if turn[LEFT] == 0:
            turn[TURN] = (turn[TURN] + 1) % num_lanes
            turn[LEFT] = lane_run
        lane = turn[TURN]
        column, unknown = _serve_turn(columns, turn, asked, sizes, is_pure)
        if unknown >= 0:
            return filled, lane, unknown
        if column < 0:
            num_dry += 1
            if num_dry < num_lanes:
                turn[LEFT] = 0
                continue
            if not is_pure or not holds:
                return filled, DRY, -1
            column = asked
        num_dry = 0
        turn[SERVING] = column
        out[filled, LANE] = lane
        out[filled, COLUMN] = column
        out[filled, PACK] = columns[SERVED, lane, column]
        # The first slot of a global batch also counts the batch's choice.
        is_swapped = turn[HOLDS] == holds and asked != wanted[filled]
        out[filled, SUBSTITUTED] = np.int64(column != asked) + np.int64(is_swapped)
        columns[SERVED, lane, column] += 1
        turn[LEFT] -= 1
        turn[HOLDS] -= 1  # negative if no choice holds; never read then
        filled += 1
    return filled, -1, -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WalkPlace:
    """A place in a chapter from which its walk resumes."""

    slot: int
    """Slots of the chapter before it."""
    served: Int64Array
    """Packs of the run taken from each column before it, shape (num_lanes, num_columns)."""
    turn: Int64Array
    """The cursor of the walk, shape (5,)."""
    schedule: SchedulePlace | None
    """Where the schedule stands; None if packs mix streams."""
    limits: Int64Array
    """Packs of the run at which each column ends in this chapter; ENDLESS: it does not. The same
    shape as `served`."""


class SlotWalker:
    """The slots of one epoch, in order; with carry, those of the whole run.

    Args:
        recipe: Determines the sequence.
        epoch: The epoch; 0 with carry.
        expected: Expected packs of each column in the epoch, shape (num_lanes, num_columns).
        extend_column: Called with a lane and column if the walk needs to know more about it. It
            must raise `known` there, or set `complete`.
        start: Where the walk of a chapter begins; None: at the start of an epoch.

    Attributes:
        served: Packs taken from each column so far, shape (num_lanes, num_columns).
        known: Lower bound on the packs of each column; same shape, to be raised in place.
        complete: 1 if `known` is the exact number of packs; same shape, to be set in place.
        places: The last places of a chapter from which its walk can resume.
    """

    def __init__(
        self,
        recipe: Recipe,
        epoch: int,
        expected: Int64Array,
        extend_column: Callable[[int, int], None],
        start: WalkPlace | None = None,
    ) -> None:
        # Four numbers per column, shape (4, num_lanes, num_columns).
        self._columns = np.stack([0 * expected, 0 * expected, 0 * expected, expected])
        self.served, self.known, self.complete = self._columns[:EXPECTED]
        self._recipe = recipe
        self._extend_column = extend_column
        is_whole = recipe.mixing.batching_method == "per_stream"
        size, shapes = recipe.global_batch_size, recipe.shapes
        least = size if shapes.is_pure and not shapes.is_padded else 1
        self._sizes = (recipe.lane_run, shapes.run, size if is_whole else 0, least)
        self._turn = np.array([recipe.num_lanes - 1, 0, -1, 0, -1], np.int64)
        self._asked = np.zeros(0, np.int64)  # wanted columns of the next slots
        self.places: deque[WalkPlace] = deque(maxlen=KEPT_PLACES)
        self._schedule: Schedule | None = None
        self._num_slots = 0
        self._limits = np.full_like(self.served, ENDLESS)
        if start is None:
            self._wanted = self._wanted_columns(self._schedule_of_epoch(epoch))
            return
        self._num_slots = start.slot
        self.served[:], self._turn[:] = start.served, start.turn
        self._limits = start.limits
        self._schedule = self._schedule_of_chapter(start.schedule)
        self._wanted = self._wanted_columns(self._schedule)

    def skip(self, num_slots: int) -> None:
        """Skip the next slots, in O(lanes). Each lane must be endless or empty.

        Every slot must want column 0, and the last visit to a lane must be over.
        """
        lanes, run = np.flatnonzero(self.known[:, 0]), self._recipe.lane_run
        lanes = np.roll(lanes, -int(np.searchsorted(lanes, self._turn[TURN], side="right")))
        visits, inside = divmod(num_slots, run)
        rounds, turn = divmod(visits, len(lanes))
        self.served[lanes, 0] += (rounds + (np.arange(len(lanes)) < turn)) * run
        self.served[lanes[turn], 0] += inside
        # At the end of a visit, its lane is still current and has no packs left in its run.
        self._turn[TURN] = lanes[turn] if inside else lanes[turn - 1]
        self._turn[LEFT] = run - inside if inside else 0
        self._num_slots += num_slots

    def expect(self, expected: Int64Array) -> None:
        """Set the expected packs of each column, in addition to those taken, same shape."""
        self._columns[EXPECTED] = self._columns[SERVED] + expected

    def next(self, num_slots: int, *, may_extend: bool = True) -> Int64Array:
        """Return the lane, column and pack of the next slots, and their substitutions.

        Args:
            num_slots: Slots to walk; fewer are returned if all lanes run dry.
            may_extend: False stops instead of calling `extend_column`.

        Returns:
            Rows of LANE, COLUMN, PACK and SUBSTITUTED, shape (n, 4).
        """
        out = np.empty((num_slots, 4), np.int64)
        done = 0
        while done < num_slots:
            if not len(self._asked):
                self._note_place()
                self._asked = next(self._wanted)
            filled, lane, column = _walk(
                self._asked,
                self._sizes,
                self._recipe.shapes.is_pure,
                self._turn,
                self._columns,
                out[done : done + len(self._asked)],
            )
            self._asked = self._asked[filled:]
            done += filled
            self._num_slots += filled
            if lane == DRY or (lane >= 0 and not may_extend):
                break
            if lane >= 0:
                self._extend_column(lane, column)
        return out[:done]

    def place(self) -> WalkPlace:
        """Return where the walk stands; a chapter's can resume only from some of these places."""
        return WalkPlace(
            slot=self._num_slots,
            served=self.served.copy(),
            turn=self._turn.copy(),
            schedule=self._schedule.now.copy() if self._schedule else None,
            limits=self._limits,
        )

    def _note_place(self) -> None:
        """Note a place from which the walk of a chapter can resume."""
        schedule = self._schedule
        if schedule is None or schedule.now.slot % schedule.resumable_slots:
            return
        if schedule.now.slot * self._run == self._num_slots:
            self.places.append(self.place())

    @property
    def _run(self) -> int:
        """Slots for which a choice of the schedule holds."""
        recipe = self._recipe
        runs = {"device_per_stream": recipe.lane_run, "per_stream": recipe.global_batch_size}
        return runs.get(recipe.mixing.batching_method, 1)

    def _schedule_of_epoch(self, epoch: int) -> Schedule | None:
        recipe = self._recipe
        if recipe.is_mixed:
            return None
        block, num_lanes, run = self._schedule_shape()
        return Schedule(
            [stream.chosen_slots for stream in recipe.streams],
            place=("schedule", epoch),
            seed=recipe.order.seed,
            block=block,
            num_lanes=num_lanes,
            run=run,
        )

    def _schedule_of_chapter(self, place: SchedulePlace | None) -> Schedule | None:
        recipe, chapter = self._recipe, self._recipe.chapter
        if chapter is None or place is None:
            return None
        num_slots = None if chapter.num_slots is None else chapter.num_slots // self._run
        block, num_lanes, run = self._schedule_shape()
        ramp_slots = chapter.ramp_slots // self._run if chapter.ramps else None
        return Schedule(
            LinearShares(chapter.begin, chapter.end, num_slots, ramp_slots),
            place=("chapter", chapter.number),
            seed=recipe.order.seed,
            start=place,
            block=block,
            num_lanes=num_lanes,
            run=run,
        )

    def _schedule_shape(self) -> tuple[int, int, int]:
        """Return the choices of a block, the lanes, and the choices of a visit to a lane."""
        recipe = self._recipe
        # With one stream per global batch, all lanes take the same stream.
        is_whole = recipe.mixing.batching_method == "per_stream"
        block = max(recipe.global_batch_size // self._run, 1)
        num_lanes = 1 if is_whole else recipe.num_lanes
        return block, num_lanes, recipe.lane_run // self._run or 1

    def _wanted_columns(self, schedule: Schedule | None) -> Iterator[Int64Array]:
        """Yield the columns that slots want, in whole global batches."""
        size = self._recipe.global_batch_size
        if schedule is None:
            while True:
                yield np.zeros(PIECE, np.int64)
        num_batches = max(PIECE // size, 1)
        for streams in schedule.windows():
            for first in range(0, len(streams), num_batches):
                # Shape (global batches, choices per global batch).
                some = streams[first : first + num_batches]
                yield np.repeat(some, self._run, axis=1)[:, :size].ravel()
