"""Walk the slots of the canonical sequence: which lane, which column, which pack of that column.

With lanes 0 and 1 and lane_run=2; lane 0 runs dry after three packs::

    slot     0  1  2  3  4  5  6  7
    lane     0  0  1  1  0  1  1  1        a dry lane is passed over
    pack     0  1  0  1  2  2  3  4        counted in the lane's column

The walk knows no tokens and no segments, only how many packs each column is known to have; where that is
not enough to go on, it stops and says which column it must know more of.

Cost: about 10 ns a slot. Memory: the slots of one global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from streampack.compiled import compiled
from streampack.mix import Schedule
from streampack.plan.recipe import Recipe
from streampack.types import BoolArray, Int64Array

__all__ = ["ENDLESS", "Walk"]

ENDLESS = 1 << 62  # packs of a column that never ends
DRY = -2


@compiled
def _walk(
    wanted: Int64Array,
    turn: Int64Array,
    served: Int64Array,
    known: Int64Array,
    complete: BoolArray,
    expected: Int64Array,
    lane_run: int,
    out: Int64Array,
) -> tuple[int, int, int, int]:
    """Fill `out` (n, 3) with lane, column and pack of the next slots.

    Returns the slots filled, the substitutions made, and the lane and column that must be known
    better: -1 where all slots are filled, lane -2 where all lanes are dry.
    """
    num_lanes, num_columns = served.shape
    substituted = 0
    for i in range(len(out)):
        tried = 0
        while True:
            if turn[1] == 0 or tried > 0:
                if turn[1] == 0 and tried == 0:
                    turn[0] = (turn[0] + 1) % num_lanes
                turn[1] = lane_run
            lane = turn[0]
            column = wanted[i]
            if served[lane, column] >= known[lane, column]:
                if not complete[lane, column]:
                    return i, substituted, lane, column
                # The wanted column is out: the live one with most expected tokens left serves.
                best = -1
                for other in range(num_columns):
                    if served[lane, other] >= known[lane, other]:
                        if not complete[lane, other]:
                            return i, substituted, lane, other
                        continue
                    if best < 0 or (
                        expected[lane, other] - served[lane, other]
                        > expected[lane, best] - served[lane, best]
                    ):
                        best = other
                if best < 0:
                    tried += 1
                    if tried == num_lanes:
                        return i, substituted, DRY, -1
                    turn[0] = (lane + 1) % num_lanes
                    continue
                substituted += num_columns > 1
                column = best
            out[i, 0] = lane
            out[i, 1] = column
            out[i, 2] = served[lane, column]
            served[lane, column] += 1
            turn[1] -= 1
            break
    return len(out), substituted, -1, -1


class Walk:
    """The slots of one epoch, a global batch at a time.

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
        self.served = served
        self.known = np.zeros_like(served)
        self.complete = np.zeros(served.shape, np.bool_)
        self.substituted = 0
        self._recipe = recipe
        self._expected = served + expected
        self._learn = learn
        # turn: the current lane, and packs left in its run.
        self._turn = np.array([recipe.num_lanes - 1, 0], np.int64)
        self._wanted = self._wanted_streams(epoch)

    def next_batch(self, num_slots: int) -> Int64Array:
        """Return lane, column and pack of the next slots, shape (n, 3).

        Args:
            num_slots: Slots to walk, a global batch; fewer come back where all lanes run dry.
        """
        wanted = next(self._wanted)[:num_slots]
        out = np.empty((num_slots, 3), np.int64)
        done = 0
        while done < num_slots:
            filled, substituted, lane, column = _walk(
                wanted[done:],
                self._turn,
                self.served,
                self.known,
                self.complete,
                self._expected,
                self._recipe.lane_run,
                out[done:],
            )
            self.substituted += substituted
            done += filled
            if lane == DRY:
                break
            if lane >= 0:
                self._learn(lane, column)
        return out[:done]

    def _wanted_streams(self, epoch: int) -> Iterator[Int64Array]:
        """Yield the column that each slot of a global batch asks for, batch after batch."""
        recipe = self._recipe
        size = recipe.global_batch_size
        method = recipe.mixing.batching_method
        if method == "random":
            while True:
                yield np.zeros(size, np.int64)
        run = {"stratified": 1, "device_per_stream": recipe.lane_run, "per_stream": size}[method]
        schedule = Schedule(
            [stream.chosen_tokens for stream in recipe.streams],
            block=max(size // run, 1),
            seed=recipe.order.seed,
            place=("schedule", epoch),
        )
        for streams in schedule.blocks():
            if method == "per_stream":
                streams = np.array([self._live(int(streams[0]))])
            yield np.repeat(streams, run)

    def _live(self, stream: int) -> int:
        """Return `stream` if any lane has packs of it left, else the one with most left."""
        left = (self._expected - self.served).sum(axis=0)
        others = sorted((s for s in range(len(left)) if s != stream), key=lambda s: (-left[s], s))
        for candidate in [stream, *others]:
            if self._is_live(candidate):
                self.substituted += candidate != stream
                return candidate
        return stream

    def _is_live(self, stream: int) -> bool:
        while not (self.served[:, stream] < self.known[:, stream]).any():
            open_lanes = np.flatnonzero(~self.complete[:, stream])
            if not len(open_lanes):
                return False
            self._learn(int(open_lanes[0]), stream)
        return True
