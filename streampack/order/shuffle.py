"""An endless sequence of passes over one lane's part of a stream, shuffled by shards and blocks.

One pass over four shards with shuffle_block_size=5::

    shards, shuffled     [c c c][a a a][d d d][b b b]
    blocks               |c c c a a|a d d d b|b b|
    shuffled in blocks    a c c a c b d a d d b b

Only one block is in memory at a time, and only its shards are in use. Start-up time and memory do
not grow with the stream. Element i is a pure function of (seed, stream, lane, pass, i), so a
position is a single integer.

Cost: about 30 ns a sample. Memory: 16 bytes per sample of one block. Each shuffling thread also
keeps about 28 bytes per sample of the largest block it has seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from streampack._numba import compiled
from streampack.order.lanes import Extents
from streampack.rng import (
    MAX_SMALL,
    SortScratch,
    permutation,
    random_keys,
    shuffle_blocks,
    shuffle_rows,
)
from streampack.types import TOKENS, Int64Array, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    passes: int
    """The pass that contains the block."""
    first: int
    """Its first element, counted over all passes."""
    rows: Int64Array
    """Sample and tokens of each element, shape (n, 2)."""


SAMPLES, LENGTHS = range(2)
STRETCH = 4096  # approximate number of elements processed together if blocks are small
NO_KEYS = np.zeros((0, 2), np.uint64)
_scratches = threading.local()


def _scratch(length: int) -> SortScratch:
    scratch: SortScratch | None = getattr(_scratches, "kept", None)
    if scratch is None or scratch.length < length:
        scratch = _scratches.kept = SortScratch(length)
    return scratch


@compiled
def _put_rows(
    rows: Int64Array,
    places: Int64Array,
    taken: Int64Array,
    begin: int,
    step: int,
    number: int,
    passes: int,
) -> None:
    """Write stream, pass, and rows begin, begin + step, ... of `taken` to `places` in `rows`."""
    for i in range(len(places)):
        place, at = places[i], begin + i * step
        rows[place, 0], rows[place, 1] = number, passes
        rows[place, 2], rows[place, 3] = taken[at, 0], taken[at, 1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lengths:
    """The lengths of a stream's samples, loaded by shard."""

    first_sample: Int64Array
    """First sample of each shard, followed by the end, shape (num_shards + 1,)."""
    of_shard: Callable[[int], IntArray]
    """Return the tokens of each sample of a shard. Called when a block reaches the shard."""
    weigh: Callable[[Int64Array], Int64Array] | None = None
    """Map lengths to the tokens that count towards quotas. None: the lengths themselves."""
    shard_tokens: Int64Array | None = None
    """Counted tokens of each shard, shape (num_shards,). None: computed from the lengths."""
    is_fetched: bool = False
    """Whether loading the lengths of a shard fetches it."""


