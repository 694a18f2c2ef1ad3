"""Everything that determines the sequence of packs, in one frozen value.

::

    streams, quotas, packing, mixing, order, num_lanes, lane_turn, global_batch_size
                     '--> Recipe --> windows, the packing of each stream, lanes' extents

Nothing here depends on ranks, nodes or workers. Cost: a stream is assigned to all lanes when one of
them is first used: O(shards) a lane, about 30 us for 2,000 shards. The result is cached: 24 bytes a
shard and about 500 a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from streampack.config import Mixing, Order, Packing
from streampack.mix.draw import CHUNK, LOOKAHEAD
from streampack.mix.weights import Quota
from streampack.order.lanes import Extents, assign_to_lanes
from streampack.pack.overflow import kept_tokens
from streampack.plan.chapter_plan import ChapterPlan
from streampack.plan.pack_shapes import PackShapes
from streampack.types import Int64Array

MAX_PACKS = 1 << 20  # limit on packs in a global batch, and packs in a lane's turn
MAX_LANES = 1 << 14  # a lane takes about 0.1 ms to set up
MIN_SAMPLES_PER_LANE = 100  # smaller streams are shared by all lanes
EQUAL_PART = 32  # lanes whose bytes differ by less than this part take as many tokens
# Samples that are packed as a whole, in shuffle blocks of fewer than twice as many too. A window
# costs about 57 us: one of 128 samples makes planning twice as slow, one of a single sample 180
# times as slow.
LEAST_PACKED = 256
MAX_SAMPLES = 1 << 62  # more than any stream has


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
    overflow: str | None = None
    """The overflow rule that these lengths have been through, or None."""
    whole_lengths_of: Callable[[int], Int64Array] | None = None
    """As `lengths_of`, before that rule, or None if there is none."""
    quota: Quota
    """The amount that an epoch takes."""
    shard_tokens: Int64Array | None = None
    """Tokens that each shard delivers in total, shape (num_shards,). None: computed from the
    lengths."""
    passes: int | None = None
    """Passes that a run of chapters takes, in its last chapter, or None for any number."""
    num_slots: int | None = None
    """Slots of packs that the stream's tokens are expected to take. None: one for each token."""
    may_be_empty: bool = False
    """Whether samples may have no tokens."""
    block_samples: int | None = None
    """Samples that are shuffled together at most, and of which half are packed together at most.
    None: `Order` alone says."""
    prepare: Callable[[Int64Array], None] | None = None
    """Called with the shards of a block before their lengths are needed. None: all are known."""
    slots_per_pack: int = 1
    """Length of its packs, in slots."""

    @property
    def num_samples(self) -> int:
        """Number of samples in the stream."""
        return int(self.first_sample[-1])

    @property
    def mean_tokens(self) -> float:
        """Tokens of a sample on average."""
        return max(self.num_tokens, 1) / max(self.num_samples, 1)

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


class _Found(dict[Any, Any]):
    """Memoized values derived from the options. They are not pickled."""

    def __reduce__(self) -> tuple[type[_Found], tuple[()]]:
        return _Found, ()


