"""Walk the slots of the canonical sequence: which lane, which column, which pack of that column.

With lanes 0 and 1 and lane_run=2; lane 0 runs dry after three packs::

    slot     0  1  2  3  4  5  6  7
    lane     0  0  1  1  0  1  1  1        a dry lane is passed over
    pack     0  1  0  1  2  2  3  4        counted in the lane's column

The walk knows no tokens and no segments, only how many packs each column is known to have; where
that is not enough to go on, it stops and says which column it must know more of.

Cost: about 10 ns a slot. Memory: a few thousand slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from streampack.compiled import compiled
from streampack.mix import Schedule
from streampack.plan.recipe import Recipe
from streampack.types import Int64Array

__all__ = ["COLUMN", "ENDLESS", "LANE", "NO_SLOTS", "PACK", "PIECE", "SUBSTITUTED", "Walk"]

ENDLESS = 1 << 62  # packs of a column that never ends
DRY = -2
SERVED, KNOWN, COMPLETE, EXPECTED = range(4)  # of a column: packs taken, known, whether that is all
TURN, LEFT = range(2)  # the walk's turn: the current lane, and packs left in its run
LANE, COLUMN, PACK, SUBSTITUTED = range(4)  # of a slot; the last says that it asked for another one
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
    left = columns[EXPECTED, lane] - served
    best = -1
    for other in range(len(served)):
        if served[other] < known[other]:
            if best < 0 or left[other] > left[best]:
                best = other
        elif not columns[COMPLETE, lane, other]:
            return -1, other
    return best, -1


@compiled
def _walk(
    wanted: Int64Array, turn: Int64Array, columns: Int64Array, lane_run: int, out: Int64Array
) -> tuple[int, int, int]:
    """Fill `out` (n, 4) with the next slots, which ask for the `wanted` columns (n,).

    Returns the slots filled, and the lane and column that must be known better: -1 where all slots
    are filled, lane DRY where all lanes are dry.
    """
    num_lanes = columns.shape[1]
    num_dry = 0
    filled = 0
    while filled < len(out):
        if turn[LEFT] == 0:
            turn[TURN] = (turn[TURN] + 1) % num_lanes
            turn[LEFT] = lane_run
        lane = turn[TURN]
        column, unknown = _serve(columns, lane, wanted[filled])
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
        out[filled, SUBSTITUTED] = column != wanted[filled]
        columns[SERVED, lane, column] += 1
        turn[LEFT] -= 1
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
        self.substituted = 0
        self._recipe = recipe
        self._learn = learn
        self._turn = np.array([recipe.num_lanes - 1, 0], np.int64)
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
        """Return lane, column and pack of the next slots, and whether another one was asked for.

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
                if not may_learn and self._recipe.mixing.batching_method == "per_stream":
                    break  # which stream a global batch holds may have to be learnt
                self._asked = next(self._wanted)
            filled, lane, column = _walk(
                self._asked,
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
        for streams in schedule.windows():
            if method == "per_stream":
                for stream in streams[:, 0].tolist():
                    yield np.full(size, self._live(stream), np.int64)
            else:
                # streams: (global batches, choices in one).
                yield np.repeat(streams, run, axis=1)[:, :size].ravel()

    def _live(self, stream: int) -> int:
        """Return `stream` if any lane has packs of it left, else the one with most left."""
        if self._is_live(stream):
            return stream
        left = (self._columns[EXPECTED] - self.served).sum(axis=0)
        others = sorted((s for s in range(len(left)) if s != stream), key=lambda s: (-left[s], s))
        for candidate in others:
            if self._is_live(candidate):
                self.substituted += 1
                return candidate
        return stream

    def _is_live(self, stream: int) -> bool:
        while not (self.served[:, stream] < self.known[:, stream]).any():
            open_lanes = np.flatnonzero(self.complete[:, stream] == 0)
            if not len(open_lanes):
                return False
            self._learn(int(open_lanes[0]), stream)
        return True