class Passes:
    """Passes 0, 1, 2, ... over some extents of a stream, as one endless sequence.

    Its elements are rows (stream, pass, sample, tokens), of which the first is `number`. Without a
    sample in the extents it has none. `block_size` samples are shuffled together. A negative seed
    keeps the stored order in every pass. `seed_path` identifies the stream and lane.
    """

    def __init__(
        self,
        extents: Extents,
        lengths: Lengths,
        *,
        number: int,
        block_size: int,
        seed: int,
        seed_path: tuple[int | str, ...],
    ) -> None:
        self._number = number
        self.num_samples = extents.num_samples
        self._extents = extents
        self._first_sample = lengths.first_sample
        self._lengths_of = lengths.of_shard
        self._block_size = max(min(block_size, self.num_samples), 1)
        self._blocks_per_pass = -(-self.num_samples // self._block_size)
        self._seed = seed
        self._seed_path = seed_path
        self._weigh = lengths.weigh or (lambda lengths: lengths)
        self._shard_tokens = lengths.shard_tokens
        # Small blocks are made several at a time, which would fetch the shards of all of them.
        self._is_small = self._block_size <= MAX_SMALL and not lengths.is_fetched
        self._stored: Int64Array | None = None
        self._block: _Block | None = None
        self._room: Int64Array | None = None
        self._pass_order: tuple[int, Extents] | None = None
        self._pass_tokens: int | None = None

    def take(self, cursor: int, count: int) -> Int64Array:
        """Return elements `cursor`, `cursor` + 1, ..., shape (count, 4)."""
        rows = np.empty((count, 4), np.int64)
        self.put(cursor, rows, np.arange(count))
        return rows

    def put(self, cursor: int, rows: Int64Array, places: Int64Array, step: int = 1) -> None:
        """Write elements `cursor`, `cursor` + `step`, ... to `places` in `rows`, shape (n, 4)."""
        if self._is_small and len(places):
            self._put_small(cursor + step * np.arange(len(places)), rows, places)
            return
        while len(places):
            block = self._block_at(cursor)
            begin = cursor - block.first
            in_block = places[: -(-(len(block.rows) - begin) // step)]
            _put_rows(rows, in_block, block.rows, begin, step, self._number, block.passes)
            places = places[len(in_block) :]
            cursor += step * len(in_block)

    def _put_small(self, cursors: Int64Array, rows: Int64Array, places: Int64Array) -> None:
        """Write elements at ascending cursors, which are in small blocks, with few kernel calls."""
        passes, inside = np.divmod(cursors, self.num_samples)
        blocks, in_block = np.divmod(inside, self._block_size)
        taken = np.empty((len(cursors), 2), np.int64)
        # Either passes are as small as blocks, or each has enough blocks to be worth a call.
        cuts = np.flatnonzero(np.diff(passes)) + 1
        if self.num_samples <= MAX_SMALL:
            cuts = cuts[:0]
        for part in np.split(np.arange(len(cursors)), cuts):
            numbers = passes[part] * self._blocks_per_pass + blocks[part]
            firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
            of_block = np.repeat(np.arange(len(firsts)), np.diff(firsts, append=len(part)))
            shuffled = self._small_blocks(passes[part][firsts], blocks[part][firsts])
            taken[part] = shuffled[of_block, in_block[part]]
        rows[places, 0], rows[places, 1], rows[places, 2:] = self._number, passes, taken

    def _small_blocks(self, passes: Int64Array, blocks: Int64Array) -> Int64Array:
        """Return the rows of blocks that belong to one pass, or to small passes; (n, size, 2)."""
        part_keys = block_keys = NO_KEYS
        if self.num_samples <= MAX_SMALL:
            if self._stored is None:
                self._stored = self._fill(None, self._extents)
            stored, in_stored = self._stored, blocks
            stops = np.cumsum(self._extents.counts)
            if self._seed >= 0 and len(stops) > 1:
                part_keys = random_keys(
                    map(str, passes.tolist()), self._seed, "shards", *self._seed_path
                )
        else:
            begin, end = (int(block) * self._block_size for block in (blocks[0], blocks[-1] + 1))
            stored = self._fill(None, self._order_of(int(passes[0])).between(begin, end))
            in_stored, stops = blocks - blocks[0], np.array([len(stored)])
        if self._seed >= 0 and self._block_size > 1:
            both = zip(passes.tolist(), blocks.tolist(), strict=True)
            ends = (f"{number}, {block}" for number, block in both)
            block_keys = random_keys(ends, self._seed, "block", *self._seed_path)
        return shuffle_blocks(in_stored, stored, stops, part_keys, block_keys, self._block_size)

    def block_of(self, cursor: int) -> int:
        """Return the number of the block of an element, counted over all passes."""
        passes, inside = divmod(cursor, self.num_samples)
        return passes * self._blocks_per_pass + inside // self._block_size

    def shards_in(self, number: int) -> Int64Array:
        """Return the shards of a block in the order in which the block reads them, shape (n,)."""
        passes, block = divmod(number, self._blocks_per_pass)
        start = block * self._block_size
        return self._order_of(passes).between(start, start + self._block_size).shards

    def most_bytes(self, shard_bytes: Int64Array, lookahead: int) -> int:
        """Return an upper bound on the bytes of shards needed at the same time, in any pass.

        `lookahead` is the number of samples planned but not delivered, in addition to two blocks.
        """
        reach = 2 * self._block_size + lookahead
        num_bytes = shard_bytes[self._extents.shards]
        if reach >= self.num_samples:
            return int(num_bytes.sum())
        # Whole shards within reach, largest bytes per sample first, and a cut one at each end.
        counts = self._extents.counts
        order = np.argsort(-(num_bytes / counts), kind="stable")
        starts = np.cumsum(counts[order]) - counts[order]
        inside = num_bytes[order][starts < reach].sum()
        return int(min(inside + 2 * num_bytes.max(), num_bytes.sum()))

    def find_tokens(self, tokens: int) -> tuple[int, int]:
        """Return the first element that starts at or after `tokens`, and the tokens before it.

        Loads the lengths of the block that contains it, and of shards that are cut. Without
        `shard_tokens` it also loads the lengths of everything before, or of a whole pass.
        """
        if tokens <= 0:
            return 0, 0
        if self._pass_tokens is None:
            cursor, before = self._find_in_pass(0, tokens)
            if before >= tokens:
                return cursor, before
        in_pass = self.tokens_in_pass()
        if not in_pass:
            return 0, 0  # all samples count 0 tokens, so none starts there
        # Zero-token samples at the end of a pass belong to that pass, not to the next one.
        passes, rest = divmod(tokens - 1, in_pass)
        cursor, before = self._find_in_pass(passes, rest + 1)
        return passes * self.num_samples + cursor, passes * in_pass + before

    def _find_in_pass(self, passes: int, tokens: int) -> tuple[int, int]:
        """Find the first element of a pass that starts at or after `tokens`, or the pass's end.

        Returns the number of elements of the pass before it, and their tokens.
        """
        block, before = self._block_near(passes, tokens)
        begin = block * self._block_size
        stops = np.cumsum(self._order_of(passes).counts)
        while begin < self.num_samples:
            # Search the small blocks of a shard together, without loading another shard's lengths.
            end = min(begin + self._block_size, self.num_samples)
            shard_end = min(int(stops[np.searchsorted(stops, end)]), begin + STRETCH)
            end = max(end, shard_end // self._block_size * self._block_size)
            in_stretch = self._tokens_in(self._order_of(passes).between(begin, end))
            if tokens <= before + in_stretch:
                first = passes * self.num_samples + begin
                weights = self._weigh(self.take(first, end - begin)[:, TOKENS])
                starts = before + np.cumsum(weights) - weights
                inside = int(np.searchsorted(starts, tokens, side="left"))
                return begin + inside, before + int(weights[:inside].sum())
            begin = end
            before += in_stretch
        self._pass_tokens = before
        return self.num_samples, before

    def _block_near(self, passes: int, tokens: int) -> tuple[int, int]:
        """Return a block at or before the one with a token, and the tokens before it."""
        if self._shard_tokens is None:
            return 0, 0
        order = self._order_of(passes)
        stops = np.cumsum(self._tokens_of_parts(order))
        part = int(np.searchsorted(stops, tokens, side="left"))
        first = int(order.counts[:part].sum())
        block = min(first, self.num_samples - 1) // self._block_size
        return block, self._tokens_in(order.between(0, block * self._block_size))

    def tokens_in_pass(self) -> int:
        """Return the tokens of one pass. The first call may load the lengths of every shard."""
        if self._pass_tokens is None:
            self._pass_tokens = self._tokens_in(self._extents)
        return self._pass_tokens

    def tokens_between(self, first: int, last: int) -> int:
        """Return the tokens of elements [first, last). Whole passes use the pass total."""
        tokens = 0
        while first < last:
            passes, inside = divmod(first, self.num_samples)
            if not inside and last - first >= self.num_samples:
                num_passes = (last - first) // self.num_samples
                tokens += num_passes * self.tokens_in_pass()
                first += num_passes * self.num_samples
                continue
            start = inside // self._block_size * self._block_size
            end = min(inside + last - first, self.num_samples)
            # Whole blocks are sums over parts of shards, so their order is irrelevant.
            whole = end if end == self.num_samples else end // self._block_size * self._block_size
            if inside == start and whole > inside:
                stop = whole
                tokens += self._tokens_in(self._order_of(passes).between(inside, stop))
            else:
                stop = min(start + self._block_size, end)
                lengths = self.take(first, stop - inside)[:, TOKENS]
                tokens += int(self._weigh(lengths).sum())
            first += stop - inside
        return tokens

    def _block_at(self, cursor: int) -> _Block:
        """Return the block of an element. The next call may overwrite its rows."""
        block = self._block
        if block is not None and block.first <= cursor < block.first + len(block.rows):
            return block
        passes, inside = divmod(cursor, self.num_samples)
        block_of_pass = inside // self._block_size
        start = block_of_pass * self._block_size
        extents = self._order_of(passes).between(start, start + self._block_size)
        length = extents.num_samples
        if self._room is None:
            self._room = np.empty((self._block_size, 2), np.int64)
        rows = self._room[:length]
        # The buffer is overwritten here: callers only ever get copies of a block's rows.
        self._block = None
        if self._seed < 0:
            self._fill(rows, extents)
        else:
            scratch = _scratch(self._block_size)
            self._fill(scratch.rows[:length], extents)
            seed_path = ("block", *self._seed_path, passes, block_of_pass)
            shuffle_rows(length, scratch, rows, self._seed, *seed_path)
        self._block = _Block(passes=passes, first=cursor - inside + start, rows=rows)
        return self._block

    def _order_of(self, passes: int) -> Extents:
        if self._seed < 0 or len(self._extents.shards) == 1:
            return self._extents
        if self._pass_order is None or self._pass_order[0] != passes:
            order = permutation(
                len(self._extents.shards), self._seed, "shards", *self._seed_path, passes
            )
            self._pass_order = (passes, self._extents.take(order))
        return self._pass_order[1]

    def _tokens_in(self, extents: Extents) -> int:
        return int(self._tokens_of_parts(extents).sum())

    def _tokens_of_parts(self, extents: Extents) -> Int64Array:
        tokens = np.zeros(len(extents.shards), np.int64)
        unknown = np.arange(len(tokens))
        if self._shard_tokens is not None:
            tokens = self._shard_tokens[extents.shards]
            sizes = self._first_sample[extents.shards + 1] - self._first_sample[extents.shards]
            unknown = np.flatnonzero(extents.counts < sizes)
        lengths = self._lengths_in(extents.take(unknown))
        tokens[unknown] = [int(self._weigh(of_part).sum()) for of_part in lengths]
        return tokens

    def _lengths_in(self, extents: Extents) -> Iterator[Int64Array]:
        parts = zip(
            extents.shards.tolist(), extents.firsts.tolist(), extents.counts.tolist(), strict=True
        )
        for shard, first, count in parts:
            lengths = self._lengths_of(shard)[first : first + count]
            yield lengths.astype(np.int64, copy=False)

    def _fill(self, rows: Int64Array | None, extents: Extents) -> Int64Array:
        """Return sample and tokens of each element, in the order of the extents, in `rows`."""
        if rows is None:
            rows = np.empty((extents.num_samples, 2), np.int64)
        starts = self._first_sample[extents.shards] + extents.firsts
        at = 0
        for start, lengths in zip(starts.tolist(), self._lengths_in(extents), strict=True):
            end = at + len(lengths)
            rows[at:end, SAMPLES] = np.arange(start, start + len(lengths))
            rows[at:end, LENGTHS] = lengths
            at = end
        return rows
