"""An endless sequence of passes through one lane's part of a stream, shuffled by shards and blocks.

One pass over four shards with shuffle_block_size=5::

    shards, shuffled     [c c c][a a a][d d d][b b b]
    blocks               |c c c a a|a d d d b|b b|
    shuffled in blocks    a c c a c b d a d d b b

Only a block's shards are in flight at once, and only one block is ever held: start-up and memory do
not grow with the stream. Element i of the sequence is a pure function of (seed, stream, lane, pass,
i), so a position in it is one integer.

Cost: about 30 ns a sample. Memory: one block, 16 bytes a sample, and in each thread that shuffles
some 28 bytes a sample of the largest block it met.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from streampack.compiled import compiled
from streampack.order.lanes import Extents
from streampack.order.permute import Scratch, shuffle_rows
from streampack.rng import permutation
from streampack.types import Int64Array, IntArray

__all__ = ["Lengths", "Passes", "Taken"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Taken:
    """Elements of a sequence of passes, in order."""

    passes: Int64Array
    """Which time through the stream, shape (n,)."""
    samples: Int64Array
    """Which sample of the stream, shape (n,)."""
    lengths: Int64Array
    """Its tokens, shape (n,)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    number: int
    """Counted over all passes."""
    passes: int
    """Which pass it belongs to."""
    first: int
    """Its first element, counted over all passes."""
    rows: Int64Array
    """Sample and tokens of each element, shape (n, 2)."""

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.first + len(self.rows)

    @property
    def lengths(self) -> Int64Array:
        """Tokens of each element, shape (n,)."""
        return self.rows[:, LENGTHS]


SAMPLES, LENGTHS = range(2)
_scratches = threading.local()


def _scratch(length: int) -> Scratch:
    """Return this thread's scratch for at least `length` rows."""
    scratch: Scratch | None = getattr(_scratches, "kept", None)
    if scratch is None or scratch.length < length:
        scratch = _scratches.kept = Scratch(length)
    return scratch


