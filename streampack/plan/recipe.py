"""All that the sequence of packs is a function of, gathered in one frozen value.

::

    streams, quotas, packing, mixing, order, num_lanes, lane_run, global_batch_size
                     '--> Recipe --> lane_streams(lane) --> what an epoch takes there

Nothing here knows ranks, nodes or workers. Cost: a stream is dealt to all lanes at once, when one
of them is first asked for: O(shards) a lane, some 30 us for 2,000 shards. The deal is kept, 24
bytes a shard and some 500 a lane.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from streampack.config import Mixing, Order, Packing
from streampack.mix import Quota, parts
from streampack.order import Extents, Lengths, Passes, Taken, deal
from streampack.order.draw import CHUNK
from streampack.types import Int64Array

__all__ = ["MAX_PACKS", "MIN_SAMPLES_PER_LANE", "LaneStream", "PlanStream", "Recipe"]

K = TypeVar("K")
V = TypeVar("V")
MAX_PACKS = 1 << 20  # in a global batch or a lane's run, and as many lanes
MIN_SAMPLES_PER_LANE = 100  # a smaller stream is shared by all lanes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanStream:
    """What planning knows of a stream: counts and lengths, no tokens."""

    name: str
    """For messages and statistics."""
    first_sample: Int64Array
    """The first sample of each shard, and the end, shape (num_shards + 1,)."""
    raw_bytes: Int64Array
    """Uncompressed bytes of each shard, shape (num_shards,)."""
    num_tokens: int
    """Tokens in the stream, exact or estimated from its bytes."""
    lengths_of: Callable[[int], Int64Array]
    """Tokens of each sample of a shard, with those that bos_id and eos_id add."""
    quota: Quota
    """What an epoch takes."""
    shard_tokens: Int64Array | None = None
    """Tokens that each shard's samples will deliver together, shape (num_shards,); None: only their
    lengths can tell."""
    prepare: Callable[[Int64Array], None] | None = None
    """Called with the shards of a block whose lengths are asked for next; None: all are known."""

    @property
    def num_samples(self) -> int:
        """Samples in the stream."""
        return int(self.first_sample[-1])

    @property
    def chosen_tokens(self) -> int:
        """Tokens that an epoch is expected to take."""
        if self.quota.unit == "tokens":
            return self.quota.amount
        return self.quota.amount * self.num_tokens // self.num_samples


class LaneStream:
    """One stream as one lane sees it: an endless sequence, of which each epoch takes the next part.

    Args:
        recipe: Streams, lanes, seed, block size and packing.
        number: Which stream.
        extents: What a pass goes through: the lane's samples, or all of a shared stream's.
        lane: Which lane.
        shares: What of the stream each lane holds, in the quota's unit or in proportion to it,
            shape (num_lanes,); None: the stream is shared by all.
    """

    def __init__(
        self, recipe: Recipe, number: int, extents: Extents, lane: int, shares: Int64Array | None
    ) -> None:
        self.stream = recipe.streams[number]
        self.number = number
        self._lane = lane
        self._shares = shares
        self._num_lanes = recipe.num_lanes
        self._fixed = recipe.mixing.sampling_method == "fixed"
        self._drops = recipe.packing.overflow == "drop"
        self._weigh = recipe.weigh
        self._ends = recipe.ends
        self._passes: Passes | None = None
        self._prepared = -1
        if extents.num_samples:
            self._passes = Passes(
                extents,
                Lengths(
                    first_sample=self.stream.first_sample,
                    of_shard=self.stream.lengths_of,
                    weigh=recipe.weigh,
                    shard_tokens=self.stream.shard_tokens,
                ),
                block_size=recipe.order.block_size,
                seed=recipe.order_seed,
                place=(number, lane if shares is not None else "shared"),
            )

    @property
    def is_empty(self) -> bool:
        """Whether the lane holds no sample of the stream."""
        return self._passes is None

    def block_of(self, cursor: int) -> int:
        """Return the number of the shuffle block that holds an element; -1 in an empty lane."""
        if self._passes is None:
            return -1
        if self._shares is None:
            cursor = self._lane + cursor * self._num_lanes
        return self._passes.block_of(cursor)

    def shards_in(self, block: int) -> Int64Array:
        """Return the shards of a shuffle block in order, shape (n,)."""
        return np.zeros(0, np.int64) if self._passes is None else self._passes.shards_in(block)

    def most_bytes(self, shard_bytes: Int64Array) -> int:
        """Return what the shards that are needed at once take at most.

        These are two neighbouring blocks', and the samples of the chunk that is being delivered
        and of the one that is being planned.
        """
        return 0 if self._passes is None else self._passes.most_bytes(shard_bytes, 2 * CHUNK)

    def range_of(self, epoch: int) -> tuple[int, int]:
        """Return where the epoch begins and ends in this lane's sequence, in the quota's unit."""
        if self._passes is None:
            return 0, 0
        amount = self.stream.quota.amount
        if self._fixed:
            return 0, self._part(amount)
        return self._part(epoch * amount), self._part((epoch + 1) * amount)

    def _part(self, total: int) -> int:
        if self._shares is not None:
            return parts(total, self._shares)[self._lane]
        if self.stream.quota.unit == "samples":
            # Elements lane, lane + num_lanes, ... of a shared order.
            return (total - self._lane + self._num_lanes - 1) // self._num_lanes
        return parts(total, [1] * self._num_lanes)[self._lane]

    def take(self, cursor: int, count: int) -> Taken:
        """Return elements `cursor` ... of this lane's sequence."""
        if self._passes is None:
            raise IndexError(f"lane {self._lane} holds no sample of stream {self.stream.name!r}")
        if self.stream.prepare is not None and count > 0:
            self._prepare(self.stream.prepare, self.block_of(cursor + count - 1))
        if self._shares is not None:
            return self._passes.take(cursor, count)
        if count <= 0:
            return self._passes.take(0, 0)
        first = self._lane + cursor * self._num_lanes
        every = self._passes.take(first, (count - 1) * self._num_lanes + 1)
        step = self._num_lanes
        return Taken(
            passes=every.passes[::step],
            samples=every.samples[::step],
            lengths=every.lengths[::step],
        )

    def put(self, cursor: int, rows: Int64Array, places: Int64Array) -> None:
        """Write elements `cursor` ... to some places of rows (stream, pass, sample, tokens)."""
        if self._passes is not None and self._shares is not None:
            if self.stream.prepare is not None and len(places):
                self._prepare(self.stream.prepare, self.block_of(cursor + len(places) - 1))
            self._passes.put(cursor, rows, places, self.number)
        elif len(places):
            taken = self.take(cursor, len(places))
            rows[places, 0] = self.number
            rows[places, 1:] = np.stack([taken.passes, taken.samples, taken.lengths], axis=1)

    def _prepare(self, prepare: Callable[[Int64Array], None], block: int) -> None:
        """Ask for the shards of a block together, before their lengths are asked for one by one."""
        if block != self._prepared:
            prepare(self.shards_in(block))
            self._prepared = block

    def note_end(self, tokens: int, cursor: int, before: int) -> None:
        """Note what `find_tokens` would find, for the epoch that begins there."""
        self._ends[self.number, self._lane] = (tokens, cursor, before)

    def find_tokens(self, tokens: int) -> tuple[int, int]:
        """Find the first element that starts at or after `tokens`, and the tokens before it."""
        if self._passes is None or tokens <= 0:
            return 0, 0
        noted, cursor, before = self._ends.get((self.number, self._lane), (0, 0, 0))
        if tokens == noted:
            return cursor, before
        if self._shares is not None:
            return self._passes.find_tokens(tokens)
        cursor = before = 0
        while True:  # a shared stream is small: walk it
            weights = self._weigh(self.take(cursor, 1024).lengths)
            starts = before + np.cumsum(weights) - weights
            inside = int(np.searchsorted(starts, tokens, side="left"))
            if inside < len(weights):
                return cursor + inside, int(starts[inside])
            cursor += len(weights)
            before += int(weights.sum())
            if not before and cursor > self.stream.num_samples:
                return 0, 0  # everything is dropped; the planner says so

    def tokens_in(self, epoch: int, begin: int, end: int) -> tuple[int, int, bool]:
        """Count the tokens of samples `begin` to `end` - 1 of those that an epoch takes here.

        Returns:
            Their tokens, the least that the samples after them hold, and whether that is all that
            can be known without planning.
        """
        first, last = self.range_of(epoch)
        if self._passes is None or last <= first:
            return 0, 0, True
        if self.stream.quota.unit == "tokens":
            # The epoch before may have begun a sample that reaches into this one's range.
            reached = self.find_tokens(first)[1] if self._shares is not None else last
            return 0, max(last - reached, 0), True
        stop = min(first + end, last)
        least = 0 if self._drops else last - stop
        if self._shares is None:
            return 0, least, True  # a shared stream is small: not worth its lengths
        return self._passes.tokens_between(min(first + begin, last), stop), least, stop == last


