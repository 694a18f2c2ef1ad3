"""The samples of a lane in the order in which its packers take them.

::

    one stream   a a a a a a ...                     packs that hold one stream
    mixed        a b a a c a ... by samples          packs that hold all streams
                 a b a c a a ... by token deficit

Each order is a few cursors over `LaneStream`s, so its state is a few integers. The output rows are
(stream, pass, sample, tokens). Cost: about 30 ns a sample, most of it the shuffle.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeAlias

import numpy as np

from streampack.mix import scaled_shares
from streampack.mix.draw import (
    CHUNK,
    TOKEN_SCALE,
    draw_known,
    draw_places,
    drawn_before,
    lookaheads,
)
from streampack.plan.lane_stream import LaneStream, is_used
from streampack.plan.recipe import Recipe
from streampack.types import TOKENS, Int64Array

Blocks: TypeAlias = dict[int, tuple[int, int]]


class StreamCursor:
    """The part of one stream that an epoch takes in a lane: a range of the endless sequence.

    Counted in tokens, a sample belongs to the epoch that contains its first token.
    """

    def __init__(self, lane_stream: LaneStream, recipe: Recipe, epoch: int) -> None:
        self.lane_stream = lane_stream
        mixing = recipe.mixing
        self._rolls_on = mixing.epoch_end == "carry" and mixing.sampling_method == "balanced"
        self.by_tokens = lane_stream.stream.quota.unit == "tokens"
        self._first, self._end = lane_stream.range_of(epoch)
        self._position: tuple[int, int] | None = None

    @cached_property
    def _begin(self) -> tuple[int, int]:
        """Cursor and offset at which the epoch begins."""
        return self.lane_stream.find_tokens(self._first) if self.by_tokens else (self._first, 0)

    @property
    def _at(self) -> tuple[int, int]:
        """Cursor and offset. The start is not searched for if `go_to` sets another position."""
        return self._position or self._begin

    @property
    def cursor(self) -> int:
        """Index of the next sample in the lane's endless sequence."""
        return self._at[0]

    @property
    def offset(self) -> int:
        """Tokens before the next sample; 0 if the quota counts samples."""
        return self._at[1]

    @property
    def num_samples(self) -> int:
        """Samples left, if the quota counts samples."""
        return max(self._end - self.cursor, 0)

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
        self._position = (cursor, offset)

    def peek(self, count: int) -> Int64Array:
        """Return the next rows, up to `count`; fewer only at the end of the epoch's range."""
        if not self.by_tokens:
            return self.lane_stream.take(self.cursor, min(count, self._end - self.cursor))
        taken = self.lane_stream.take(self.cursor, count if self.offset < self._end else 0)
        weights = self.lane_stream.weigh(taken[:, TOKENS])
        starts = self.offset + np.cumsum(weights) - weights
        return taken[: np.searchsorted(starts, self._end, side="left")]

    def put(self, rows: Int64Array, places: Int64Array) -> None:
        """Write the next samples to `places` in rows (stream, pass, sample, tokens).

        Only for quotas in samples, and for at most as many samples as are left.
        """
        cursor = self.cursor
        self.lane_stream.put(cursor, rows, places)
        self._position = (cursor + len(places), 0)

    def move_past(self, taken: Int64Array) -> None:
        """Move past the first rows that `peek` returned.

        Reading them again might shuffle the block in which they begin a second time.
        """
        cursor, offset = self._at
        cursor += len(taken)
        if self.by_tokens:
            offset += int(self.lane_stream.weigh(taken[:, TOKENS]).sum())
            if offset >= self._end:
                self.lane_stream.note_end(self._end, cursor, offset)
        self._position = (cursor, offset)


class StreamDraw:
    """The samples of one stream that an epoch takes in a lane."""

    def __init__(self, chosen: StreamCursor) -> None:
        self._chosen = chosen
        self.chosen = [chosen]

    def next(self) -> Int64Array:
        """Return the next rows (stream, pass, sample, tokens), shape (n, 4); none at the end."""
        rows = self._chosen.peek(CHUNK)
        self._chosen.move_past(rows)
        return rows

    def state(self) -> list[int]:
        """Return cursor and offset."""
        return [self._chosen.cursor, self._chosen.offset]

    def restore(self, state: list[int]) -> None:
        """Resume from a saved `state`."""
        cursor, offset = state
        self._chosen.go_to(cursor, offset)


