"""The samples of a lane in a run of chapters: cursors that no chapter resets.

::

    chapter 0    web 3/4, code 1/4         a a b a  a a b a
    chapter 1    web 1/2, math 1/2                            a c c a    b rests at its third sample
    chapter 2    web 1/2, code 1/2                                       b a b a

By samples, each block of at most 4,096 draws takes every stream as often as the running integral of
its share requires, in shuffled order. By tokens, the running deficit decides, as in `mix/draw.py`.
Where a stream has undelivered samples of earlier chapters, its first draws take those.

Cost: about 30 ns a sample, most of it the shuffle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from streampack.mix.draw import CHUNK, TOKEN_SCALE, draw_known, draw_places, lookaheads
from streampack.mix.schedule_kernels import SCALE
from streampack.plan.lane_stream import MAX_CURSOR, LaneStream
from streampack.plan.recipe import Recipe
from streampack.plan.sample_order import Blocks
from streampack.plan.undelivered import Undelivered
from streampack.types import SAMPLE, TOKENS, Int64Array

YIELD_SCALE = 1 << 16
LEAST_CHUNK = 32  # samples of one stream that are drawn together, however few there are
UNDELIVERED = -1  # in place of the pass: the row names an undelivered sample by its number


class RunSamples:
    """The samples of one queue of a lane, from the run's start on.

    It begins with the recipe of the run's first chapter, or of a later one before `restore`.
    """

    def __init__(self, recipe: Recipe, lane: int, queue: int) -> None:
        numbers = recipe.streams_in(queue)
        self._lane = lane
        self.streams = [LaneStream(recipe, number, lane) for number in numbers]
        self._cursors = np.zeros(len(self.streams), np.int64)
        # By samples: what each stream is due, in 1 / SCALE of a draw. By tokens: deficits.
        self._due = np.zeros(len(self.streams), np.int64)
        self._most = np.array([stream.most_samples for stream in self.streams])
        # Of one stream, no more than a pass: what is planned at an edge is given back together.
        in_pass = recipe.samples_in(numbers[0], lane)
        self._chunk_size = CHUNK if recipe.is_mixed else min(CHUNK, max(in_pass, LEAST_CHUNK))
        self._chunk = 0
        self._yielded = 0  # draws that went to other streams, in 1 / YIELD_SCALE
        self.undelivered = Undelivered(streams=numbers)
        """Samples that are drawn before new ones."""
        self.ran_out = False
        """Whether a stream gave its last sample just now, so that others take its place."""
        self.fraction = Fraction(0)
        """The fraction of the change of shares that is over."""
        self.turn(recipe)

    def turn(self, recipe: Recipe) -> None:
        """Draw with the shares of another chapter from now on."""
        self._recipe = recipe
        self._fixed: list[Fraction] | None = None
        self._exhausted = Fraction(0)  # the share of streams that give way to others

    def give_back(self, segments: Int64Array) -> None:
        """Draw the samples of these segments, shape (n, 6), before any other of their streams."""
        numbers = [stream.number for stream in self.streams]
        self.undelivered = Undelivered(segments, numbers)

    def next(self, most: int = CHUNK) -> Int64Array:
        """Return the next rows (stream, pass, sample, tokens), shape (n, 4); none at the end.

        They are at most `most`. A row of an undelivered sample has the pass `UNDELIVERED`, and its
        number instead of the sample's.
        """
        most, had = min(most, self._chunk_size), self._left() > 0
        if not self._recipe.is_mixed:  # of one stream; not where others may be listed later
            counts = np.minimum(self._left(), most)
            places = np.arange(counts[0])
        elif not any(shares := self._shares()):
            counts, places = np.zeros(len(self.streams), np.int64), np.zeros(0, np.int64)
        elif self._recipe.mixing.weight_unit == "samples":
            counts = self._count(shares, most)
            seed_path = ("run", self._lane)
            places = draw_places(counts, self._chunk, self._recipe.order.seed, seed_path)
            self._chunk += 1
        else:
            counts, places = self._draw_by_tokens(shares, most)
        self._yielded += int(counts.sum() * self._exhausted * YIELD_SCALE)
        rows = np.empty((int(counts.sum()), 4), np.int64)
        first = 0
        for number in np.flatnonzero(counts).tolist():
            last = first + int(counts[number])
            again = self.undelivered.take(number, last - first)
            if len(again):
                ahead = places[first : first + len(again)]
                rows[ahead] = [self.streams[number].number, UNDELIVERED, 0, 0]
                rows[ahead, SAMPLE] = again
                first += len(again)
            self.streams[number].put(int(self._cursors[number]), rows, places[first:last])
            self._cursors[number] += last - first
            first = last
        self.ran_out = bool((had & (self._left() == 0)).any())
        return rows

    def tokens_per_draw(self) -> Fraction:
        """Return the expected tokens of a draw at this fraction of the chapter; at least 1."""
        shares = self._shares()
        means = [
            Fraction(max(lane.stream.num_tokens, 1), lane.stream.num_samples)
            for lane in self.streams
        ]
        pairs = [pair for pair in zip(shares, means, strict=True) if pair[0]]
        if self._recipe.mixing.weight_unit == "samples":
            mean = sum((share * mean for share, mean in pairs), Fraction(0))
        else:
            mean = 1 / (sum((share / mean for share, mean in pairs), Fraction(0)) or Fraction(1))
        return max(mean, Fraction(1))

    def _shares(self) -> list[Fraction]:
        """Return the shares of the streams that have samples in this lane; they sum to 1."""
        if self._fixed is not None:
            return self._fixed
        chapter = self._recipe.chapter
        shares = chapter.shares_at(self.fraction) if chapter else []
        pairs = zip(self.streams, shares, strict=True)
        here = [Fraction(0) if stream.is_empty else share for stream, share in pairs]
        own = [
            share if left else Fraction(0) for share, left in zip(here, self._left(), strict=True)
        ]
        ends = [
            number
            for number, (share, left) in enumerate(zip(here, own, strict=True))
            if share and not left and self._ends(number)
        ]
        if ends:
            return [Fraction(0)] * len(own)
        whole = sum(own, Fraction(0))
        self._exhausted = sum(here, Fraction(0)) - whole
        own = [share / whole for share in own] if whole else own
        if chapter and chapter.begin == chapter.end and (self._most == MAX_CURSOR).all():
            self._fixed = own
        return own

    def _ends(self, number: int) -> bool:
        """Whether nothing is drawn after a stream."""
        is_error = self._recipe.streams[number].on_exhausted == "error"
        return is_error or self._recipe.ends_with(number)

    def _left(self) -> Int64Array:
        """Return the samples of each stream that may still be drawn, shape (num_streams,)."""
        return np.maximum(self._most - self._cursors, 0) + self.undelivered.counts

    def _count(self, shares: Sequence[Fraction], most: int) -> Int64Array:
        """Return how often each stream is drawn in the next chunk, shape (num_streams,)."""
        active = [number for number, share in enumerate(shares) if share]
        left = self._left()
        # A chunk ends where a stream does.
        size = max(min(most, *(int(left[n] / shares[n]) for n in active)), 1)
        due = [int(share * size * SCALE) for share in shares]
        due[active[0]] += size * SCALE - sum(due)
        self._due += np.array(due)
        counts = np.zeros(len(shares), np.int64)
        counts[active] = np.maximum(self._due[active] // SCALE, 0)
        while missing := size - int(counts.sum()):
            rest = self._due - counts * SCALE
            if missing > 0:
                counts[max(active, key=rest.__getitem__)] += 1
            else:
                counts[min(np.flatnonzero(counts).tolist(), key=rest.__getitem__)] -= 1
        counts = np.minimum(counts, left)
        self._due -= counts * SCALE
        return counts

    def _draw_by_tokens(
        self, shares: Sequence[Fraction], most: int
    ) -> tuple[Int64Array, Int64Array]:
        """Draw by deficit; return the draws of each stream, and their places by stream."""
        scaled = np.array([int(share * TOKEN_SCALE) for share in shares])
        sizes = [(lane.stream.num_samples, lane.stream.num_tokens) for lane in self.streams]
        left = self._left()
        looks = np.minimum(lookaheads([float(share) for share in shares], sizes), left)
        looks[scaled == 0] = 0
        lengths = [self._lengths(number, look) for number, look in enumerate(looks.tolist())]
        return draw_known(scaled, self._due, lengths, scaled == 0, most)

    def _lengths(self, number: int, look: int) -> Int64Array:
        """Return the tokens of the next samples of a stream, shape (look,)."""
        again = self.undelivered.lengths(number, look)
        taken = self.streams[number].take(int(self._cursors[number]), look - len(again))
        lengths: Int64Array = np.append(again, self._recipe.weigh(taken[:, TOKENS]))
        return lengths

    @property
    def num_substituted(self) -> int:
        """Draws that went to other streams because theirs was exhausted, since the run began."""
        return num_substituted(self.state())

    def blocks(self) -> Callable[[], Blocks]:
        """Return a callable that computes the current shuffle blocks of each stream in use."""
        cursors = [
            (stream, cursor)
            for stream, cursor in zip(self.streams, self._cursors.tolist(), strict=True)
            if self._recipe.uses(stream.number)
        ]

        def blocks_there() -> Blocks:
            """Return the block at each cursor, as [first, last) by stream."""
            found = {stream.number: stream.block_of(cursor) for stream, cursor in cursors}
            return {number: (block, block + 1) for number, block in found.items() if block >= 0}

        return blocks_there

    def state(self) -> list[int]:
        """Return the next chunk, draws that gave way, what each stream is due, and the cursors."""
        return [self._chunk, self._yielded, *self._due.tolist(), *self._cursors.tolist()]

    def restore(self, state: list[int]) -> None:
        """Resume from a saved `state`."""
        num = len(self.streams)
        self._chunk, self._yielded = state[:2]
        self._due = np.array(state[2 : 2 + num], np.int64)
        self._cursors = np.array(state[2 + num :], np.int64)


def num_substituted(state: Sequence[int]) -> int:
    """Return the draws that went to other streams up to a `state` of samples."""
    return state[1] // YIELD_SCALE
