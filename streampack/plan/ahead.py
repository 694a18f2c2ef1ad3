"""Which shards a device's lanes need next, and which they are done with: integers only.

One lane of a stream, its packs delivered up to a sample of block 4, planned up to one of block 5::

    shuffle blocks        3         4          5          6         7
                       finished  delivering  planning   next      not yet
    needed, in order             [ a  c      c  f       b  e ]

A shard is needed from when its block is the next one until the packs are delivered that were
planned up to the end of its last block, and no packer holds a sample of it any more: the oldest
snapshot that a column keeps says both. So within a pass a shard that was finished is not touched
again by these lanes.

Cost: one comparison of integers a batch; where a chunk of samples was planned or released, some 10
us a column; where a block changed, O(shards of the lane).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from streampack.plan.planner import ColumnPlanner
from streampack.plan.recipe import Recipe
from streampack.types import SAMPLE, STREAM, Int64Array

__all__ = ["ShardNeeds", "ShardWatch"]


def _no_rows() -> Int64Array:
    return np.zeros((0, 2), np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardNeeds:
    """What changed since it was last asked."""

    ahead: Int64Array = field(default_factory=_no_rows)
    """Rows (stream, shard) that are or will be needed, in order of need, shape (n, 2)."""
    finished: Int64Array = field(default_factory=_no_rows)
    """Rows (stream, shard) that are not needed any more, shape (m, 2)."""


class ShardWatch:
    """Compares what a device's columns need with what they needed before.

    Args:
        recipe: What the sequence is a function of.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._streams = recipe.streams
        self._num_moves: int | None = None
        self._blocks: list[dict[int, list[int]]] = []
        self._in_blocks: dict[tuple[int, int], None] = {}
        self._needed: dict[tuple[int, int], None] = {}

    @property
    def has_looked(self) -> bool:
        """Whether it was ever asked."""
        return self._num_moves is not None

    def look(self, planners: Iterable[ColumnPlanner]) -> ShardNeeds | None:
        """Return what these planners need, and what is finished; None where that is as before."""
        columns = list(planners)
        num_moves = sum(column.num_moves for column in columns)
        if num_moves == self._num_moves:
            return None
        self._num_moves = num_moves
        blocks = [column.blocks() for column in columns]
        if blocks != self._blocks:
            self._blocks = blocks
            self._in_blocks = dict.fromkeys(_in_order_of_need(columns, blocks))
        # What packers hold of older blocks comes first.
        held = [shard for column in columns for shard in self._held(column)]
        needed = dict.fromkeys(shard for shard in held if shard not in self._in_blocks)
        needed |= self._in_blocks
        if list(needed) == list(self._needed):
            return None
        finished = [shard for shard in self._needed if shard not in needed]
        self._needed = needed
        return ShardNeeds(ahead=_rows(list(needed)), finished=_rows(finished))

    def _held(self, column: ColumnPlanner) -> list[tuple[int, int]]:
        segments = column.held()
        shards = []
        for stream in np.unique(segments[:, STREAM]).tolist():
            samples = segments[segments[:, STREAM] == stream, SAMPLE]
            first_sample = self._streams[stream].first_sample
            own = np.unique(np.searchsorted(first_sample, samples, side="right") - 1)
            shards += [(stream, shard) for shard in own.tolist()]
        return shards


def _rows(shards: list[tuple[int, int]]) -> Int64Array:
    return np.array(shards, np.int64).reshape(-1, 2)


def _in_order_of_need(
    columns: list[ColumnPlanner], blocks: list[dict[int, list[int]]]
) -> list[tuple[int, int]]:
    """Return (stream, shard) of all columns' blocks: block after block, all columns alike."""
    placed = []
    for column, of_column in zip(columns, blocks, strict=True):
        for stream, numbers in of_column.items():
            for turn, number in enumerate(numbers):
                shards = column.shards_in(stream, number).tolist()
                placed += [
                    (turn + place / len(shards), stream, shard)
                    for place, shard in enumerate(shards)
                ]
    return [(stream, shard) for _, stream, shard in sorted(placed)]
