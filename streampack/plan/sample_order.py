"""The samples of a lane in the order in which its packers take them.

::

    one stream   a a a a a a ...                     packs that hold one stream
    mixed        a b a a c a ... by samples          packs that hold all streams
                 a b a c a a ... by token deficit

    chapter 0    web 3/4, code 1/4         a a b a  a a b a
    chapter 1    web 1/2, math 1/2                            a c c a    b rests at its third sample
    chapter 2    web 1/2, code 1/2                                       b a b a

`mix/draw.py` explains the draws. No chapter resets the cursors. Where a stream has undelivered
samples of earlier chapters, its first draws take those.

The state is a few integers a stream. Cost: about 30 ns a sample, most of it the shuffle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from streampack.mix.apportion import scaled_shares
from streampack.mix.draw import (
    CHUNK,
    PHASE_LENGTHS,
    TOKEN_SCALE,
    draw_chunk,
    draw_known,
    draw_places,
    first_deficits,
    first_wait,
    lookaheads,
)
from streampack.mix.schedule_kernels import SCALE
from streampack.plan.lane_stream import LaneStream, StreamCursor
from streampack.plan.recipe import Recipe
from streampack.plan.snapshots import Arrivals
from streampack.plan.undelivered import Undelivered
from streampack.types import NO_PACKS, PASS, SAMPLE, STREAM, TOKENS, Int64Array, Packs

LEAST_CHUNK = 32  # samples of one stream that are drawn together in a run, however few there are
UNDELIVERED = -1  # in place of the pass: the row names an undelivered sample by its number

Draws: TypeAlias = tuple[Int64Array, Int64Array]  # of each stream, and their places by stream


class SampleOrder:
    """The samples of a queue of a lane: from one epoch on, or from a run's start.

    With carry, those of later epochs follow. In a run of chapters, `epoch` is 0; it begins with the
    recipe of the first chapter, or of a later one before `restore`.
    """

    def __init__(self, recipe: Recipe, lane: int, queue: int, epoch: int = 0) -> None:
        self._lane = lane
        self.streams = [LaneStream(recipe, number, lane) for number in recipe.streams_in(queue)]
        self._carry = recipe.mixing.epoch_end == "carry" and any(
            stream.is_used for stream in self.streams
        )
        self._queue = queue
        self._means: list[Fraction] = []  # tokens of a sample of each stream
        self._own: tuple[Any, list[Fraction]] = (None, [])  # the last shares, and what they are of
        self._undelivered: Undelivered | None = None  # samples that are drawn before new ones
        self.fraction = Fraction(0)
        """The fraction of the change of shares that is over."""
        self.tokens_left: int | None = None
        """Tokens until draws by tokens stop, or None if they do not."""
        self.start_chapter(recipe)
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        recipe, self._epoch = self._recipe, epoch
        self._cursors = [StreamCursor(stream, recipe, epoch) for stream in self.streams]
        self._chunk = 0
        # What each stream is due: by shares of samples in 1 / SCALE of a draw, else its deficit.
        self._due = np.zeros(len(self._cursors), np.int64)
        by_tokens = recipe.mixing.weight_unit == "tokens"
        self._draw: Callable[[int], Draws]
        if not recipe.is_mixed:
            self._draw = self._draw_one
        elif recipe.chapter is not None:
            self._draw = self._draw_by_shares
        elif by_tokens:
            weights = [stream.stream.chosen_tokens for stream in self.streams]
            scaled, looks = scaled_shares(weights, TOKEN_SCALE), self._looks_of(weights)
            self._own = (None, [Fraction(tokens, max(sum(weights), 1)) for tokens in weights])
            self._draw = partial(self._draw_known, scaled, looks)
        else:
            self._quotas = [cursor.num_samples for cursor in self._cursors]
            self._draw = self._draw_by_quotas

    def start_chapter(self, recipe: Recipe) -> None:
        """Draw with the shares of another chapter from now on."""
        self._recipe = recipe
        self._own = (None, [])
        self._most = recipe.sizes(self._lane, self._queue).chunk
        if recipe.chapter is not None and not recipe.is_mixed:
            # No more than a pass: what is planned at an edge is given back.
            in_pass = recipe.samples_in(self._queue, self._lane)
            self._most = min(self._most, max(in_pass, LEAST_CHUNK))
        if recipe.mixing.weight_unit == "tokens":
            self._chunk = 0  # its first draw begins with deficits of its own

    def undelivered_of(self, segments: Int64Array) -> Undelivered | None:
        """Return the samples of these segments, shape (n, 6), as `give_back` takes them."""
        numbers = [stream.number for stream in self.streams]
        return Undelivered(segments, numbers) if len(segments) else None

    def give_back(self, samples: Undelivered | None) -> None:
        """Draw these samples before any other of their streams."""
        self._undelivered = samples and samples.copy()

    @property
    def undelivered(self) -> Undelivered | None:
        """The samples that are drawn before new ones, as of now."""
        return self._undelivered and self._undelivered.copy()

    def segments_of(self, rows: Int64Array, longest: int) -> Packs:
        """Return the segments of the undelivered samples that rows name, each as a pack.

        None has more than `longest` tokens.
        """
        left = self._undelivered
        return NO_PACKS if left is None else left.of(rows[:, SAMPLE], longest)

    def next(self, most: int = CHUNK) -> Int64Array:
        """Return the next rows (stream, pass, sample, tokens), shape (n, 4); none at the end.

        They are at most `most`. A row of an undelivered sample has the pass `UNDELIVERED`, its
        number instead of the sample's; its length means nothing.
        """
        most = min(most, self._most)
        rows = self._rows(*self._draw(most))
        while self._carry and not len(rows):
            self._begin(self._epoch + 1)
            rows = self._rows(*self._draw(most))
        return rows

    def _rows(self, counts: Int64Array, places: Int64Array) -> Int64Array:
        rows = np.empty((len(places), 4), np.int64)
        first = 0
        for number in np.flatnonzero(counts).tolist():
            last = first + int(counts[number])
            if self._undelivered is not None:
                again = self._undelivered.take(number, last - first)
                ahead = places[first : first + len(again)]
                rows[ahead, STREAM] = self.streams[number].number
                rows[ahead, PASS], rows[ahead, SAMPLE] = UNDELIVERED, again
                first += len(again)
            if first < last:
                self._cursors[number].put(rows, places[first:last])
            first = last
        return rows

    # Draws.

    def _draw_one(self, most: int) -> Draws:
        [cursor] = self._cursors
        # `num_samples` is of cursors that do not count tokens.
        count = len(cursor.peek(most)) if cursor.by_tokens else min(int(self._left()[0]), most)
        return np.array([count]), np.arange(count)

    def _draw_by_quotas(self, _: int) -> Draws:
        """Draw a whole chunk, so that the counts are exact over the epoch."""
        seed_path = (self._epoch, self._lane)
        seed, size = self._recipe.order.seed, self._most
        drawn = draw_chunk(self._quotas, self._chunk, seed, seed_path, size)
        self._chunk += 1
        return drawn

    def _draw_known(self, shares: Int64Array, looks: Sequence[int], most: int) -> Draws:
        """Draw by running token deficit; streams that end give way to the others."""
        self._begin_draws(shares)
        # One sample further than is drawn tells whether the stream ends there.
        known = [
            self._lengths(number, look + 1 if share else 0)
            for number, (look, share) in enumerate(zip(looks, shares.tolist(), strict=True))
        ]
        num_known = np.array(list(map(len, known)))
        lengths = [own[:look] for own, look in zip(known, looks, strict=True)]
        counts, places, self.tokens_left = draw_known(
            shares * (num_known > 0),
            self._due,
            lengths,
            num_known <= looks,
            most,
            self.tokens_left,
        )
        return counts, places

    def _begin_draws(self, shares: Int64Array) -> None:
        """Set the deficits with which the epoch or chapter begins, at its first draw by tokens."""
        if self._chunk:
            return
        recipe, self._chunk = self._recipe, 1
        whole = max(int(shares.sum()), 1)
        part = recipe.chapter.number if recipe.chapter else self._epoch
        waits = []
        for number, (stream, share) in enumerate(zip(self.streams, shares.tolist(), strict=True)):
            most = min(PHASE_LENGTHS, recipe.longest_look(stream.number))
            most = min(most, recipe.samples_in(stream.number, self._lane))
            lengths = self._lengths(number, most if share else 0)
            seed_path = (part, recipe.keys[stream.number])
            # The last sample of the epoch before may extend into this one.
            rest = self._cursors[number].rest
            place = (self._lane, recipe.order.seed, seed_path)
            waits.append(rest or first_wait(lengths, share / whole, *place))
        self._due = first_deficits(shares, waits)

    def _draw_by_shares(self, most: int) -> Draws:
        shares = self._shares()
        if not any(shares):
            return np.zeros(len(shares), np.int64), np.zeros(0, np.int64)
        if self._recipe.mixing.weight_unit == "samples":
            counts, seed_path = self._count(shares, most), ("run", self._lane)
            places = draw_places(counts, self._chunk, self._recipe.order.seed, seed_path)
            self._chunk += 1
            return counts, places
        scaled = np.array([int(share * TOKEN_SCALE) for share in shares])
        return self._draw_known(scaled, self._looks_of([float(share) for share in shares]), most)

    def _looks_of(self, weights: Sequence[float]) -> list[int]:
        looks = lookaheads(weights, self._sizes())
        pairs = zip(looks, self.streams, strict=True)
        return [min(look, self._recipe.longest_look(stream.number)) for look, stream in pairs]

    def _sizes(self) -> list[tuple[int, int]]:
        return [(own.stream.num_samples, own.stream.num_tokens) for own in self.streams]

    def _lengths(self, number: int, look: int) -> Int64Array:
        """Return the tokens of the next samples of a stream, up to `look`, shape (n,)."""
        again = np.zeros(0, np.int64)
        if self._undelivered is not None:
            again = self._undelivered.lengths(number, look)
        taken = self._cursors[number].peek(look - len(again))
        lengths: Int64Array = np.append(again, self._recipe.weigh(taken[:, TOKENS]))
        return lengths

    # Shares of a chapter.

    def tokens_per_draw(self) -> Fraction:
        """Return the expected tokens of a draw at this fraction of the chapter; at least 1."""
        if not self._means:
            self._means = [Fraction(max(tokens, 1), samples) for samples, tokens in self._sizes()]
        pairs = [pair for pair in zip(self._shares(), self._means, strict=True) if pair[0]]
        if self._recipe.mixing.weight_unit == "samples":
            mean = sum((share * mean for share, mean in pairs), Fraction(0))
        else:
            mean = 1 / (sum((share / mean for share, mean in pairs), Fraction(0)) or Fraction(1))
        return max(mean, Fraction(1))

    def _shares(self) -> list[Fraction]:
        """Return the shares of the streams that have samples left in this lane; they sum to 1.

        All are 0 at the end of a run.
        """
        chapter, left = self._recipe.chapter, (self._left() > 0).tolist()
        if chapter is None or self._own[0] == (self.fraction, left):
            return self._own[1]
        shares = chapter.shares_at(self.fraction)
        pairs = zip(shares, left, strict=True)
        own = [share if any_left else Fraction(0) for share, any_left in pairs]
        if own != shares:  # all together are 1, and fractions are slow
            whole = sum(own, Fraction(0))
            own = [share / whole for share in own] if whole else own
        self._own = (self.fraction, left), own
        return own

    def _left(self) -> Int64Array:
        """Return the samples of each stream that may still be drawn, shape (num_streams,)."""
        left = np.array([cursor.num_samples for cursor in self._cursors])
        return left if self._undelivered is None else left + self._undelivered.counts

    def _count(self, shares: Sequence[Fraction], most: int) -> Int64Array:
        """Return how often each stream is drawn in the next chunk, shape (num_streams,)."""
        active = [number for number, share in enumerate(shares) if share]
        # Integers, since fractions are slow.
        due = [
            above * most * SCALE // below for above, below in map(Fraction.as_integer_ratio, shares)
        ]
        due[active[0]] += most * SCALE - sum(due)
        self._due += np.array(due)
        counts = np.zeros(len(shares), np.int64)
        counts[active] = np.maximum(self._due[active] // SCALE, 0)
        while missing := most - int(counts.sum()):
            rest = self._due - counts * SCALE
            if missing > 0:
                counts[max(active, key=rest.__getitem__)] += 1
            else:
                counts[min(np.flatnonzero(counts).tolist(), key=rest.__getitem__)] -= 1
        counts = np.minimum(counts, self._left())  # fewer only at the end of a run
        self._due -= counts * SCALE
        return counts

    # State.

    def blocks(self, state: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return the shuffle blocks in use at a `state`, first and last, of unfinished streams.

        In a run of chapters, of those with a share.
        """
        recipe, at = self._recipe, Arrivals.read(state)
        found = {
            part.lane_stream.number: part.blocks_at(cursor, offset)
            for part, cursor, offset in zip(self._cursors, at.cursors, at.offsets, strict=True)
        }
        return {
            stream: blocks
            for stream, blocks in found.items()
            if blocks is not None and (recipe.chapter is None or recipe.uses(stream))
        }

    def state(self) -> list[int]:
        """Return the positions of the samples; see `Arrivals`."""
        at = [cursor.at or cursor.locate() for cursor in self._cursors]
        cursors, offsets = map(list, zip(*at, strict=True))
        return Arrivals(self._epoch, self._chunk, self._due.tolist(), cursors, offsets).as_list()

    def restore(self, state: Sequence[int]) -> None:
        """Resume from a saved `state`."""
        saved = Arrivals.read(state)
        self._begin(saved.epoch)
        self._chunk, self._due = saved.chunk, np.array(saved.dues, np.int64)
        for part, *at in zip(self._cursors, saved.cursors, saved.offsets, strict=True):
            part.go_to(*at)
