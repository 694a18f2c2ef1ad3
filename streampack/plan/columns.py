"""The columns that one device plans: what of each is passed, what is saved, and its packs by slot.

::

    slots     lane 0  lane 0  lane 2  lane 2          in any order, of any columns
                 |       |       |       |            gather: each column's packs at once
    packs     [ a b ] [ c ]   [ d e f ] [ g ]         in slot order, one array

What is passed is noted where somebody asks for it, or where a column is planned on, and not batch
by batch: so a batch costs the same whether a device plans one column or a hundred.

Cost: about 10 ns a segment, and 10 us a column where a chunk of its samples is planned or passed.
Memory: the planners', and one copy of what `gather` returned last.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from streampack.compiled import compiled_brief
from streampack.plan.planner import ColumnPlanner
from streampack.plan.recipe import Recipe
from streampack.plan.walk import COLUMN, ENDLESS, LANE, PACK
from streampack.types import NUM_COLUMNS, Int64Array, Packs, State

__all__ = ["Columns"]


@compiled_brief
def _copy_packs(
    segments: Int64Array, begins: Int64Array, sizes: Int64Array, starts: Int64Array, out: Int64Array
) -> None:
    """Copy `sizes` rows each, from `begins` to `starts`."""
    for pack in range(len(begins)):
        begin, start = begins[pack], starts[pack]
        for row in range(sizes[pack]):
            for column in range(NUM_COLUMNS):
                out[start + row, column] = segments[begin + row, column]


class Columns:
    """The planners of one device, by lane and column.

    Args:
        recipe: What the sequence is a function of.
        first_epoch: Where a column's planning begins.
        passed: Packs of each column that were delivered before, shape (num_lanes, num_columns).
        snapshots: Where columns go on from; the others are planned from the first epoch's start.
        counted_lanes: Lanes whose samples over max_seq_len count here.
    """

    def __init__(
        self,
        recipe: Recipe,
        first_epoch: int,
        passed: Int64Array,
        snapshots: list[State],
        counted_lanes: range,
    ) -> None:
        self._recipe = recipe
        self._first_epoch = first_epoch
        self._loaded = {(saved["lane"], saved["column"]): saved for saved in snapshots}
        self._planners: dict[tuple[int, int], ColumnPlanner] = {}
        self._planned = np.zeros_like(passed)  # packs that are known of each column
        self._crossings = np.full_like(passed, ENDLESS)  # packs from which a later snapshot serves
        self._changed: set[tuple[int, int]] = set()
        self._saved: dict[tuple[int, int], list[State]] = {}
        self._counted_lanes = counted_lanes
        self._num_counted = -1
        self._high_water = 0
        self._overlong = np.zeros(len(recipe.streams), np.int64)
        self.passed = passed.copy()
        self.num_changes = 0

    def __iter__(self) -> Iterator[ColumnPlanner]:
        return iter(self._planners.values())

    @property
    def high_water_tokens(self) -> int:
        """The sum of the most tokens that each packer ever held."""
        self._count()
        return self._high_water

    @property
    def overlong(self) -> Int64Array:
        """Samples over max_seq_len met so far in the counted lanes, shape (num_streams,)."""
        self._count()
        return self._overlong.copy()

    def _count(self) -> None:
        if self._num_counted == self.num_changes:
            return
        self._num_counted = self.num_changes
        self._high_water = sum(planner.high_water_tokens for planner in self)
        self._overlong = np.zeros(len(self._recipe.streams), np.int64)
        for (lane, _), planner in self._planners.items():
            if lane in self._counted_lanes:
                self._overlong += planner.overlong

    def planner(self, lane: int, column: int) -> ColumnPlanner:
        """Return a column's planner; the first call makes it."""
        planner = self._planners.get((lane, column))
        if planner is None:
            planner = ColumnPlanner(self._recipe, lane, column, self._first_epoch)
            snapshot = self._loaded.pop((lane, column), None)
            if snapshot is not None:
                planner.restore(snapshot)
            self._planners[lane, column] = planner
            self._note(lane, column)
        return planner

    def extend(self, lane: int, column: int) -> ColumnPlanner:
        """Plan a column one chunk further, and return its planner."""
        planner = self.planner(lane, column)
        planner.release(int(self.passed[lane, column]))
        planner.extend()
        self._note(lane, column)
        return planner

    def know_passed(self) -> None:
        """Plan every column to where it is passed, and forget what lies before."""
        for (lane, column), planner in self._planners.items():
            passed = int(self.passed[lane, column])
            planner.know(passed - 1, keep=passed)
            self._note(lane, column)

    def first_ahead(self) -> tuple[int, int, int] | None:
        """Return lane, first known pack and passed packs of a column whose packs are forgotten."""
        for (lane, column), planner in self._planners.items():
            if planner.first_known > self.passed[lane, column]:
                return lane, planner.first_known, int(self.passed[lane, column])
        return None

    def pass_by(self, slots: Int64Array) -> None:
        """Note that the packs of these slots are delivered, in order."""
        # A column's packs come in order, so the last one written is the highest.
        self.passed[slots[:, LANE], slots[:, COLUMN]] = slots[:, PACK] + 1
        for lane, column in np.argwhere(self.passed >= self._crossings).tolist():
            self._planners[lane, column].release(int(self.passed[lane, column]))
            self._note(lane, column)

    def num_quiet(self, slots: Int64Array) -> int:
        """Return how many of these slots may be passed without a change of any snapshot."""
        crossings = self._crossings[slots[:, LANE], slots[:, COLUMN]]
        crossed = np.flatnonzero(slots[:, PACK] + 1 >= crossings)
        return int(crossed[0]) if len(crossed) else len(slots)

    def snapshots(self) -> list[State]:
        """Return where each column can go on from for what is not passed."""
        for lane, column in self._changed:
            self._saved[lane, column] = [
                {"lane": lane, "column": column, **snapshot}
                for snapshot in self._planners[lane, column].snapshot(
                    int(self.passed[lane, column])
                )
            ]
        self._changed.clear()
        return [snapshot for place in self._planners for snapshot in self._saved[place]]

    def gather(self, slots: Int64Array, batch_size: int) -> Packs:
        """Return the packs of some slots, in order.

        The first `batch_size` are planned where they are not yet; those after them come along, in
        whole batches, as far as they are known.
        """
        self._know(slots[:batch_size])
        lanes, columns, packs = slots[:, LANE], slots[:, COLUMN], slots[:, PACK]
        missing = np.flatnonzero(packs >= self._planned[lanes, columns])
        if len(missing):
            slots = slots[: max(missing[0] // batch_size, 1) * batch_size]
        groups = self._by_column(slots)
        begins, sizes = np.empty((2, len(slots)), np.int64)
        for planner, rows in groups:
            begins[rows], sizes[rows] = planner.places(slots[rows, PACK])
        ends = np.cumsum(sizes)
        starts = ends - sizes
        out = np.empty((int(ends[-1]), NUM_COLUMNS), np.int64)
        for planner, rows in groups:
            _copy_packs(planner.segments, begins[rows], sizes[rows], starts[rows], out)
        return Packs(segments=out, ends=ends)

    def _by_column(self, slots: Int64Array) -> list[tuple[ColumnPlanner, Int64Array]]:
        """Return each column's planner and the rows of its slots, in order."""
        numbers = slots[:, LANE] * self._recipe.num_columns + slots[:, COLUMN]
        order = np.argsort(numbers, kind="stable")
        bounds = np.flatnonzero(np.diff(numbers[order])) + 1
        groups = np.split(order, bounds) if len(bounds) else [order]
        return [(self.planner(*slots[rows[0], :PACK].tolist()), rows) for rows in groups]

    def _know(self, slots: Int64Array) -> None:
        known = self._planned[slots[:, LANE], slots[:, COLUMN]]
        if (slots[:, PACK] < known).all():
            return
        for planner, rows in self._by_column(slots):
            packs = slots[rows, PACK]
            planner.know(int(packs[-1]), keep=int(packs[0]))
            self._note(*slots[rows[0], :PACK].tolist())

    def _note(self, lane: int, column: int) -> None:
        """Keep what has changed of a column."""
        planner = self._planners[lane, column]
        self._planned[lane, column] = planner.num_known
        self._crossings[lane, column] = planner.next_crossing
        self._changed.add((lane, column))
        self.num_changes += 1