class _Found(dict[K, V]):
    """What was found out of a recipe. It follows from it: a pickled one is empty."""

    def __reduce__(self) -> tuple[type[_Found[K, V]], tuple[()]]:
        return _Found, ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe:
    """Everything that decides which segments lie in pack q of an epoch."""

    streams: tuple[PlanStream, ...]
    """The streams, in the order in which they were given."""
    packing: Packing
    mixing: Mixing
    order: Order
    num_lanes: int
    """Lanes, fixed for the run."""
    lane_run: int
    """Packs that come from one lane in a row."""
    global_batch_size: int
    """Packs in one optimizer step over all ranks."""
    ends: _Found[tuple[int, int], tuple[int, int, int]] = field(
        default_factory=_Found, init=False, repr=False
    )
    """Of a stream in a lane, what `find_tokens` was told last: tokens, cursor, tokens before it."""
    # The extents of each lane, and their shares; or of a shared stream all, and None.
    _deals: _Found[int, tuple[list[Extents], Int64Array | None]] = field(
        default_factory=_Found, init=False, repr=False
    )

    @property
    def order_seed(self) -> int:
        """The seed of the order, negative for stored order."""
        return self.order.seed if self.order.shuffle else -1

    @property
    def names(self) -> list[str]:
        """The streams' names."""
        return [stream.name for stream in self.streams]

    @property
    def is_mixed(self) -> bool:
        """Whether packs hold samples of all streams."""
        return self.mixing.batching_method == "random"

    @property
    def num_columns(self) -> int:
        """Packers in a lane: one, or one a stream where packs hold one stream."""
        return 1 if self.is_mixed else len(self.streams)

    @property
    def chosen_tokens(self) -> int:
        """Tokens that an epoch is expected to take of all streams."""
        return sum(stream.chosen_tokens for stream in self.streams)

    @property
    def packs_per_carry_epoch(self) -> int:
        """Packs in an epoch with epoch_end="carry"."""
        per_batch = self.global_batch_size * self.packing.max_seq_len
        return self.chosen_tokens // per_batch * self.global_batch_size

    def longest_barren(self, column: int) -> int | None:
        """Return how many samples in a row a column may drop; None where its order ends anyway."""
        by_tokens = any(stream.quota.unit == "tokens" for stream in self.streams)
        if self.mixing.epoch_end != "carry" and not by_tokens:
            return None
        if not self.is_mixed:
            return 2 * self.streams[column].num_samples
        # Where streams are mixed, a rare one may come by once in some epochs.
        drawn = [stream.quota.amount for stream in self.streams if stream.quota.unit == "samples"]
        held = [stream.num_samples for stream in self.streams]
        return 2 * self.num_lanes * (sum(drawn) + sum(held))

    def weigh(self, lengths: Int64Array) -> Int64Array:
        """Return the tokens that samples of these lengths will deliver, shape as given."""
        limit = self.packing.max_seq_len
        if self.packing.overflow == "truncate":
            return np.minimum(lengths, limit)
        if self.packing.overflow == "drop":
            return np.where(lengths > limit, 0, lengths)
        return lengths

    def lane_stream(self, number: int, lane: int) -> LaneStream:
        """Return one stream as one lane sees it."""
        if number not in self._deals:
            self._deals[number] = self._deal(number)
        runs, shares = self._deals[number]
        extents = runs[0] if shares is None else runs[lane]
        return LaneStream(self, number, extents, lane, shares)

    def _deal(self, number: int) -> tuple[list[Extents], Int64Array | None]:
        stream = self.streams[number]
        samples = np.diff(stream.first_sample)
        is_small = stream.num_samples < MIN_SAMPLES_PER_LANE * self.num_lanes
        is_shared = is_small and self.num_lanes > 1
        num_runs = 1 if is_shared else self.num_lanes
        runs = deal(samples, stream.raw_bytes, num_runs, self.order_seed, (number,))
        if is_shared:
            return runs, None
        if stream.quota.unit == "samples":
            return runs, np.array([run.num_samples for run in runs])
        # Bytes stand for tokens, with and without length files: lanes of long samples hold fewer.
        held = [run.num_bytes(samples, stream.raw_bytes) for run in runs]
        return runs, np.maximum(held, [min(run.num_samples, 1) for run in runs])
