"""Everything that determines the sequence of packs, in one frozen value.

::

    streams, quotas, packing, mixing, order, num_lanes, lane_run, global_batch_size
                     '--> Recipe --> lane_stream(number, lane) --> the part an epoch takes there

Nothing here depends on ranks, nodes or workers. Cost: a stream is assigned to all lanes when one of
them is first used: O(shards) a lane, about 30 us for 2,000 shards. The result is cached: 24 bytes a
shard and about 500 a lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import TypeVar

import numpy as np

from streampack.config import Mixing, Order, Packing
from streampack.mix import Quota, parts
from streampack.mix.draw import CHUNK
from streampack.order import ChosenSamples, Extents, Lengths, Passes, assign_to_lanes
from streampack.plan.chapter import ChapterPlan
from streampack.plan.pack_shapes import PackShapes
from streampack.types import Int64Array

K = TypeVar("K")
V = TypeVar("V")
MAX_PACKS = 1 << 20  # limit on packs in a global batch, packs in a lane's run, and lanes
MAX_CURSOR = 1 << 56  # more samples than any run takes of a stream in a lane
MIN_SAMPLES_PER_LANE = 100  # smaller streams are shared by all lanes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanStream:
    """A stream as the planner sees it: counts and lengths, no tokens."""

    name: str
    """Used in messages and statistics."""
    first_sample: Int64Array
    """First sample of each shard, followed by the end, shape (num_shards + 1,)."""
    raw_bytes: Int64Array
    """Uncompressed bytes of each shard, shape (num_shards,)."""
    num_tokens: int
    """Tokens in the stream, exact or estimated from its bytes."""
    lengths_of: Callable[[int], Int64Array]
    """Return the tokens of each sample of a shard, including those added by bos_id and eos_id."""
    quota: Quota
    """The amount that an epoch takes."""
    shard_tokens: Int64Array | None = None
    """Tokens that each shard delivers in total, shape (num_shards,). None: computed from the
    lengths."""
    max_passes: Fraction | None = None
    """Passes that a run of chapters may use in a lane; None: any number."""
    on_exhausted: str = "substitute"
    """What happens then: "substitute", "end" or "error"."""
    num_slots: int | None = None
    """Slots of packs that the stream's tokens are expected to take. None: one for each token."""
    prepare: Callable[[Int64Array], None] | None = None
    """Called with the shards of a block before their lengths are needed. None: all are known."""
    slots_per_pack: int = 1
    """Length of its packs, in units of the packing's max_seq_len."""

    @property
    def num_samples(self) -> int:
        """Number of samples in the stream."""
        return int(self.first_sample[-1])

    @property
    def chosen_tokens(self) -> int:
        """Tokens that an epoch is expected to take."""
        if self.quota.unit == "tokens":
            return self.quota.amount
        return self.quota.amount * self.num_tokens // self.num_samples

    @property
    def chosen_slots(self) -> int:
        """Slots of packs that an epoch is expected to fill."""
        if self.num_slots is None:
            return self.chosen_tokens
        return self.chosen_tokens * self.num_slots // max(self.num_tokens, 1)