class QueueSizes(NamedTuple):
    """How much of a queue of a lane is drawn, packed and shuffled together, in samples."""

    max_packs: int
    """Packs of a window that is shuffled; 0: they are not."""
    max_samples: int
    """Its samples; whichever comes first ends it."""
    packed: int
    """Samples that a packer of windows gets together: a chunk, or a window of shuffled packs if
    that is larger. At most half a shuffle block, or 256 samples if that is more, and one pass."""
    drawn: int
    """Samples drawn for one window at most, see `Recipe.most_drawn`."""
    chunk: int
    """Samples drawn at a time, at most `CHUNK`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe:
    """Everything that determines which segments are in pack q of an epoch."""

    streams: tuple[PlanStream, ...]
    """The streams, in the order given."""
    packing: Packing
    """Its method is never None."""
    mixing: Mixing
    order: Order
    num_lanes: int
    """Number of lanes, fixed for the run."""
    lane_turn: int
    """Consecutive packs from one lane."""
    global_batch_size: int
    """Slots per optimizer step, over all ranks; a pack takes one, or several of its stream."""
    chapter: ChapterPlan | None = None
    """The chapter of the run that this is the recipe of, or None if the run has epochs."""
    names: list[str] = field(init=False, repr=False)
    """Names of the streams."""
    keys: Sequence[int | str] = field(init=False, repr=False)
    """The keys of the streams' orders: their names, or in runs with epochs their places."""
    is_mixed: bool = field(init=False, repr=False)
    """Whether a pack may hold samples of several streams."""
    chosen_tokens: int = field(init=False, repr=False)
    """Tokens that an epoch is expected to take from all streams."""
    chosen_slots: int = field(init=False, repr=False)
    """Slots of packs that an epoch is expected to fill."""
    packs_per_carry_epoch: int = field(init=False, repr=False)
    """Packs per epoch with epoch_end="carry"."""
    row_tokens: int = field(init=False, repr=False)
    """Token slots of a pack."""
    num_queues: int = field(init=False, repr=False)
    """Queues per lane: one if packs mix streams, otherwise one per stream."""
    is_endless: bool = field(init=False, repr=False)
    """Whether queues continue from epoch to epoch, or through all chapters."""
    order_seed: int = field(init=False, repr=False)
    """The seed of the sample order; negative for stored order."""
    shapes: PackShapes = field(init=False, repr=False)
    """The length of each queue's packs."""
    found: _Found = field(default_factory=_Found, init=False, repr=False)
    """Memoized results of functions of the recipe, by name and arguments."""

    def __post_init__(self) -> None:
        order, size = self.order, self.global_batch_size
        packing = self.packing.resolved()
        _ = order.pack_window, order.block_size  # kept by `order`, for all windows
        is_mixed = self.mixing.batching_method == "random"
        chosen_slots = sum([stream.chosen_slots for stream in self.streams])
        names = [stream.name for stream in self.streams]
        derived = {
            "order_seed": order.seed if order.shuffle else -1,
            "packing": packing,
            "row_tokens": packing.row_tokens,
            "names": names,
            "keys": range(len(names)) if self.chapter is None else names,
            "is_mixed": is_mixed,
            "num_queues": 1 if is_mixed else len(names),
            "is_endless": self.mixing.epoch_end == "carry" or self.chapter is not None,
            "chosen_tokens": sum([stream.chosen_tokens for stream in self.streams]),
            "chosen_slots": chosen_slots,
            "packs_per_carry_epoch": chosen_slots // (size * packing.row_tokens) * size,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        slots = [1] if is_mixed else [stream.slots_per_pack for stream in self.streams]
        is_drained = self.chapter is None or self.chapter.passes is not None
        is_padded = self.mixing.epoch_end == "pad" and is_drained
        is_uniform = max(slots, default=1) == 1
        # A global batch of one stream may take single packs of lanes, if they have one length.
        is_global = self.mixing.batching_method == "per_stream" and is_uniform
        together = 1 if is_global else self.lane_turn
        shapes = PackShapes(
            packing,
            slots,
            slots_together=together,
            is_padded=is_padded,
            is_pure=self.keeps_last_apart,
        )
        object.__setattr__(self, "shapes", shapes)

    @property
    def keeps_last_apart(self) -> bool:
        """Whether batches of one stream hold no other, also where streams end."""
        if self.mixing.batching_method not in ("device_per_stream", "per_stream"):
            return False
        return self.chapter is not None or len(self.streams) > 1

    @property
    def target_unit(self) -> str:
        """What the shares of streams count: "samples" or "tokens"."""
        # Chapters share out packs where each has one stream, and packs are full of tokens.
        counts_packs = self.chapter is not None and not self.is_mixed
        return "tokens" if counts_packs else self.mixing.weight_unit

    def sizes(self, lane: int, queue: int) -> QueueSizes:
        """Return how much of a queue of a lane is drawn, packed and shuffled together.

        All lanes and queues together hold what `Order.pack_shuffle` says. No window is longer than
        a pass: samples would wait for others that are used again.
        """
        key = "sizes", lane, queue
        if key not in self.found:
            self.found[key] = self._sizes(lane, queue)
        sizes: QueueSizes = self.found[key]
        return sizes

    def _sizes(self, lane: int, queue: int) -> QueueSizes:
        drawn = self.most_drawn(queue)
        most = min(sum([self.samples_in(n, lane) for n in self.drawn_in(queue)]), drawn)
        num_packs = num_samples = 0
        if self.order.pack_window[0]:
            chosen = self.chosen_tokens if self.is_mixed else self.streams[queue].chosen_tokens
            share = chosen / max(self.chosen_tokens, 1) / self.num_lanes
            num_packs, num_samples = (int(size * share) for size in self.order.pack_window)
            num_packs = max(num_packs // int(self.shapes.slots_per_pack[queue]), 1)
            num_samples = max(min(num_samples, most), 1)
        half = max(-(-self.order.block_size // 2), LEAST_PACKED)
        return QueueSizes(
            max_packs=num_packs,
            max_samples=num_samples,
            packed=max(min(max(num_samples, CHUNK), half, most), 1),
            drawn=drawn,
            # Whole chunks make what is drawn for a window.
            chunk=CHUNK if drawn >= MAX_SAMPLES else -(-drawn // -(-drawn // CHUNK)),
        )

    # Shuffle blocks.

    def block_size(self, number: int) -> int:
        """Return the samples of a stream that are shuffled together."""
        return min(self.streams[number].block_samples or MAX_SAMPLES, self.order.block_size)

    def most_drawn(self, queue: int) -> int:
        """Return the samples that a lane's queue draws for one window at most.

        No stream then exceeds half of a block that it states, so that its shards are enough for the
        first window.
        """
        key = "most_drawn", queue
        if key not in self.found:
            streams = self.streams_in(queue)
            stated = [n for n in streams if self.streams[n].block_samples is not None]
            halves = [
                self._own_block(number) / 2 / mixture[number]
                for mixture in (self.mixtures(queue) if stated else ())
                for number in stated
                if mixture[number]
            ]
            self.found[key] = max(int(min(halves, default=MAX_SAMPLES)), 1)
        return int(self.found[key])

    def longest_look(self, number: int) -> int:
        """Return the samples of a stream to look at in addition to those that a window draws."""
        return max(min(LOOKAHEAD, self._own_block(number) // 4), 1)

    def _own_block(self, number: int) -> int:
        # Lanes that share a stream take each block of it together.
        block = self.streams[number].block_samples
        is_shared = block is not None and self.assignment(number)[1] is None
        return (block or MAX_SAMPLES) // (self.num_lanes if is_shared else 1)

    def mixtures(self, queue: int) -> Iterator[dict[int, float]]:
        """Yield the part of a queue's samples that are of each stream, at each end of a chapter."""
        chapter, unit = self.chapter, self.mixing.weight_unit
        shares = [tuple(Fraction(stream.quota.amount) for stream in self.streams)]
        if chapter is not None:
            shares = [chapter.begin, chapter.end]
        for own in shares:
            drawn = {}
            for number in self.streams_in(queue):
                stream = self.streams[number]
                counts = stream.quota.unit if chapter is None else unit
                per_draw = stream.mean_tokens if counts == "tokens" else 1.0
                drawn[number] = float(own[number]) / per_draw
            total = sum(drawn.values()) or 1.0
            yield {number: part / total for number, part in drawn.items()}

    def max_consecutive_drops(self, queue: int) -> int | None:
        """Return how many samples in a row a queue may drop; None if its order ends anyway."""
        units = [stream.quota.unit for stream in self.streams]
        if self.mixing.epoch_end != "carry" and "tokens" not in units:
            return None
        if not self.is_mixed:
            return 2 * self.streams[queue].num_samples
        # If streams are mixed, a rare one may be drawn only once in several epochs.
        drawn = [stream.quota.amount for stream in self.streams if stream.quota.unit == "samples"]
        held = [stream.num_samples for stream in self.streams]
        return 2 * self.num_lanes * (sum(drawn) + sum(held))

    def longest(self, number: int) -> int:
        """Return the most tokens that a segment of a stream has."""
        return self.shapes.longest[0 if self.is_mixed else number]

    def weigh(self, lengths: Int64Array, number: int = 0) -> Int64Array:
        """Return the tokens that samples of a stream deliver, given their lengths, shape (n,)."""
        return kept_tokens(lengths, self.longest(number), self.packing.overflow)

    def samples_in(self, number: int, lane: int) -> int:
        """Return the samples that a lane takes of one pass over a stream, rounded up."""
        extents, shares = self.assignment(number)
        if shares is None:
            return -(-extents[0].num_samples // self.num_lanes)
        return extents[lane].num_samples

    def uses(self, number: int) -> bool:
        """Whether a stream has a share in the chapter at any time; without chapters, none has."""
        return self.chapter is not None and self.chapter.uses(number)

    @property
    def used(self) -> list[int]:
        """The streams with a share in the chapter."""
        return list(filter(self.uses, range(len(self.streams))))

    @property
    def choice_slots(self) -> int:
        """Slots of one choice of a stream."""
        sizes = {"device_per_stream": self.lane_turn, "per_stream": self.global_batch_size}
        return sizes.get(self.mixing.batching_method, 1)

    def streams_in(self, queue: int) -> Sequence[int]:
        """Return the numbers of the streams in a queue."""
        return range(len(self.streams)) if self.is_mixed else [queue]

    def drawn_in(self, queue: int) -> Sequence[int]:
        """Return the streams that a queue draws: another one in `streams` changes no pack."""
        if not self.is_mixed:
            return [queue]
        return range(len(self.streams)) if self.chapter is None else self.used

    def assignment(self, number: int) -> tuple[list[Extents], Int64Array | None]:
        """Return the extents of a stream in each lane, and the part of it that each lane has.

        Parts are in the quota's unit or proportional to it, shape (num_lanes,). Of a stream that
        all lanes share, return all extents, and None.
        """
        key = "assignment", number
        if key not in self.found:
            self.found[key] = self._assign(number)
        assigned: tuple[list[Extents], Int64Array | None] = self.found[key]
        return assigned

    def _assign(self, number: int) -> tuple[list[Extents], Int64Array | None]:
        stream = self.streams[number]
        samples = np.diff(stream.first_sample)
        is_small = stream.num_samples < MIN_SAMPLES_PER_LANE * self.num_lanes
        is_shared = is_small and self.num_lanes > 1
        num_parts = 1 if is_shared else self.num_lanes
        seed_path = (self.keys[number],)
        extents = assign_to_lanes(samples, stream.raw_bytes, num_parts, self.order_seed, seed_path)
        if is_shared:
            return extents, None
        if stream.quota.unit == "samples":
            return extents, np.array(list(map(attrgetter("num_samples"), extents)))
        # Bytes approximate tokens, with or without length files; sample counts would not.
        held = [each.num_bytes(samples, stream.raw_bytes) for each in extents]
        if self.is_mixed and max(held) - min(held) <= max(held) // EQUAL_PART:
            # Cuts are between samples. No lane begins a second pass earlier for that.
            held = [1] * num_parts
        return extents, np.maximum(held, [min(each.num_samples, 1) for each in extents])