@compiled
def _put_rows(
    rows: Int64Array,
    places: Int64Array,
    taken: Int64Array,
    begin: int,
    number: int,
    passes: int,
) -> None:
    """Write stream, pass and rows begin, begin + 1, ... of `taken` to some places in `rows`."""
    for turn in range(len(places)):
        place = places[turn]
        rows[place, 0], rows[place, 1] = number, passes
        rows[place, 2] = taken[begin + turn, 0]
        rows[place, 3] = taken[begin + turn, 1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lengths:
    """What is known of the lengths of a stream's samples."""

    first_sample: Int64Array
    """The first sample of each shard, and the end, shape (num_shards + 1,)."""
    of_shard: Callable[[int], IntArray]
    """Tokens of each sample of a shard; called when a block reaches the shard."""
    weigh: Callable[[Int64Array], Int64Array] | None = None
    """What samples of these lengths count where tokens are counted; None: their lengths."""
    shard_tokens: Int64Array | None = None
    """What the samples of each shard count together, shape (num_shards,); None: their lengths must
    tell."""


class Passes:
    """Passes 0, 1, 2, ... through some extents of a stream, as one endless sequence.

    Args:
        extents: What a pass goes through; at least one sample.
        lengths: The lengths of the stream's samples.
        block_size: Samples that are shuffled together.
        seed: Negative: stored order in every pass.
        place: Which stream and lane this is, for the seed.
    """

    def __init__(
        self,
        extents: Extents,
        lengths: Lengths,
        *,
        block_size: int,
        seed: int,
        place: tuple[int | str, ...],
    ) -> None:
        self.num_samples = extents.num_samples
        self._extents = extents
        self._first_sample = lengths.first_sample
        self._lengths_of = lengths.of_shard
        self._block_size = min(block_size, self.num_samples)
        self._blocks_per_pass = -(-self.num_samples // self._block_size)
        self._seed = seed
        self._place = place
        self._weigh = lengths.weigh or (lambda lengths: lengths)
        self._shard_tokens = lengths.shard_tokens
        self._block: _Block | None = None
        self._room: Int64Array | None = None
        self._pass_order: tuple[int, Extents] | None = None
        self._pass_tokens: int | None = None

    def take(self, cursor: int, count: int) -> Taken:
        """Return elements `cursor` to `cursor` + `count` - 1 of the sequence."""
        passes, samples, lengths = np.empty((3, max(count, 0)), np.int64)
        taken = Taken(passes=passes, samples=samples, lengths=lengths)
        at, stop = cursor, cursor + count
        while at < stop:
            block = self._block_at(at)
            end = min(stop, block.stop)
            part = slice(at - cursor, end - cursor)
            rows = block.rows[at - block.first : end - block.first]
            taken.passes[part] = block.passes
            taken.samples[part], taken.lengths[part] = rows[:, SAMPLES], rows[:, LENGTHS]
            at = end
        return taken

    def put(self, cursor: int, rows: Int64Array, places: Int64Array, number: int) -> None:
        """Write elements `cursor`, `cursor` + 1, ... to rows of stream, pass, sample and tokens.

        Args:
            cursor: The first element.
            rows: Where to, shape (n, 4).
            places: Which rows, one for each element.
            number: What to write as the stream.
        """
        while len(places):
            block = self._block_at(cursor)
            here = places[: block.stop - cursor]
            _put_rows(rows, here, block.rows, cursor - block.first, number, block.passes)
            places = places[len(here) :]
            cursor += len(here)

    def block_of(self, cursor: int) -> int:
        """Return the number of the block that holds an element, counted over all passes."""
        return self._place_of(cursor)[0]

    def shards_in(self, number: int) -> Int64Array:
        """Return the shards of a block in the order in which it goes through them, shape (n,)."""
        return self._extents_of(number).shards

    def most_bytes(self, shard_bytes: Int64Array, lookahead: int) -> int:
        """Return what the shards take at most that are needed at once, in whichever pass.

        Args:
            shard_bytes: Bytes of each shard of the stream, shape (num_shards,).
            lookahead: Samples that are planned and not yet delivered, beside two blocks.
        """
        window = 2 * self._block_size + lookahead
        num_bytes = shard_bytes[self._extents.shards]
        if window >= self.num_samples:
            return int(num_bytes.sum())
        # Whole shards inside the window, the heaviest first, and one that is cut at each end.
        counts = self._extents.counts
        order = np.argsort(-(num_bytes / counts), kind="stable")
        starts = np.cumsum(counts[order]) - counts[order]
        inside = num_bytes[order][starts < window].sum()
        return int(min(inside + 2 * num_bytes.max(), num_bytes.sum()))

    def find_tokens(self, tokens: int) -> tuple[int, int]:
        """Find the first element that starts at or after `tokens` tokens of the sequence.

        Asks for the lengths of the block that it lies in, and for those of shards that are cut.
        Where only lengths can tell what a shard counts, for those of all that lies before it, too,
        or of a whole pass.

        Returns:
            The element's cursor, and the tokens before it.
        """
        if tokens <= 0:
            return 0, 0
        if self._pass_tokens is None:
            cursor, before = self._find_in_pass(0, tokens)
            if before >= tokens:
                return cursor, before
        in_pass = self.tokens_in_pass()
        if not in_pass:
            return 0, 0  # every sample counts nothing, so there is no such place
        # What starts where a pass ends may still be of that pass: samples that count nothing.
        passes, rest = divmod(tokens - 1, in_pass)
        cursor, before = self._find_in_pass(passes, rest + 1)
        return passes * self.num_samples + cursor, passes * in_pass + before

    def _find_in_pass(self, passes: int, tokens: int) -> tuple[int, int]:
        """Find the first element of a pass that starts at or after `tokens`, or its end.

        Returns:
            How many elements of the pass lie before it, and their tokens.
        """
        block, before = self._block_near(passes, tokens)
        while block < self._blocks_per_pass:
            number = passes * self._blocks_per_pass + block
            in_block = self._tokens_in_block(number)
            if tokens <= before + in_block:
                weights = self._weigh(self._load(number).lengths)
                starts = before + np.cumsum(weights) - weights
                inside = int(np.searchsorted(starts, tokens, side="left"))
                at = block * self._block_size + inside
                return at, before + int(weights[:inside].sum())
            block += 1
            before += in_block
        self._pass_tokens = before
        return self.num_samples, before

    def _block_near(self, passes: int, tokens: int) -> tuple[int, int]:
        """Return a block of a pass, none after the one that holds a token, and what lies before."""
        if self._shard_tokens is None:
            return 0, 0
        order = self._order_of(passes)
        stops = np.cumsum(self._tokens_of_parts(order))
        part = int(np.searchsorted(stops, tokens, side="left"))
        first = int(order.counts[:part].sum())
        block = min(first, self.num_samples - 1) // self._block_size
        return block, self._tokens_in(order.between(0, block * self._block_size))

    def tokens_in_pass(self) -> int:
        """Return the tokens of one pass; the first call may ask for every shard's lengths."""
        if self._pass_tokens is None:
            self._pass_tokens = self._tokens_in(self._extents)
        return self._pass_tokens

    def tokens_between(self, first: int, last: int) -> int:
        """Return the tokens of elements `first` to `last` - 1, whole passes by their total."""
        whole = max(last // self.num_samples - -(-first // self.num_samples), 0)
        if whole:
            tokens = whole * self.tokens_in_pass()
            head_stop = -(-first // self.num_samples) * self.num_samples
            tail_start = last // self.num_samples * self.num_samples
            return (
                tokens
                + self.tokens_between(first, head_stop)
                + self.tokens_between(tail_start, last)
            )
        tokens = 0
        while first < last:
            number, start, size = self._place_of(first)
            stop = min(last, start + size)
            if first == start and stop == start + size:
                tokens += self._tokens_in_block(number)
            else:
                lengths = self._load(number).lengths[first - start : stop - start]
                tokens += int(self._weigh(lengths).sum())
            first = stop
        return tokens

    def _place_of(self, cursor: int) -> tuple[int, int, int]:
        """Return the number of the block that holds an element, its first element, and its size."""
        passes, inside = divmod(cursor, self.num_samples)
        block = inside // self._block_size
        start = block * self._block_size
        size = min(self._block_size, self.num_samples - start)
        return passes * self._blocks_per_pass + block, passes * self.num_samples + start, size

    def _block_at(self, cursor: int) -> _Block:
        block = self._block
        if block is not None and block.first <= cursor < block.stop:
            return block
        return self._load(self._place_of(cursor)[0])

    def _extents_of(self, number: int) -> Extents:
        passes, block = divmod(number, self._blocks_per_pass)
        start = block * self._block_size
        return self._order_of(passes).between(start, start + self._block_size)

    def _order_of(self, passes: int) -> Extents:
        if self._seed < 0:
            return self._extents
        if self._pass_order is None or self._pass_order[0] != passes:
            order = permutation(
                len(self._extents.shards), self._seed, "shards", *self._place, passes
            )
            self._pass_order = (passes, self._extents.take(order))
        return self._pass_order[1]

    def _tokens_in(self, extents: Extents) -> int:
        return int(self._tokens_of_parts(extents).sum())

    def _tokens_of_parts(self, extents: Extents) -> Int64Array:
        """Return what each part counts, shape (num_parts,)."""
        tokens = np.zeros(len(extents.shards), np.int64)
        unknown = np.arange(len(tokens))
        if self._shard_tokens is not None:
            tokens = self._shard_tokens[extents.shards]
            sizes = self._first_sample[extents.shards + 1] - self._first_sample[extents.shards]
            unknown = np.flatnonzero(extents.counts < sizes)
        lengths = self._lengths_in(extents.take(unknown))
        tokens[unknown] = [int(self._weigh(own).sum()) for own in lengths]
        return tokens

    def _lengths_in(self, extents: Extents) -> Iterator[Int64Array]:
        parts = zip(
            extents.shards.tolist(), extents.firsts.tolist(), extents.counts.tolist(), strict=True
        )
        for shard, first, count in parts:
            lengths = self._lengths_of(shard)[first : first + count]
            yield lengths.astype(np.int64, copy=False)

    def _tokens_in_block(self, number: int) -> int:
        return self._tokens_in(self._extents_of(number))

    def _load(self, number: int) -> _Block:
        if self._block is not None and self._block.number == number:
            return self._block
        extents = self._extents_of(number)
        passes, block = divmod(number, self._blocks_per_pass)
        length = extents.num_samples
        if self._room is None:
            self._room = np.empty((self._block_size, 2), np.int64)
        rows = self._room[:length]
        # The room is written anew, so no block is ever handed out, only copies of its rows.
        self._block = None
        if self._seed < 0:
            self._fill(rows, extents)
        else:
            scratch = _scratch(self._block_size)
            self._fill(scratch.rows[:length], extents)
            place = ("block", *self._place, passes, block)
            shuffle_rows(length, scratch, rows, self._seed, *place)
        first = passes * self.num_samples + block * self._block_size
        self._block = _Block(number=number, passes=passes, first=first, rows=rows)
        return self._block

    def _fill(self, rows: Int64Array, extents: Extents) -> None:
        """Write sample and tokens of each element in the order of the extents."""
        starts = self._first_sample[extents.shards] + extents.firsts
        at = 0
        for start, lengths in zip(starts.tolist(), self._lengths_in(extents), strict=True):
            end = at + len(lengths)
            rows[at:end, SAMPLES] = np.arange(start, start + len(lengths))
            rows[at:end, LENGTHS] = lengths
            at = end
