"""Which shards a device's lanes need next, and which they have finished: integers only.

One lane of a stream, delivered up to a sample of block 4, planned up to a sample of block 5::

    shuffle blocks        3         4          5          6         7
                       finished  delivering  planning   next      not yet
    needed, in order             [ a  c      c  f       b  e ]

A shard is needed as soon as its block is the next one. It stays needed until all packs planned up
to the end of its last block are delivered, and no packer has one of its samples. Both follow from
the oldest snapshot of a queue. Within a pass, these lanes never read a finished shard again.

Cost: one integer comparison a batch. When a chunk of samples was planned or delivered, about 10 us
a queue. When a block changed, O(shards of the lane).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from streampack.plan.pack_queue import PackQueue
from streampack.plan.recipe import Recipe
from streampack.types import SAMPLE, STREAM, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardDelta:
    """Changes in the needed shards since the last call."""

    ahead: Int64Array
    """Rows (stream, shard) that are or will be needed, in order of need, shape (n, 2)."""
    num_first: int
    """How many of them are held or in the first block of a queue; others are of later blocks."""
    finished: Int64Array
    """Rows (stream, shard) that are no longer needed, shape (m, 2)."""


class ShardTracker:
    """Tracks which shards a device's queues need."""

    def __init__(self, recipe: Recipe) -> None:
        self._streams = recipe.streams
        self._num_moves: int | None = None
        self._blocks: list[dict[int, list[int]]] = []
        self._in_blocks: dict[tuple[int, int], None] = {}
        self._num_later = 0
        self._needed: dict[tuple[int, int], None] = {}

    def look(self, queues: Iterable[PackQueue]) -> ShardDelta | None:
        """Return the needed and the finished shards of these queues, or None if unchanged."""
        queues = list(queues)
        num_moves = sum(queue.num_moves for queue in queues)
        if num_moves == self._num_moves:
            return None
        self._num_moves = num_moves
        blocks = [queue.blocks() for queue in queues]
        if blocks != self._blocks:
            self._blocks = blocks
            placed = _in_order_of_need(queues, blocks)
            self._in_blocks = dict.fromkeys(key for _, key in placed)
            first = {key for depth, key in placed if depth < 1}
            self._num_later = len(self._in_blocks) - len(first)
        # Shards of older blocks that packers still hold come first.
        held = [shard for queue in queues for shard in self._held(queue)]
        needed = dict.fromkeys(shard for shard in held if shard not in self._in_blocks)
        needed |= self._in_blocks
        if list(needed) == list(self._needed):
            return None
        finished = [shard for shard in self._needed if shard not in needed]
        self._needed = needed
        return ShardDelta(
            ahead=_rows(list(needed)),
            num_first=len(needed) - self._num_later,
            finished=_rows(finished),
        )

    def _held(self, queue: PackQueue) -> list[tuple[int, int]]:
        segments = queue.held()
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
    queues: list[PackQueue], blocks: list[dict[int, list[int]]]
) -> list[tuple[float, tuple[int, int]]]:
    """Return the (stream, shard) of all queues' blocks, block by block, queues interleaved.

    Each comes after its place: below 1 in the first block of its queue, and so on.
    """
    placed = []
    for queue, of_queue in zip(queues, blocks, strict=True):
        for stream, numbers in of_queue.items():
            for depth, number in enumerate(numbers):
                shards = queue.shards_in(stream, number).tolist()
                placed += [
                    (depth + place / len(shards), (stream, shard))
                    for place, shard in enumerate(shards)
                ]
    return sorted(placed)
