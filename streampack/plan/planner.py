"""One lane: order + mix + packers, planned a chunk at a time and a little ahead.

::

    column 0   arrivals -> overflow -> packer -> [ pack 7 | pack 8 | pack 9 ]   not yet released
    column 1   arrivals -> overflow -> packer -> [ pack 3 | pack 4 ]
                                                  ^ a snapshot lies where a chunk began

A lane has one column where packs mix streams, else one a stream. Packs are asked for by their
number in the column, so what was planned ahead is never lost, and a column planned twice gives the
same packs.

Cost: about 0.2-0.4 us a sample. Memory: a chunk of segments (48 bytes each), the packer's buffer,
and a shuffle block of each stream: 16 bytes for each of its samples in the lane, at most 262,144 by
default.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from streampack.errors import DataError, ResumeError
from streampack.pack import count_long, fit_samples, make_packer
from streampack.plan.arrivals import Blocks, make_arrivals
from streampack.plan.recipe import Recipe
from streampack.plan.walk import ENDLESS
from streampack.types import Int64Array, Packs, State

__all__ = ["ColumnPlanner"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Snapshot:
    """Where a chunk began: enough to plan on from there."""

    num_packs: int
    """Packs of the column before it."""
    arrivals: list[int]
    packer: State
    held: Int64Array
    """The segments that the packer held, shape (n, 6)."""
    overlong: list[int]
    """Samples over max_seq_len met before it, per stream."""
    blocks: Callable[[], Blocks]
    """Tells the shuffle blocks where the arrivals stood; seldom asked for."""


class ColumnPlanner:
    """The packs of one column of a lane, by number.

    Args:
        recipe: What the sequence is a function of.
        lane: Which lane.
        column: Which stream; 0 where packs mix streams.
        epoch: Which epoch (with carry: the run's first).
    """

    def __init__(self, recipe: Recipe, lane: int, column: int, epoch: int) -> None:
        self._recipe = recipe
        self._column = column
        self._num_barren = 0  # samples since the last one that was not dropped
        self._arrivals = make_arrivals(recipe, lane, column, epoch)
        self._packer = make_packer(recipe.packing)
        self._hold(Packs.none())
        self._first = 0
        self._snapshots: deque[_Snapshot] = deque()
        self.is_complete = False
        self.num_moves = 0
        self.overlong = np.zeros(len(recipe.streams), np.int64)

    @property
    def first_known(self) -> int:
        """The first pack that can still be asked for."""
        return self._first

    @property
    def num_known(self) -> int:
        """Packs of the column that are planned so far."""
        return self._first + len(self._queue)

    @property
    def high_water_tokens(self) -> int:
        """The most tokens that the packer ever held."""
        return self._packer.high_water_tokens

    def extend(self) -> None:
        """Plan one chunk further; at the end, flush the packer."""
        if self.is_complete:
            return
        self._snapshots.append(
            _Snapshot(
                num_packs=self.num_known,
                arrivals=self._arrivals.state(),
                packer=self._packer.state_dict(),
                held=self._packer.buffered,
                overlong=self.overlong.tolist(),
                blocks=self._arrivals.blocks(),
            )
        )
        self.num_moves += 1
        rows = self._arrivals.next()
        if len(rows):
            segments = self._fit(rows)
            self._check_not_barren(rows, segments)
            packs = self._packer.add(segments)
        else:
            packs = self._packer.flush()
            self.is_complete = True
        self._hold(Packs.join([self._queue, packs]))

    def _hold(self, queue: Packs) -> None:
        self._queue = queue
        self._sizes = np.diff(queue.ends, prepend=0)

    def _fit(self, rows: Int64Array) -> Int64Array:
        packing = self._recipe.packing
        self.overlong += count_long(rows, packing.max_seq_len, len(self.overlong))
        return fit_samples(rows, packing.max_seq_len, packing.overflow, self._recipe.names)

    def _check_not_barren(self, rows: Int64Array, segments: Int64Array) -> None:
        """Refuse an order that would go on for ever and leave nothing to pack.

        Raises:
            DataError: If every sample was dropped for longer than it takes to see them all.
        """
        self._num_barren = 0 if len(segments) else self._num_barren + len(rows)
        limit = self._recipe.longest_barren(self._column)
        if limit is not None and self._num_barren > limit:
            names = [self._recipe.names[number] for number in np.unique(rows[:, 0])]
            raise DataError(
                f"stream {names}: all of {self._num_barren} samples in a row are longer than "
                f"max_seq_len={self._recipe.packing.max_seq_len}, and overflow='drop' leaves "
                "nothing; raise max_seq_len, or set overflow to split or truncate"
            )

    def know(self, number: int, keep: int = 0) -> bool:
        """Plan on until pack `number` is known; False where the column ends before it.

        Args:
            number: Which pack.
            keep: Packs before this one are forgotten on the way, so that the way may be long.
        """
        while self.num_known <= number and not self.is_complete:
            self.extend()
            self.release(keep)
        return number < self.num_known

    @property
    def segments(self) -> Int64Array:
        """The segment rows of what is known and not released, shape (n, 6)."""
        return self._queue.segments

    @property
    def next_crossing(self) -> int:
        """Packs that must be passed for a later snapshot to take over; ENDLESS where none does."""
        return self._snapshots[1].num_packs if len(self._snapshots) > 1 else ENDLESS

    def places(self, packs: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return where packs, which must be known and not released, begin in `segments`.

        Returns:
            The first row and the number of rows of each, shape (n,).
        """
        rows = packs - self._first
        sizes = self._sizes[rows]
        return self._queue.ends[rows] - sizes, sizes

    def release(self, number: int) -> None:
        """Forget the packs before `number`, which nobody will ask for again."""
        number = min(number, self.num_known)
        if number - self._first > len(self._queue) // 2:
            self._hold(self._queue.slice(number - self._first, len(self._queue)))
            self._first = number
        while len(self._snapshots) > 1 and self._snapshots[1].num_packs <= number:
            self._snapshots.popleft()
            self.num_moves += 1

    def blocks(self) -> dict[int, list[int]]:
        """Return, per stream, the shuffle blocks of what is not released and of what comes next.

        They change only where `num_moves` does.
        """
        now = self._arrivals.blocks()()
        then = self._snapshots[0].blocks() if self._snapshots else now
        blocks = {}
        for stream, (block, last) in now.items():
            first = then.get(stream, (block, block))[0]
            # A fixed order that rolls on begins again: then what lies between is not needed.
            middle = range(first, block) if first <= block else (first,)
            blocks[stream] = [*middle, *range(block, last + 1)]
        return blocks

    def shards_in(self, stream: int, block: int) -> Int64Array:
        """Return the shards of one shuffle block of a stream in this lane, shape (n,)."""
        return self._arrivals.shards_in(stream, block)

    def held(self) -> Int64Array:
        """Return the segments that were buffered before the oldest of `blocks`, shape (n, 6)."""
        return self._snapshots[0].held if self._snapshots else self._packer.buffered

    def snapshot(self, number: int) -> list[State]:
        """Return what `restore` needs to plan on from at or before pack `number`, integers only."""
        kept = [snapshot for snapshot in self._snapshots if snapshot.num_packs <= number]
        return [
            {
                "num_packs": snapshot.num_packs,
                "arrivals": snapshot.arrivals,
                "packer": snapshot.packer,
                "overlong": snapshot.overlong,
            }
            for snapshot in kept[-1:]
        ]

    def restore(self, state: State) -> None:
        """Go to where a snapshot was taken; a planner that was never extended only.

        Raises:
            ResumeError: If it is no snapshot of such a planner.
        """
        try:
            self._first = int(state["num_packs"])
            self._arrivals.restore([int(value) for value in state["arrivals"]])
            self._packer.load_state_dict(state["packer"])
            self.overlong = np.array(state["overlong"], np.int64).reshape(self.overlong.shape)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ResumeError(
                f"one of the state's snapshots is damaged ({type(error).__name__}: {error}); "
                "take 'snapshots' out of the state: they are only a speed-up"
            ) from error
