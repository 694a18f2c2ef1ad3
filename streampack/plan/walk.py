"""Walk the slots of the canonical sequence: which lane, which column, which pack of that column.

With lanes 0 and 1 and lane_run=2; lane 0 runs dry after three packs::

    slot     0  1  2  3  4  5  6  7
    lane     0  0  1  1  0  1  1  1        a dry lane is passed over
    pack     0  1  0  1  2  2  3  4        counted in the lane's column

The walk knows no tokens and no segments, only how many packs each column is known to have; where
that is not enough to go on, it stops and says which column it must know more of. Where a global
batch holds one stream, that must be live in some lane: the choice is made as the batch begins.

Cost: about 10 ns a slot. Memory: a few thousand slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from streampack.compiled import compiled, compiled_brief
from streampack.mix import Schedule
from streampack.plan.recipe import Recipe
from streampack.types import Int64Array

__all__ = ["COLUMN", "ENDLESS", "LANE", "NO_SLOTS", "PACK", "PIECE", "SUBSTITUTED", "Walk"]

ENDLESS = 1 << 62  # packs of a column that never ends
DRY = -2
SERVED, KNOWN, COMPLETE, EXPECTED = range(4)  # of a column: packs taken, known, whether that is all
# The walk's turn: the current lane, and packs left in its run; the stream that was chosen for a
# whole global batch, and slots for which that still holds.
TURN, LEFT, CHOSEN, HOLDS = range(4)
# Of a slot; the last counts the choices that another stream had to serve: the slot's own, and with
# the first slot of a global batch that was to hold one stream, the batch's.
LANE, COLUMN, PACK, SUBSTITUTED = range(4)
NO_SLOTS = np.zeros((0, 4), np.int64)
PIECE = 4096  # slots that are walked, or whose columns are asked for, together


@compiled
def _serve(columns: Int64Array, lane: int, wanted: int) -> tuple[int, int]:
    """Return the column that serves a slot of a lane, or what must be known first.

    Returns:
        (column, -1), or (-1, column to know more of), or (-1, -1) where the lane is dry.
    """
    served, known = columns[SERVED, lane], columns[KNOWN, lane]
    if served[wanted] < known[wanted]:
        return wanted, -1
    if not columns[COMPLETE, lane, wanted]:
        return -1, wanted
    # The wanted column is out: the live one with most expected packs left serves.
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
def _look_at(columns: Int64Array, stream: int) -> tuple[bool, int, int]:
    """Return of a stream whether it is live, a lane where it may be, and its expected packs.

    Returns:
        Whether some lane is known to have packs of it left; the first lane that has none but may
        have more, or -1; and the packs that all lanes are expected to have left.
    """
    is_live = False
    open_lane = -1
    left = 0
    for lane in range(columns.shape[1]):
        served = columns[SERVED, lane, stream]
        left += columns[EXPECTED, lane, stream] - served
        if served < columns[KNOWN, lane, stream]:
            is_live = True
        elif open_lane < 0 and not columns[COMPLETE, lane, stream]:
            open_lane = lane
    return is_live, open_lane, left


@compiled
def _choose(columns: Int64Array, wanted: int) -> tuple[int, int, int]:
    """Return the stream that a global batch holds, or what must be known first.

    Returns:
        (stream, -1, -1), or (-1, lane, column to know more of), or (-1, DRY, -1) where all lanes
        are dry.
    """
    is_live, open_lane, _ = _look_at(columns, wanted)
    if is_live:
        return wanted, -1, -1
    if open_lane >= 0:
        return -1, open_lane, wanted
    # It is out in all lanes: the live one with most expected packs left is chosen.
    best, best_lane, most = -1, DRY, 0
    for other in range(columns.shape[2]):
        is_live, open_lane, left = _look_at(columns, other)
        if (is_live or open_lane >= 0) and (best < 0 or left > most):
            best, best_lane, most = other, -1 if is_live else open_lane, left
    return (best, -1, -1) if best_lane == -1 else (-1, best_lane, best)


@compiled_brief
def _walk(
    wanted: Int64Array,
    holds: int,
    turn: Int64Array,
    columns: Int64Array,
    lane_run: int,
    out: Int64Array,
) -> tuple[int, int, int]:
    """Fill `out` (n, 4) with the next slots, which ask for the `wanted` columns (n,).

    A choice of stream holds for `holds` slots over all lanes; 0: each lane serves what it has.

    Returns the slots filled, and the lane and column that must be known better: -1 where all slots
    are filled, lane DRY where all lanes are dry.
    """
    num_lanes = columns.shape[1]
    num_dry = 0
    filled = 0
    while filled < len(out):
        asked = wanted[filled]
        if holds:
            if turn[HOLDS] == 0:
                turn[CHOSEN], lane, unknown = _choose(columns, asked)
                if turn[CHOSEN] < 0:
                    return filled, lane, unknown
                turn[HOLDS] = holds
            asked = turn[CHOSEN]
        if turn[LEFT] == 0:
            turn[TURN] = (turn[TURN] + 1) % num_lanes
            turn[LEFT] = lane_run
        lane = turn[TURN]
        column, unknown = _serve(columns, lane, asked)
        if unknown >= 0:
            return filled, lane, unknown
        if column < 0:
            num_dry += 1
            if num_dry == num_lanes:
                return filled, DRY, -1
            turn[LEFT] = 0
            continue
        num_dry = 0
        out[filled, LANE] = lane
        out[filled, COLUMN] = column
        out[filled, PACK] = columns[SERVED, lane, column]
        # The first slot of a global batch counts its choice, too.
        is_swapped = turn[HOLDS] == holds and asked != wanted[filled]
        out[filled, SUBSTITUTED] = np.int64(column != asked) + np.int64(is_swapped)
        columns[SERVED, lane, column] += 1
        turn[LEFT] -= 1
        turn[HOLDS] -= 1  # below nought where no choice holds, and then never read
        filled += 1
    return filled, -1, -1


class Walk:
    """The slots of one epoch, in order.

    Args:
        recipe: What the sequence is a function of.
        epoch: Which epoch.
        served: Packs taken of each column before this epoch, shape (num_lanes, num_columns).
        expected: Packs that each column is expected to have in the epoch, same shape.
        learn: Called with a lane and a column of which more must be known; it must raise `known`
            there, or set `complete`.
    """

    def __init__(
        self,
        recipe: Recipe,
        epoch: int,
        served: Int64Array,
        expected: Int64Array,
        learn: Callable[[int, int], None],
    ) -> None:
        # columns: four numbers of each column, shape (4, num_lanes, num_columns).
        self._columns = np.stack([served, 0 * served, 0 * served, served + expected])
        self._recipe = recipe
        self._learn = learn
        is_whole = recipe.mixing.batching_method == "per_stream"
        self._holds = recipe.global_batch_size if is_whole else 0
        self._turn = np.array([recipe.num_lanes - 1, 0, -1, 0], np.int64)
        self._wanted = self._wanted_columns(epoch)
        self._asked = np.zeros(0, np.int64)  # columns of the next slots

    @property
    def served(self) -> Int64Array:
        """Packs taken of each column so far, shape (num_lanes, num_columns)."""
        served: Int64Array = self._columns[SERVED]
        return served

    @property
    def known(self) -> Int64Array:
        """Packs that each column is known to have, at least; same shape, to be raised in place."""
        known: Int64Array = self._columns[KNOWN]
        return known

    @property
    def complete(self) -> Int64Array:
        """1 where a column has no more packs than are known; same shape, to be set in place."""
        complete: Int64Array = self._columns[COMPLETE]
        return complete

    def next(self, num_slots: int, *, may_learn: bool = True) -> Int64Array:
        """Return lane, column and pack of the next slots, and how often another was asked for.

        Args:
            num_slots: Slots to walk; fewer come back where all lanes run dry.
            may_learn: False stops where more must be known of a column.

        Returns:
            Rows of LANE, COLUMN, PACK and SUBSTITUTED, shape (n, 4).
        """
        out = np.empty((num_slots, 4), np.int64)
        done = 0
        while done < num_slots:
            if not len(self._asked):
                self._asked = next(self._wanted)
            filled, lane, column = _walk(
                self._asked,
                self._holds,
                self._turn,
                self._columns,
                self._recipe.lane_run,
                out[done : done + len(self._asked)],
            )
            self._asked = self._asked[filled:]
            done += filled
            if lane == DRY or (lane >= 0 and not may_learn):
                break
            if lane >= 0:
                self._learn(lane, column)
        return out[:done]

    def _wanted_columns(self, epoch: int) -> Iterator[Int64Array]:
        """Yield the columns that slots ask for, whole global batches at a time."""
        recipe = self._recipe
        size = recipe.global_batch_size
        method = recipe.mixing.batching_method
        if method == "random":
            while True:
                yield np.zeros(PIECE, np.int64)
        run = {"stratified": 1, "device_per_stream": recipe.lane_run, "per_stream": size}[method]
        schedule = Schedule(
            [stream.chosen_tokens for stream in recipe.streams],
            block=max(size // run, 1),
            seed=recipe.order.seed,
            place=("schedule", epoch),
        )
        at_once = max(PIECE // size, 1)
        for streams in schedule.windows():
            for first in range(0, len(streams), at_once):
                # streams: (global batches, choices in one).
                some = streams[first : first + at_once]
                yield np.repeat(some, run, axis=1)[:, :size].ravel()
