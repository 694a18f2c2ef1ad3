"""The part of one stream that a queue of a lane draws: a range of the lane's endless sequence.

::

    LaneStream     pass 0          pass 1
    epoch 1              [ begin   cursor   end )      in samples, or in tokens
    chapters       [ cursor                 end )      the end only with max_passes

Cost: that of `order`: 10 to 30 ns a sample.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from streampack.plan.lane_stream import LaneStream
from streampack.plan.recipe import Recipe
from streampack.types import TOKENS, Int64Array

NOTHING = np.zeros((0, 4), np.int64)


class StreamCursor:
    """Where a queue of a lane draws from one stream, and where its epoch or its run ends.

    Counted in tokens, a sample belongs to the epoch that contains its first token.
    """

    def __init__(self, lane_stream: LaneStream, recipe: Recipe, epoch: int) -> None:
        self.lane_stream = lane_stream
        self._rolls_on = recipe.is_endless and recipe.mixing.sampling_method == "balanced"
        is_counted = lane_stream.stream.quota.unit == "tokens"
        self.by_tokens = is_counted and recipe.chapter is None
        self._first, self._end = lane_stream.range_of(epoch)
        self.at: tuple[int, int] | None = None if self.by_tokens else (self._first, 0)
        """Index of the next sample in the lane's sequence, and the tokens before it, or 0 where the
        quota counts samples. None: the start, which `locate` finds."""
        self._peeked = NOTHING  # rows from there on

    @cached_property
    def _begin(self) -> tuple[int, int]:
        return self.lane_stream.find_tokens(self._first) if self.by_tokens else (self._first, 0)

    def locate(self) -> tuple[int, int]:
        """Return the position; the start is searched for here, and not before."""
        self.at = self.at or self._begin
        return self.at

    @property
    def num_samples(self) -> int:
        """Samples left, if they are not counted in tokens."""
        return max(self._end - (self.at or self.locate())[0], 0)

    def blocks_at(self, cursor: int, offset: int) -> tuple[int, int] | None:
        """Return the shuffle block at a position, and the last block worth prefetching.

        After the last sample, both are that sample's block. None if nothing is taken. At most one
        block ahead is ever needed.
        """
        if self.lane_stream.is_empty:
            return None
        is_used_up = (offset if self.by_tokens else cursor) >= self._end
        if is_used_up and not self._rolls_on:
            if cursor == self._begin[0]:
                return None
            block = self.lane_stream.block_of(cursor - 1)
            return block, block
        block = self.lane_stream.block_of(cursor)
        if self.by_tokens or self._rolls_on:
            return block, block + 1
        return block, min(block + 1, self.lane_stream.block_of(self._end - 1))

    def go_to(self, cursor: int, offset: int) -> None:
        """Move to a saved position."""
        self.at, self._peeked = (cursor, offset), NOTHING

    def peek(self, count: int) -> Int64Array:
        """Return the next rows, up to `count`; fewer only where no others follow.

        `put` uses them, because reading them a second time might shuffle their block a second time.
        """
        cursor, offset = self.at or self.locate()
        if not self.by_tokens:
            self._peeked = self.lane_stream.take(cursor, min(count, self._end - cursor))
            return self._peeked
        taken = self.lane_stream.take(cursor, count if offset < self._end else 0)
        weights = self.lane_stream.weigh(taken[:, TOKENS])
        starts = offset + np.cumsum(weights) - weights
        self._peeked = taken[: np.searchsorted(starts, self._end, side="left")]
        return self._peeked

    def put(self, rows: Int64Array, places: Int64Array) -> None:
        """Write the next samples to `places` in rows (stream, pass, sample, tokens).

        At most as many as are left; if they are counted in tokens, as `peek` returned.
        """
        cursor, offset = self.at or self.locate()
        count, taken = len(places), self._peeked[: len(places)]
        if len(taken) == count:
            rows[places] = taken
        else:
            self.lane_stream.put(cursor, rows, places)
        cursor += count
        if self.by_tokens:
            offset += int(self.lane_stream.weigh(taken[:, TOKENS]).sum())
            if offset >= self._end:
                self.lane_stream.note_end(self._end, cursor, offset)
        self.at, self._peeked = (cursor, offset), NOTHING
