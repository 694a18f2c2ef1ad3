"""The packs of one queue of a lane in a run of chapters, planned one window at a time.

A chapter begins after `number` packs of the queue were delivered::

    mixed         window  a b c | d e      the samples of d and e, and those that the packer has
    new packing   window  a b c | d e      buffered, are given back: their streams draw them first
    other queues  window  a b c | d e      d and e come first

So a chapter whose packs mix streams delivers what it draws itself, with its own shares.

Packs are numbered over the whole run. Windows after the one that holds pack `number` - 1 are
planned again, so how far ahead a process planned changes nothing.

Cost: as `plan/pack_queue.py`; at the start of a chapter, two windows of segments at most.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from streampack.errors import DataError
from streampack.pack.overflow import count_pieces, fit_segments
from streampack.plan.pack_queue import PackQueue, Snapshot
from streampack.plan.recipe import Recipe
from streampack.plan.run_samples import UNDELIVERED, RunSamples
from streampack.plan.state_text import rows_as_text, text_as_rows
from streampack.types import PASS, SAMPLE, STREAM, Int64Array, State

RAMP_PARTS = 32  # a block of draws and a window take at most this part of a change of shares


class RunPackQueue(PackQueue):
    """The packs of one queue of a lane over all chapters, by number.

    It begins with the recipe of the run's first chapter, or of one to be restored in.
    """

    _arrivals: RunSamples

    def __init__(self, recipe: Recipe, lane: int, queue: int) -> None:
        super().__init__(recipe, lane, queue, 0, arrivals=RunSamples(recipe, lane, queue))
        self._seed_path = ("packs", "all" if recipe.is_mixed else recipe.key_of(queue), lane)
        self._begin = 0  # packs of the queue before the chapter

    @property
    def chapter(self) -> int:
        """The chapter whose packing and shares it has."""
        return self._recipe.chapter.number if self._recipe.chapter else 0

    @property
    def num_substituted(self) -> int:
        """Draws of the queue that went to other streams because theirs was exhausted."""
        return self._arrivals.num_substituted

    def turn(self, recipe: Recipe, number: int) -> None:
        """Begin the next chapter after `number` packs of the queue."""
        if not any(map(recipe.uses, recipe.streams_in(self._queue))):
            return  # a queue without a share rests as it is
        self.know(number - 1, keep=number)
        self._cut(number)
        before, self._recipe = self._packing, recipe
        self._begin = number
        self._arrivals.turn(recipe)
        self._set_windows()
        if recipe.is_mixed or self._packing != before:
            self._give_back(number)
        self.is_complete = False
        self.num_moves += 1

    def _give_back(self, number: int) -> None:
        """Let streams draw again what was drawn for packs from `number` on."""
        kept = number - self.first_known
        rest = self._packs.slice(kept, len(self._packs)).segments
        self._hold(self._packs.slice(0, kept))
        before = self._arrivals.undelivered.segments
        self._arrivals.give_back(np.concatenate([before, rest, self._packer.buffered]))
        self._packer = self._new_packer()

    def know(self, number: int, keep: int = 0) -> bool:
        """Plan until pack `number` is known; raise a DataError if the queue ends before it."""
        chapter = self._recipe.chapter
        if super().know(number, keep) or (chapter is not None and chapter.drains):
            return True
        names = [self._recipe.names[n] for n in self._recipe.streams_in(self._queue)]
        raise DataError(
            f"chapters[{self.chapter}] has no packs left in lane {self._lane}: those of "
            f"{', '.join(map(repr, names))} with a share reached max_passes; end it before, raise "
            "max_passes, or give a weight to a stream without it"
        )

    def _cut(self, number: int) -> None:
        """Forget the windows that begin at pack `number` or later."""
        first: Snapshot | None = None
        while self._snapshots and self._snapshots[-1].num_packs >= number:
            first = self._snapshots.pop()
        if first is None:
            return
        first_known = self.first_known
        self._hold(self._packs.slice(0, first.num_packs - first_known))
        self._packer = self._new_packer()
        self._continue_from(first.state)
        self.first_known, self.is_complete = first_known, False

    # Windows of a chapter.

    def _set_windows(self) -> None:
        super()._set_windows()
        chapter = self._recipe.chapter
        self._ramp_packs = Fraction(0)  # packs of the queue over which shares change
        if self._recipe.is_mixed and chapter is not None and chapter.ramps:
            self._ramp_packs = Fraction(chapter.ramp_slots, self._recipe.num_lanes)
            self._max_packs = min(self._max_packs, math.ceil(self._ramp_packs / RAMP_PARTS))

    def _next_rows(self, num_planned: int) -> Int64Array:
        if not self._ramp_packs:
            return self._arrivals.next()
        # The mean of shares that change linearly is that in the middle of the draws.
        done, part = (num_planned - self._begin) / self._ramp_packs, Fraction(1, RAMP_PARTS)
        self._arrivals.fraction = min(done + part / 2, Fraction(1))
        tokens = self._ramp_packs * part * self._packing.max_seq_len
        return self._arrivals.next(math.ceil(tokens / self._arrivals.tokens_per_draw()))

    def _fit(self, rows: Int64Array) -> Int64Array:
        is_again = rows[:, PASS] == UNDELIVERED
        if not is_again.any():
            return super()._fit(rows)
        new, max_seq_len = rows[~is_again], self._packing.max_seq_len
        pieces = count_pieces(new, max_seq_len, self._packing.overflow)
        again = self._arrivals.undelivered.of(rows[is_again, SAMPLE])
        again = fit_segments(again, max_seq_len)
        # Another sample begins where its stream, pass or number changes.
        keys = again[:, : SAMPLE + 1]
        samples = np.cumsum((np.diff(keys, axis=0, prepend=keys[:1]) != 0).any(axis=1))
        places = [np.repeat(np.flatnonzero(~is_again), pieces), np.flatnonzero(is_again)[samples]]
        segments = np.concatenate([super()._fit(new), again])
        return segments[np.argsort(np.concatenate(places), kind="stable")]

    # State.

    def _buffered(self) -> Int64Array:
        again = self._arrivals.undelivered.segments
        is_used = np.isin(again[:, STREAM], self._recipe.used)
        return np.concatenate([self._packer.buffered, again[is_used]])

    def _state_now(self, packer: State) -> State:
        return super()._state_now(packer) | {
            "chapter": self.chapter,
            "begin": self._begin,
            "undelivered": self._arrivals.undelivered.segments,
        }

    def _continue_from(self, state: State) -> None:
        super().restore(state)
        self._begin = int(state["begin"])
        self._arrivals.give_back(state["undelivered"])

    def snapshot(self, number: int) -> list[State]:
        """Return the latest snapshot at or before pack `number`, as a list of at most one."""
        return [_as_text(state) for state in super().snapshot(number)]

    def rest(self, number: int) -> State:
        """Return what the queue continues from after `number` packs, as `restore` takes it."""
        kept = self.snapshot(number)
        return kept[0] if kept else _as_text(self._state_now(self._packer.state_dict()))

    def restore(self, state: State) -> None:
        """Continue from a snapshot; see `PackQueue.restore`."""
        self._continue_from(state | {"undelivered": text_as_rows(state["undelivered"])})


def _as_text(state: State) -> State:
    return state | {"undelivered": rows_as_text(state["undelivered"])}