class LaneStream:
    """One stream in one lane: an endless sequence of which each epoch takes the next part.

    Args:
        recipe: Streams, lanes, seed, block size and packing.
        number: Index of the stream.
        extents: The content of one pass: the lane's samples, or all samples of a shared stream.
        lane: The lane.
        shares: The part of the stream held by each lane, in the quota's unit or proportional to it,
            shape (num_lanes,). None: the stream is shared by all lanes.
    """

    def __init__(
        self, recipe: Recipe, number: int, extents: Extents, lane: int, shares: Int64Array | None
    ) -> None:
        self._recipe = recipe
        self.stream = recipe.streams[number]
        self.number = number
        self._lane = lane
        self._shares = shares
        self._num_lanes = recipe.num_lanes
        self._fixed = recipe.mixing.sampling_method == "fixed"
        self._drops = recipe.packing.overflow == "drop"
        self._weigh = partial(recipe.weigh, number=number)
        self._ends = recipe.ends
        self._passes: Passes | None = None
        self._prepared = -1
        if extents.num_samples:
            self._passes = Passes(
                extents,
                Lengths(
                    first_sample=self.stream.first_sample,
                    of_shard=self.stream.lengths_of,
                    weigh=self._weigh,
                    shard_tokens=self.stream.shard_tokens,
                ),
                block_size=recipe.block_size,
                seed=recipe.order_seed,
                place=(recipe.key_of(number), lane if shares is not None else "shared"),
            )

    @property
    def is_empty(self) -> bool:
        """Whether the lane holds no sample of the stream."""
        return self._passes is None

    @property
    def is_used(self) -> bool:
        """Whether any epoch takes a sample here.

        If all epochs take the same samples, a small quota leaves out the same lanes every time.
        """
        if self._passes is None or not self.stream.quota.amount:
            return False
        return not self._fixed or self.range_of(0)[1] > 0

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
        """Return an upper bound on the bytes of shards needed at the same time.

        These are the shards of two neighbouring blocks, and of the samples in the window being
        delivered and in the one being planned.
        """
        if self._passes is None:
            return 0
        _, window = self._recipe.window(self._lane, 0 if self._recipe.is_mixed else self.number)
        return self._passes.most_bytes(shard_bytes, 2 * max(window, CHUNK))

    def range_of(self, epoch: int) -> tuple[int, int]:
        """Return the epoch's [begin, end) in this lane's sequence, in the quota's unit."""
        if self._passes is None:
            return 0, 0
        if self._recipe.chapter is not None:
            return 0, MAX_CURSOR
        amount = self.stream.quota.amount
        if self._fixed:
            return 0, self._part(amount)
        return self._part(epoch * amount), self._part((epoch + 1) * amount)

    def _part(self, total: int) -> int:
        if not total:
            return 0
        if self._shares is not None:
            return parts(total, self._shares)[self._lane]
        if self.stream.quota.unit == "samples":
            # Elements lane, lane + num_lanes, ... of a shared order.
            return (total - self._lane + self._num_lanes - 1) // self._num_lanes
        return parts(total, [1] * self._num_lanes)[self._lane]

    def take(self, cursor: int, count: int) -> ChosenSamples:
        """Return `count` elements of this lane's sequence, from `cursor` on."""
        if self._passes is None:
            raise IndexError(f"lane {self._lane} holds no sample of stream {self.stream.name!r}")
        if self.stream.prepare is not None and count > 0:
            self._prepare(self.stream.prepare, self.block_of(cursor + count - 1))
        if self._shares is not None:
            return self._passes.take(cursor, count)
        if count <= 0:
            return self._passes.take(0, 0)
        first = self._lane + cursor * self._num_lanes
        return self._passes.take(first, count, self._num_lanes)

    def put(self, cursor: int, rows: Int64Array, places: Int64Array) -> None:
        """Write elements from `cursor` on to `places` in rows (stream, pass, sample, tokens)."""
        if self._passes is not None and self._shares is not None:
            if self.stream.prepare is not None and len(places):
                self._prepare(self.stream.prepare, self.block_of(cursor + len(places) - 1))
            self._passes.put(cursor, rows, places, self.number)
        elif len(places):
            taken = self.take(cursor, len(places))
            rows[places, 0] = self.number
            rows[places, 1:] = np.stack([taken.passes, taken.samples, taken.lengths], axis=1)

    def _prepare(self, prepare: Callable[[Int64Array], None], block: int) -> None:
        """Announce all shards of a block before their lengths are loaded one by one."""
        if block != self._prepared:
            prepare(self.shards_in(block))
            self._prepared = block

    @property
    def samples_in_pass(self) -> int:
        """Samples of one pass that lie in this lane, rounded up."""
        if self._passes is None:
            return 0
        num_samples = self._passes.num_samples
        return num_samples if self._shares is not None else -(-num_samples // self._num_lanes)

    @property
    def most_samples(self) -> int:
        """Samples that a run of chapters may draw here."""
        passes = self.stream.max_passes
        if passes is None or self._passes is None:
            return MAX_CURSOR
        if self._shares is None:
            return int(passes * self._passes.num_samples) // self._num_lanes
        if self._recipe.is_mixed:
            return int(passes * self._passes.num_samples)
        # Packs are limited by tokens, see plan/run_limits.py: a part of a pass may take any samples
        # of it, and packs of other lengths may drop others.
        if self._recipe.packing.overflow != "split":
            return MAX_CURSOR
        return math.ceil(passes) * self._passes.num_samples

    @property
    def most_tokens(self) -> int:
        """Tokens that a run of chapters may draw here, at most; the stream has `max_passes`."""
        if self._passes is None:
            return 0
        if self._shares is None:  # small, and no lane gets the same samples in every pass
            return int(self._weigh(self.take(0, self.most_samples).lengths).sum())
        return int((self.stream.max_passes or 0) * self._passes.tokens_in_pass())

    def note_end(self, tokens: int, cursor: int, before: int) -> None:
        """Cache the result of `find_tokens` for the epoch that begins there."""
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
        while True:  # a shared stream is small enough for a linear search
            weights = self._weigh(self.take(cursor, 1024).lengths)
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

        Returns:
            Their tokens, a lower bound on the tokens of the samples after them, and whether no
            better bound is available without planning.
        """
        first, last = self.range_of(epoch)
        if self._passes is None or last <= first:
            return 0, 0, True
        if self.stream.quota.unit == "tokens":
            # The previous epoch's last sample may extend into this one's range.
            reached = self.find_tokens(first)[1] if self._shares is not None else last
            return 0, max(last - reached, 0), True
        stop = min(first + end, last)
        least = 0 if self._drops else last - stop
        if self._shares is None:
            return 0, least, True  # a shared stream is small: its lengths are not worth loading
        return self._passes.tokens_between(min(first + begin, last), stop), least, stop == last


class _Found(dict[K, V]):
    """Memoized values derived from a Recipe. They are not pickled."""

    def __reduce__(self) -> tuple[type[_Found[K, V]], tuple[()]]:
        return _Found, ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe:
    """Everything that determines which segments lie in pack q of an epoch."""

    streams: tuple[PlanStream, ...]
    """The streams, in the order given."""
    packing: Packing
    """Its method is never None."""
    mixing: Mixing
    order: Order
    num_lanes: int
    """Number of lanes, fixed for the run."""
    lane_run: int
    """Consecutive packs from one lane."""
    global_batch_size: int
    """Slots per optimizer step, over all ranks: packs of the packing's max_seq_len."""
    chapter: ChapterPlan | None = None
    """The chapter of the run that this is the recipe of; None: the run has epochs."""
    names: list[str] = field(init=False, repr=False)
    """Names of the streams."""
    is_mixed: bool = field(init=False, repr=False)
    """Whether a pack may hold samples of several streams."""
    chosen_tokens: int = field(init=False, repr=False)
    """Tokens that an epoch is expected to take from all streams."""
    chosen_slots: int = field(init=False, repr=False)
    """Slots of packs that an epoch is expected to fill."""
    packs_per_carry_epoch: int = field(init=False, repr=False)
    """Packs per epoch with epoch_end="carry"."""
    block_size: int = field(init=False, repr=False)
    """Samples shuffled together."""
    pack_window: tuple[int, int] = field(init=False, repr=False)
    """Packs and samples of a window of shuffled packs, of all lanes and columns together."""
    mixes_last: bool = False
    """Whether the last batches of streams mix, as in runs begun before version 5 of states."""
    shapes: PackShapes = field(init=False, repr=False)
    """The length of each column's packs."""
    ends: _Found[tuple[int, int], tuple[int, int, int]] = field(
        default_factory=_Found, init=False, repr=False
    )
    """Results of `note_end` by (stream, lane): tokens, cursor, and tokens before the cursor."""
    # By stream: the extents and shares of each lane; for a shared stream all extents, and None.
    _assignments: _Found[int, tuple[list[Extents], Int64Array | None]] = field(
        default_factory=_Found, init=False, repr=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", self.order.block_size)
        object.__setattr__(self, "pack_window", self.order.pack_window)
        packing = self.packing.resolved(is_shuffled=bool(self.pack_window[0]))
        object.__setattr__(self, "packing", packing)
        object.__setattr__(self, "names", [stream.name for stream in self.streams])
        object.__setattr__(self, "is_mixed", self.mixing.batching_method == "random")
        chosen_tokens = sum([stream.chosen_tokens for stream in self.streams])
        object.__setattr__(self, "chosen_tokens", chosen_tokens)
        chosen_slots = sum([stream.chosen_slots for stream in self.streams])
        object.__setattr__(self, "chosen_slots", chosen_slots)
        size = self.global_batch_size
        per_epoch = chosen_slots // (size * packing.row_tokens) * size
        object.__setattr__(self, "packs_per_carry_epoch", per_epoch)
        slots = [1] if self.is_mixed else [stream.slots_per_pack for stream in self.streams]
        is_padded = self.mixing.epoch_end == "pad" and self.chapter is None
        is_uniform = max(slots, default=1) == 1
        # A global batch of one stream may take single packs of lanes, if they have one length.
        is_global = self.mixing.batching_method == "per_stream" and is_uniform
        run = 1 if is_global else self.lane_run
        shapes = PackShapes.of(
            packing, slots, run=run, is_padded=is_padded, is_pure=self.keeps_last_apart
        )
        object.__setattr__(self, "shapes", shapes)

    @property
    def keeps_last_apart(self) -> bool:
        """Whether batches of one stream hold no other, also where streams end."""
        if self.mixing.batching_method not in ("device_per_stream", "per_stream"):
            return False
        if self.chapter is not None:
            return True
        return len(self.streams) > 1 and not self.mixes_last and self.mixing.epoch_end != "pad"

    @property
    def order_seed(self) -> int:
        """The seed of the sample order; negative for stored order."""
        return self.order.seed if self.order.shuffle else -1

    def key_of(self, number: int) -> int | str:
        """Return the key of a stream's order: its name, or in runs with epochs its place."""
        return number if self.chapter is None else self.streams[number].name

    @property
    def num_columns(self) -> int:
        """Columns per lane: one if packs mix streams, otherwise one per stream."""
        return 1 if self.is_mixed else len(self.streams)

    def window(self, lane: int, column: int) -> tuple[int, int]:
        """Return the packs and samples of a window of a column, whichever ends it; 0, 0: no window.

        All lanes and columns together hold what `Order.pack_shuffle` says. No window is longer than
        a pass: samples would wait for others that are used again.
        """
        num_packs, num_samples = self.pack_window
        if not num_packs:
            return 0, 0
        chosen = self.chosen_tokens if self.is_mixed else self.streams[column].chosen_tokens
        share = chosen / max(self.chosen_tokens, 1) / self.num_lanes
        in_pass = self._samples_in_pass(lane, column)
        num_packs = int(num_packs * share) // int(self.shapes.slots_per_pack[column])
        return max(num_packs, 1), max(min(int(num_samples * share), in_pass), 1)

    def packing_window(self, lane: int, column: int) -> int:
        """Return the samples that a packer of windows gets together in a column.

        A chunk, or a window of shuffled packs if that is larger. As such a window, it is at most
        half a shuffle block and one pass.
        """
        in_pass = self._samples_in_pass(lane, column)
        _, num_samples = self.window(lane, column)
        half_block = -(-self.block_size // 2)
        return max(min(max(num_samples, CHUNK), half_block, in_pass), 1)

    def _samples_in_pass(self, lane: int, column: int) -> int:
        # Of a chapter, only streams with a share: another one that is passed changes nothing.
        numbers = self.streams_in(column)
        if self.chapter is not None and self.is_mixed:
            numbers = [number for number in numbers if self.chapter.uses(number)]
        return sum([self._samples_in(number, lane) for number in numbers])

    def max_consecutive_drops(self, column: int) -> int | None:
        """Return how many samples in a row a column may drop; None if its order ends anyway."""
        by_tokens = any(stream.quota.unit == "tokens" for stream in self.streams)
        if self.mixing.epoch_end != "carry" and not by_tokens:
            return None
        if not self.is_mixed:
            return 2 * self.streams[column].num_samples
        # If streams are mixed, a rare one may be drawn only once in several epochs.
        drawn = [stream.quota.amount for stream in self.streams if stream.quota.unit == "samples"]
        held = [stream.num_samples for stream in self.streams]
        return 2 * self.num_lanes * (sum(drawn) + sum(held))

    def packing_of(self, number: int) -> Packing:
        """Return the packing of a stream, with the length of its packs."""
        return self.packing if self.is_mixed else self.shapes.packings[number]

    def weigh(self, lengths: Int64Array, number: int = 0) -> Int64Array:
        """Return the tokens that samples of a stream deliver, given their lengths, shape (n,)."""
        limit = self.packing_of(number).max_seq_len
        if self.packing.overflow == "truncate":
            return np.minimum(lengths, limit)
        if self.packing.overflow == "drop":
            return np.where(lengths > limit, 0, lengths)
        return lengths

    def _samples_in(self, number: int, lane: int) -> int:
        """Return the samples that a lane takes of one pass over a stream, rounded up."""
        runs, shares = self._assignment(number)
        return (
            -(-runs[0].num_samples // self.num_lanes) if shares is None else runs[lane].num_samples
        )

    def lane_stream(self, number: int, lane: int) -> LaneStream:
        """Return one stream in one lane."""
        runs, shares = self._assignment(number)
        extents = runs[0] if shares is None else runs[lane]
        return LaneStream(self, number, extents, lane, shares)

    def streams_in(self, column: int) -> Sequence[int]:
        """Return the numbers of the streams in a column."""
        return range(len(self.streams)) if self.is_mixed else [column]

    def is_used(self, lane: int, column: int) -> bool:
        """Return whether epochs take any sample in a column of a lane."""
        return any(self.lane_stream(number, lane).is_used for number in self.streams_in(column))

    def _assignment(self, number: int) -> tuple[list[Extents], Int64Array | None]:
        if number not in self._assignments:
            self._assignments[number] = self._assign(number)
        return self._assignments[number]

    def _assign(self, number: int) -> tuple[list[Extents], Int64Array | None]:
        stream = self.streams[number]
        samples = np.diff(stream.first_sample)
        is_small = stream.num_samples < MIN_SAMPLES_PER_LANE * self.num_lanes
        is_shared = is_small and self.num_lanes > 1
        num_runs = 1 if is_shared else self.num_lanes
        place = (self.key_of(number),)
        runs = assign_to_lanes(samples, stream.raw_bytes, num_runs, self.order_seed, place)
        if is_shared:
            return runs, None
        if stream.quota.unit == "samples":
            return runs, np.array([run.num_samples for run in runs])
        # Bytes approximate tokens, with or without length files; sample counts would not.
        held = [run.num_bytes(samples, stream.raw_bytes) for run in runs]
        return runs, np.maximum(held, [min(run.num_samples, 1) for run in runs])
