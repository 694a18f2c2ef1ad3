"""The part of a stream that is in one lane, and what a queue draws of it.

::

    LaneStream     pass 0          pass 1          of the lane's samples, shuffled in blocks
                   |-- epoch 0 --|-- epoch 1 --|   in samples, or in tokens
    StreamCursor                  [begin  at  end)
    chapters       [ at                     end )  the end only where the last takes whole passes

Cost: that of `order`: 10 to 30 ns a sample.
"""

from __future__ import annotations

from functools import cached_property, partial

import numpy as np

from streampack.mix.apportion import apportion
from streampack.order.shuffle import Lengths, Passes
from streampack.plan.recipe import Recipe
from streampack.types import TOKENS, Int64Array

MAX_CURSOR = 1 << 56  # more samples than any run takes of a stream in a lane
NOTHING = np.zeros((0, 4), np.int64)


class LaneStream:
    """One stream in one lane: an endless sequence of which each epoch takes the next part."""

    def __init__(self, recipe: Recipe, number: int, lane: int) -> None:
        of_lanes, shares = recipe.assignment(number)
        # The content of one pass: the lane's samples, or all samples of a shared stream.
        extents = of_lanes[0] if shares is None else of_lanes[lane]
        self._recipe = recipe
        self.stream = recipe.streams[number]
        self.number = number
        self._lane = lane
        self._shares = shares
        # Elements of the passes that are the lane's: the first, and the distance to the next.
        self._first, self._step = (lane, recipe.num_lanes) if shares is None else (0, 1)
        self._fixed = recipe.mixing.sampling_method == "fixed"
        self.weigh = partial(recipe.weigh, number=number)
        """Return the tokens that samples deliver, given their lengths, shape (n,)."""
        self._prepared = -1
        self._passes = Passes(
            extents,
            Lengths(
                first_sample=self.stream.first_sample,
                of_shard=self.stream.lengths_of,
                weigh=self.weigh,
                shard_tokens=self.stream.shard_tokens,
                is_fetched=self.stream.prepare is not None,
            ),
            number=number,
            block_size=recipe.block_size(number),
            seed=recipe.order_seed,
            seed_path=(recipe.keys[number], lane if shares is not None else "shared"),
        )
        self.is_empty = not extents.num_samples
        """Whether the lane has no sample of the stream."""

    @property
    def is_used(self) -> bool:
        """Whether any epoch takes a sample here.

        If all epochs take the same samples, a small quota omits the same lanes every time.
        """
        if self.is_empty or not self.stream.quota.amount:
            return False
        return not self._fixed or self.range_of(0)[1] > 0

    def block_of(self, cursor: int) -> int:
        """Return the number of an element's shuffle block."""
        return self._passes.block_of(self._first + cursor * self._step)

    def shards_in(self, block: int) -> Int64Array:
        """Return the shards of a shuffle block in order, shape (n,)."""
        return self._passes.shards_in(block)

    def most_bytes(self, shard_bytes: Int64Array) -> int:
        """Return an upper bound on the bytes of shards needed at the same time.

        These are the shards of two neighbouring blocks, of the samples in the window being
        delivered and in the one being planned, and of those before that may wait in the packer.
        """
        recipe, queue = self._recipe, 0 if self._recipe.is_mixed else self.number
        _, window, packed, _, chunk = recipe.sizes(self._lane, queue)
        waiting = packed if recipe.packing.packs_windows else 0
        block = recipe.block_size(self.number)
        planned = 2 * chunk * max(-(-window // chunk), 1) * self._step
        if self.stream.block_samples is not None:
            # A window takes half a block, and as much again where it is rounded up to chunks.
            planned, waiting = min(planned, 2 * block), min(waiting, block)
        # Shards are needed by whole blocks.
        return self._passes.most_bytes(shard_bytes, -(-planned // block) * block + waiting)

    def range_of(self, epoch: int) -> tuple[int, int]:
        """Return the epoch's [begin, end) in this lane's sequence, in the quota's unit."""
        if self.is_empty:
            return 0, 0
        if self._recipe.chapter is not None:
            return 0, self.most_samples
        amount = self.stream.quota.amount
        if self._fixed:
            return 0, self._part(amount)
        return self._part(epoch * amount), self._part((epoch + 1) * amount)

    def _part(self, total: int) -> int:
        num_lanes = self._recipe.num_lanes
        if not total or num_lanes == 1:
            return total
        if self._shares is not None:
            return apportion(total, self._shares)[self._lane]
        if self.stream.quota.unit == "samples":
            # Elements lane, lane + num_lanes, ... of a shared order.
            return (total - self._lane + num_lanes - 1) // num_lanes
        return apportion(total, [1] * num_lanes)[self._lane]

    def take(self, cursor: int, count: int) -> Int64Array:
        """Return rows (stream, pass, sample, tokens) from `cursor` on, shape (count, 4)."""
        rows = np.empty((max(count, 0), 4), np.int64)
        self.put(cursor, rows, np.arange(len(rows)))
        return rows

    def put(self, cursor: int, rows: Int64Array, places: Int64Array) -> None:
        """Write elements from `cursor` on to `places` in rows (stream, pass, sample, tokens)."""
        if not len(places):
            return
        if self.stream.prepare is not None:
            block = self.block_of(cursor + len(places) - 1)
            if block != self._prepared:  # all of its shards, before they are loaded one by one
                self.stream.prepare(self.shards_in(block))
                self._prepared = block
        self._passes.put(self._first + cursor * self._step, rows, places, self._step)

    @property
    def most_samples(self) -> int:
        """Samples that a run of chapters draws here, at most."""
        passes = self.stream.passes
        if passes is None:
            return MAX_CURSOR
        num_samples = passes * self._passes.num_samples
        return max(num_samples - self._first + self._step - 1, 0) // self._step

    @property
    def tokens_in_pass(self) -> int:
        """Tokens of one pass in the lane. The first call loads the lengths of its samples."""
        return self._passes.tokens_in_pass()

    def note_end(self, tokens: int, cursor: int, before: int) -> None:
        """Cache the result of `find_tokens` for the epoch that begins there."""
        self._recipe.found["end", self.number, self._lane] = (tokens, cursor, before)

    def find_tokens(self, tokens: int) -> tuple[int, int]:
        """Find the first element that starts at or after `tokens`, and the tokens before it."""
        if self.is_empty or tokens <= 0:
            return 0, 0
        noted, cursor, before = self._recipe.found.get(("end", self.number, self._lane), (0, 0, 0))
        if tokens == noted:
            return cursor, before
        if self._shares is not None:
            return self._passes.find_tokens(tokens)
        cursor = before = 0
        while True:  # a shared stream is small enough for a linear search
            weights = self.weigh(self.take(cursor, 1024)[:, TOKENS])
            starts = before + np.cumsum(weights) - weights
            inside = int(np.searchsorted(starts, tokens, side="left"))
            if inside < len(weights):
                return cursor + inside, int(starts[inside])
            cursor += len(weights)
            before += int(weights.sum())
            if not before and cursor > self.stream.num_samples:
                return 0, 0  # every sample is dropped; PackQueue raises the error

    def tokens_in(self, epoch: int, begin: int, end: int) -> tuple[int, int, bool]:
        """Count the tokens of samples [begin, end) of those that an epoch takes here.

        Return also a lower bound on the tokens of the samples after them, and whether no better
        bound is available without planning.
        """
        first, last = self.range_of(epoch)
        if last <= first:
            return 0, 0, True
        if self.stream.quota.unit == "tokens":
            # The previous epoch's last sample may extend into this one's range.
            reached = self.find_tokens(first)[1] if self._shares is not None else last
            return 0, max(last - reached, 0), True
        stop = min(first + end, last)
        is_left_out = self._recipe.packing.overflow == "drop" or self.stream.may_be_empty
        least = 0 if is_left_out else last - stop
        if self._shares is None:
            return 0, least, True  # a shared stream is small: its lengths are not worth loading
        return self._passes.tokens_between(min(first + begin, last), stop), least, stop == last


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

    @property
    def rest(self) -> int:
        """Tokens of the epoch before the next sample, if they are counted and none is taken."""
        return max(self.locate()[1] - self._first, 0) if self.by_tokens else 0

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


def is_used(recipe: Recipe, lane: int, queue: int) -> bool:
    """Return whether epochs take any sample in a queue of a lane."""
    return any(LaneStream(recipe, number, lane).is_used for number in recipe.streams_in(queue))


def skips_lanes(recipe: Recipe) -> bool:
    """Return whether slots skip lanes that hold no sample of a global batch's stream.

    A device's slots then are in other lanes in each global batch.
    """
    is_endless = recipe.mixing.epoch_end == "carry"
    is_whole = recipe.mixing.batching_method == "per_stream"
    if not (is_endless and is_whole and recipe.keeps_last_apart):
        return False
    if "skips_lanes" not in recipe.found:
        used = [
            [is_used(recipe, lane, queue) for lane in range(recipe.num_lanes)]
            for queue in range(recipe.num_queues)
        ]
        recipe.found["skips_lanes"] = any(any(each) and not all(each) for each in used)
    return bool(recipe.found["skips_lanes"])
