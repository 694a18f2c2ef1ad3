"""The packs of one queue of a lane, made one window after another.

::

    queue 0   arrivals -> overflow -> packer -> a b c d -> shuffle -> [ c | a | d | b ]
    queue 1   arrivals -> overflow -> packer -> e f     -> shuffle -> [ f | e ]

The packs of a window are shuffled, so that a batch has pieces of many samples: see docs/adr/0026
and, for packers of windows, 0028. A window has the packs or the samples of `Recipe.sizes`, rounded
up to whole chunks of samples; a smaller one is a part of a chunk. Where streams are mixed by
tokens, windows end at a number of tokens. Where a stream states its own shuffle block, chunks
and windows take half of it at most. The order of one depends only on the seed, the lane, the
queue and its first pack.

Cost: about 0.2-0.4 us a sample. Memory: one window of segments (48 bytes each), the packer's
buffer, and one shuffle block of each stream: 16 bytes per sample, by default at most 262,144.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np

from streampack.errors import DataError
from streampack.mix.draw import LOOKAHEAD
from streampack.pack import count_dropped, fit_samples, make_packer
from streampack.pack.overflow import count_pieces
from streampack.plan.pack_order import copy_packs, even_order, take_packs
from streampack.plan.recipe import Recipe
from streampack.plan.sample_order import UNDELIVERED, SampleOrder
from streampack.plan.small_passes import small_pass, window_starts
from streampack.rng import permutation
from streampack.types import (
    LENGTH,
    NO_SEGMENTS,
    NUM_COLUMNS,
    PASS,
    START,
    TOKENS,
    Int64Array,
    Packs,
    State,
)

RAMP_PARTS = 32  # a block of draws and a window take at most this part of a change of shares


class PackWindows:
    """The packs of a queue of a lane, window after window.

    Attributes:
        recipe: What determines the packs; `start_chapter` changes it.
        packing: How samples share packs.
        packer: What packs them.
        arrivals: Where samples come from.
        begin: Packs of the queue before the chapter.
        is_complete: Whether all packs are made.
        dropped: Samples without segments so far, shape (num_streams,).

    Arguments as in `PackQueue`.
    """

    def __init__(
        self, recipe: Recipe, lane: int, queue: int, epoch: int, *, is_shuffled: bool
    ) -> None:
        self._lane = lane
        self._queue = queue
        self._is_shuffled = is_shuffled
        self.arrivals = SampleOrder(recipe, lane, queue, epoch)
        self._seed_path: tuple[int | str, ...] = ("packs", queue, lane, epoch)
        if recipe.chapter is not None:
            self._seed_path = ("packs", "all" if recipe.is_mixed else recipe.keys[queue], lane)
        self._use(recipe, 0)
        self.packer = make_packer(self.packing)
        self.is_complete = False
        self._num_dropped = 0  # consecutive samples that were all dropped
        self.dropped = np.zeros(len(recipe.streams), np.int64)

    def _use(self, recipe: Recipe, begin: int) -> None:
        lane, queue = self._lane, self._queue
        self.recipe, self.begin = recipe, begin
        self._small = small_pass(recipe, lane, queue)
        self.packing = self._small.packing if self._small else recipe.shapes.packings[queue]
        sizes = recipe.sizes(lane, queue)
        self._max_packs, self._max_samples = sizes.max_packs, sizes.max_samples
        self._packing_window, self._most_drawn = sizes.packed, sizes.drawn
        by_tokens = recipe.is_mixed and recipe.mixing.weight_unit == "tokens"
        # A packer of windows begins with long samples. Parts of one would not have its shares.
        self._keeps_windows = self.packing.packs_windows and by_tokens
        if self._keeps_windows and not self._max_packs and len(recipe.drawn_in(queue)) > 1:
            # Packs that are not shuffled otherwise: the first of a window have its shares.
            self._max_packs = self._max_samples = self._packing_window
        if self._small:
            self._max_samples = min(self._max_samples, self._small.num_samples)
        chapter = recipe.chapter
        self._counts_tokens = by_tokens and self._max_packs > 0 and not self._small
        self._num_together = 0  # windows that are drawn together, where tokens are counted
        self._ramp_packs = Fraction(0)  # packs of the queue over which shares change
        if recipe.is_mixed and chapter is not None and chapter.ramps:
            self._ramp_packs = Fraction(chapter.ramp_slots, recipe.num_lanes)
            self._max_packs = min(self._max_packs, math.ceil(self._ramp_packs / RAMP_PARTS))

    # Chapters.

    def start_chapter(self, recipe: Recipe, begin: int, rest: Int64Array) -> bool:
        """Begin a chapter after `begin` packs; `rest` are the segments of packs from there on.

        Return whether the streams draw them again: then nothing of them is delivered otherwise.
        """
        before, arrivals = self.packing, self.arrivals
        self._use(recipe, begin)
        self.is_complete = False
        arrivals.start_chapter(recipe)
        draws_again = recipe.is_mixed or self.packing != before
        if draws_again:
            left = arrivals.undelivered
            again = [left.segments if left else NO_SEGMENTS, rest, self.packer.buffered]
            arrivals.give_back(arrivals.undelivered_of(np.concatenate(again)))
            self.packer = make_packer(self.packing)
        return draws_again

    # State.

    def state(self, num_known: int) -> State:
        """Return the state from which `restore` continues; `num_known` packs are made."""
        state = {
            "num_packs": num_known,
            "arrivals": self.arrivals.state(),
            "packer": self.packer.state_dict(),
            "dropped": self.dropped.tolist(),
        }
        if self.recipe.chapter is not None:
            state |= {"chapter": self.recipe.chapter.number, "begin": self.begin}
            state["undelivered"] = self.arrivals.undelivered
        return state

    def restore(self, state: State) -> None:
        """Continue from a `state`, with a packer that was never used."""
        self.packer = make_packer(self.packing)
        self.arrivals.restore(state["arrivals"])
        self.packer.load_state_dict(state["packer"])
        self.dropped = np.array(state["dropped"], np.int64).reshape(self.dropped.shape)
        self.is_complete = False
        if self.recipe.chapter is not None:
            self.begin = int(state["begin"])
            self.arrivals.give_back(state["undelivered"])

    # Windows.

    def next(self, num_known: int) -> Packs:
        """Return the packs of the next chunks, shuffled; at the end, flush the packer.

        `num_known` packs of the queue were made before.
        """
        segments, num_samples, num_chunks = self._draw(num_known)
        most, small = self._packing_window, self._small
        # A window may be smaller than a chunk, here and for the shuffle.
        num_packed = max(-(-num_samples // most), 1) if num_chunks == 1 else 1
        parts = (
            np.split(segments, window_starts(segments, small.least, most))
            if small
            else np.array_split(segments, num_packed)
        )
        packed = [self.packer.add(part) for part in parts]
        packed += [self.packer.flush()] if self.is_complete else []
        packs = packed[0] if len(packed) == 1 else Packs.join(packed)
        if not self._is_shuffled or not self._max_packs or not len(packs.ends):
            return packs
        if small:
            shared = [
                (len(part), self._num_windows(len(part), len(part.segments))) for part in packed
            ]
        else:
            num = self._num_windows(len(packs), num_samples, num_packed)
            shared = [(len(packs), 1 if num_chunks > 1 and not self._num_together else num)]
        bounds = [0]
        for num_packs, num in shared:
            first, num = bounds[-1], min(num, num_packs)
            bounds += [first + num_packs * window // num for window in range(1, num + 1)]
        return take_packs(packs, self._order_of(packs, bounds, num_known))

    def _num_windows(self, num_packs: int, num_samples: int, num_packed: int = 1) -> int:
        num = max(-(-num_packs // self._max_packs), -(-num_samples // self._max_samples))
        num = self._num_together or num
        return min(num, num_packed) if self._keeps_windows else num

    def _next_rows(self, num_planned: int) -> Int64Array:
        """Return the next samples, where this many packs of the queue are planned."""
        arrivals = self.arrivals
        if not self._ramp_packs:
            return arrivals.next()
        # The mean of shares that change linearly is that in the middle of the draws.
        done, part = (num_planned - self.begin) / self._ramp_packs, Fraction(1, RAMP_PARTS)
        arrivals.fraction = min(done + part / 2, Fraction(1))
        tokens = self._ramp_packs * part * self.packing.max_seq_len
        return arrivals.next(math.ceil(tokens / arrivals.tokens_per_draw()))

    def _tokens_of_window(self) -> int:
        """Return the tokens that are drawn together, of one window or some.

        Of so many samples instead, those that hold a long one would have more tokens, and it would
        have too small a share of the first packs.
        """
        mean = self.arrivals.tokens_per_draw()
        most = max(
            min(self._max_packs * self.packing.max_seq_len, int(self._max_samples * mean)), 1
        )
        least = 1 if self._ramp_packs else int(min(LOOKAHEAD, self._most_drawn) * mean)
        self._num_together = -(-least // most)
        return most * self._num_together

    def _draw(self, num_known: int) -> tuple[Int64Array, int, int]:
        """Draw the chunks that begin in a window; return their segments, and count what is drawn.

        The counts are of samples and of chunks.
        """
        chunks: list[Int64Array] = []
        num_packs = num_tokens = num_samples = 0
        self.arrivals.tokens_left = self._tokens_of_window() if self._counts_tokens else None
        is_full = False
        while not self.is_complete and not is_full:
            rows = self._next_rows(num_known + num_packs)
            chunks.append(self._next_segments(rows))
            num_samples += len(rows)
            num_tokens += int(chunks[-1][:, LENGTH].sum())
            num_packs = num_tokens // self.packing.max_seq_len
            is_full = num_packs >= self._max_packs or num_samples >= self._max_samples
            if self._counts_tokens:
                is_full = self.arrivals.tokens_left == 0 or num_samples >= self._most_drawn
        return np.concatenate(chunks), num_samples, len(chunks)

    def _order_of(self, packs: Packs, bounds: list[int], num_known: int) -> Int64Array:
        """Return the order in which the packs of windows leave, shape (len(packs),)."""
        seed = self.recipe.order.seed
        windows = [
            first + permutation(stop - first, seed, *self._seed_path, num_known + first)
            for first, stop in pairwise(bounds)
        ]
        if self.recipe.packing.cost is not None:
            lengths = np.append(0, np.cumsum(packs.segments[:, LENGTH]))[packs.ends]
            tokens = np.diff(lengths, prepend=0)
            windows = [order[even_order(tokens[order])] for order in windows]
        return np.concatenate(windows)

    # Segments.

    def _next_segments(self, rows: Int64Array) -> Int64Array:
        """Return the segments of a chunk of samples. A chunk without samples is the last."""
        self.is_complete = not len(rows)
        is_again = rows[:, PASS] == UNDELIVERED
        if not is_again.any():
            return self._fit(rows)
        new, max_seq_len = rows[~is_again], self.packing.max_seq_len
        again = self.arrivals.segments_of(rows[is_again], max_seq_len)
        sizes = np.empty(len(rows), np.int64)
        sizes[~is_again] = count_pieces(new, max_seq_len, self.packing.overflow)
        sizes[is_again] = np.diff(again.ends, prepend=0)
        starts = np.cumsum(sizes) - sizes
        segments = np.empty((int(sizes.sum()), NUM_COLUMNS), np.int64)
        for own, part in ((~is_again, self._fit(new)), (is_again, again.segments)):
            begins = np.cumsum(sizes[own]) - sizes[own]
            copy_packs(part, begins, sizes[own], starts[own], segments)
        return segments

    def _fit(self, rows: Int64Array) -> Int64Array:
        max_seq_len = self.packing.max_seq_len
        segments = fit_samples(rows, max_seq_len, self.packing.overflow, self.recipe.names)
        if np.count_nonzero(segments[:, START] == 0) < len(rows):
            num = len(self.dropped)
            self.dropped += count_dropped(rows, max_seq_len, self.packing.overflow, num)
        if len(segments):
            self._num_dropped = 0
        elif len(rows):
            self._check_drops(rows)
        return segments

    def _check_drops(self, rows: Int64Array) -> None:
        """Raise a DataError if more samples in a row were dropped than the streams hold."""
        self._num_dropped += len(rows)
        limit = self.recipe.max_consecutive_drops(self._queue)
        if limit is not None and self._num_dropped > limit:
            names = [self.recipe.names[number] for number in np.unique(rows[:, 0])]
            rules = [self.recipe.streams[number].overflow for number in np.unique(rows[:, 0])]
            if not rows[:, TOKENS].any() and "drop" not in rules:
                raise DataError(
                    f"stream {names}: all of {self._num_dropped} samples in a row have no tokens; "
                    "omit the stream, or write it with tokens"
                )
            raise DataError(
                f"stream {names}: all of {self._num_dropped} samples in a row are longer than "
                f"max_seq_len={self.packing.max_seq_len}, and overflow='drop' leaves "
                "nothing; raise max_seq_len, or set overflow to split or truncate"
            )