class SampleDraw:
    """The samples of all streams, mixed so that the counts are exact over the epoch."""

    def __init__(
        self, recipe: Recipe, chosen: list[StreamCursor], seed_path: tuple[int | str, ...]
    ) -> None:
        self.chosen = chosen
        self._quotas = [part.num_samples for part in chosen]
        self._seed = recipe.order.seed
        self._seed_path = seed_path
        self._chunk = 0
        self._drawn = [0] * len(chosen)  # draws before the chunk

    def next(self) -> Int64Array:
        """Return the rows of the next chunk of draws; none at the end."""
        before, self._drawn = self._drawn, drawn_before(self._quotas, self._chunk + 1)
        counts = np.array(self._drawn, np.int64) - before
        rows = np.empty((int(counts.sum()), 4), np.int64)
        places = draw_places(counts, self._chunk, self._seed, self._seed_path)
        first = 0
        for part, count in zip(self.chosen, counts.tolist(), strict=True):
            if count:
                part.put(rows, places[first : first + count])
                first += count
        self._chunk += 1
        return rows

    def state(self) -> list[int]:
        """Return the number of the next chunk, and the cursors."""
        return [self._chunk, *(part.cursor for part in self.chosen)]

    def restore(self, state: list[int]) -> None:
        """Resume from a saved `state`."""
        self._chunk, *cursors = state
        self._drawn = drawn_before(self._quotas, self._chunk)
        for part, cursor in zip(self.chosen, cursors, strict=True):
            part.go_to(cursor, 0)


class TokenDraw:
    """The samples of all streams, mixed by running token deficit."""

    def __init__(self, recipe: Recipe, chosen: list[StreamCursor]) -> None:
        self.chosen = chosen
        self._weigh = recipe.weigh
        streams = [part.lane_stream.stream for part in chosen]
        weights = [stream.chosen_tokens for stream in streams]
        self._shares = scaled_shares(weights, TOKEN_SCALE)
        self._deficits = np.zeros(len(chosen), np.int64)
        self._looks = lookaheads(weights, [(s.num_samples, s.num_tokens) for s in streams])

    def next(self) -> Int64Array:
        """Return the rows of the next draws; none at the end."""
        # Peek one sample further than is drawn, to know whether the stream ends there.
        taken = [part.peek(look + 1) for part, look in zip(self.chosen, self._looks, strict=True)]
        num_known = np.array([len(part) for part in taken])
        pairs = zip(taken, self._looks, strict=True)
        counts, places = draw_known(
            self._shares * (num_known > 0),
            self._deficits,
            [self._weigh(part[:look, TOKENS]) for part, look in pairs],
            num_known <= self._looks,
            CHUNK,
        )
        rows = np.empty((len(places), 4), np.int64)
        first = 0
        for part, peeked, count in zip(self.chosen, taken, counts.tolist(), strict=True):
            if count:
                rows[places[first : first + count]] = peeked[:count]
                part.move_past(peeked[:count])
                first += count
        return rows

    def state(self) -> list[int]:
        """Return deficits, cursors and offsets."""
        cursors = [value for part in self.chosen for value in (part.cursor, part.offset)]
        return [*self._deficits.tolist(), *cursors]

    def restore(self, state: list[int]) -> None:
        """Resume from a saved `state`."""
        num = len(self.chosen)
        self._deficits = np.array(state[:num], np.int64)
        for i, part in enumerate(self.chosen):
            part.go_to(*state[num + 2 * i : num + 2 * i + 2])


class SampleSequence:
    """The samples of a queue of a lane from one epoch on; with carry, of all later ones too."""

    ran_out = False  # of streams of a run

    def __init__(self, recipe: Recipe, lane: int, queue: int, epoch: int) -> None:
        self._recipe = recipe
        self._lane = lane
        self._carry = recipe.mixing.epoch_end == "carry" and is_used(recipe, lane, queue)
        self.streams = [LaneStream(recipe, number, lane) for number in recipe.streams_in(queue)]
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        """Draw the samples of an epoch from now on."""
        recipe, self._epoch = self._recipe, epoch
        chosen = [StreamCursor(stream, recipe, epoch) for stream in self.streams]
        self._draw: StreamDraw | SampleDraw | TokenDraw
        if not recipe.is_mixed:
            self._draw = StreamDraw(*chosen)
        elif recipe.mixing.weight_unit == "samples":
            self._draw = SampleDraw(recipe, chosen, (epoch, self._lane))
        else:
            self._draw = TokenDraw(recipe, chosen)

    def next(self) -> Int64Array:
        """Return the next rows (stream, pass, sample, tokens), shape (n, 4); none at the end."""
        rows = self._draw.next()
        while self._carry and not len(rows):
            self._begin(self._epoch + 1)
            rows = self._draw.next()
        return rows

    def blocks(self) -> Callable[[], Blocks]:
        """Return a callable that computes the current shuffle blocks of each unfinished stream."""
        cursors = [(part, part.cursor, part.offset) for part in self._draw.chosen]

        def blocks_there() -> Blocks:
            """Return the blocks in use at these positions, as [first, last) by stream."""
            found = {
                part.lane_stream.number: part.blocks_at(cursor, offset)
                for part, cursor, offset in cursors
            }
            return {stream: blocks for stream, blocks in found.items() if blocks is not None}

        return blocks_there

    def state(self) -> list[int]:
        """Return the epoch and the draw's integers."""
        return [self._epoch, *self._draw.state()]

    def restore(self, state: list[int]) -> None:
        """Resume from a saved `state`."""
        self._begin(state[0])
        self._draw.restore(state[1:])
