"""The packs of one queue of a lane in a run of chapters, planned one window at a time.

A chapter begins after `number` packs of the queue were delivered. What is planned beyond them::

    the packing stays    window  a b c | d e      d and e come first; then windows of new shares
    the packing changes  window  a b c | d e      the segments of d and e, and those that the packer
                                                  holds, are packed again, in this order
    a stream leaves      its segments wait, and come first when it returns

Packs are numbered over the whole run. Windows after the one that holds pack `number` - 1 are
planned again, so how far ahead a process planned changes nothing.

Cost: as `plan/pack_queue.py`; at the start of a chapter, two windows of segments at most.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from streampack.errors import DataError
from streampack.pack import make_packer
from streampack.pack.overflow import fit_segments
from streampack.plan.pack_queue import PackQueue, Snapshot
from streampack.plan.recipe import Recipe
from streampack.plan.run_samples import RunSamples
from streampack.plan.state_text import rows_as_text, text_as_rows
from streampack.types import NO_SEGMENTS, STREAM, Int64Array, State

# Of a snapshot: segments that are packed before new samples, and those of streams that left.
SEGMENTS = ("pending", "waiting")


class RunPackQueue(PackQueue):
    """The packs of one queue of a lane over all chapters, by number.

    It begins with the recipe of the run's first chapter, or of one to be restored in.
    """

    _arrivals: RunSamples

    def __init__(self, recipe: Recipe, lane: int, queue: int) -> None:
        super().__init__(recipe, lane, queue, 0, arrivals=RunSamples(recipe, lane, queue))
        self._seed_path = ("packs", "all" if recipe.is_mixed else recipe.key_of(queue), lane)
        self._waiting = NO_SEGMENTS  # segments of streams that left
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
        before, self._recipe = self._recipe, recipe
        self._packing = recipe.packing
        self._begin = number
        self._arrivals.turn(recipe)
        self._set_windows()
        if recipe.packing != before.packing:
            kept = number - self.first_known
            rest = self._packs.slice(kept, len(self._packs)).segments
            self._hold(self._packs.slice(0, kept))
            self._pack_again(rest)
        elif recipe.is_mixed and self._has_changed():
            self._pack_again(NO_SEGMENTS)
        self.is_complete = False
        self.num_moves += 1

    def know(self, number: int, keep: int = 0) -> bool:
        """Plan until pack `number` is known; raise a DataError if the queue ends before it."""
        if super().know(number, keep):
            return True
        names = [self._recipe.names[n] for n in self._recipe.streams_in(self._queue)]
        raise DataError(
            f"chapters[{self.chapter}] has no packs left in lane {self._lane}: those of "
            f"{', '.join(map(repr, names))} with a share reached max_passes; end it before, raise "
            "max_passes, or give a weight to a stream without it"
        )

    def _has_changed(self) -> bool:
        """Whether the packer holds segments of streams that left, or some that wait return."""
        return bool((~self._is_used(self._buffered())).any() or self._is_used(self._waiting).any())

    def _is_used(self, segments: Int64Array) -> npt.NDArray[np.bool_]:
        return np.isin(segments[:, STREAM], self._recipe.used)

    def _pack_again(self, rest: Int64Array) -> None:
        """Let undelivered segments pass through the packer again; those of absent streams wait."""
        undelivered = np.concatenate([self._waiting, rest, self._buffered()])
        is_used = self._is_used(undelivered)
        self._waiting = undelivered[~is_used]
        self._pending = fit_segments(undelivered[is_used], self._recipe.packing.max_seq_len)
        self._packer = make_packer(self._recipe.packing)

    def _cut(self, number: int) -> None:
        """Forget the windows that begin at pack `number` or later."""
        first: Snapshot | None = None
        while self._snapshots and self._snapshots[-1].num_packs >= number:
            first = self._snapshots.pop()
        if first is None:
            return
        first_known = self.first_known
        self._hold(self._packs.slice(0, first.num_packs - first_known))
        self._packer = make_packer(self._recipe.packing)
        self._continue_from(first.state)
        self.first_known, self.is_complete = first_known, False

    def _state_now(self, packer: State) -> State:
        return super()._state_now(packer) | {
            "chapter": self.chapter,
            "begin": self._begin,
            "pending": self._pending,
            "waiting": self._waiting,
        }

    def _continue_from(self, state: State) -> None:
        super().restore(state)
        self._begin, self._pending = int(state["begin"]), state["pending"]
        self._waiting = state["waiting"]

    def snapshot(self, number: int) -> list[State]:
        """Return the latest snapshot at or before pack `number`, as a list of at most one."""
        return [_as_text(state) for state in super().snapshot(number)]

    def _buffered(self) -> Int64Array:
        return np.concatenate([self._packer.buffered, self._pending])

    def _next_rows(self, num_planned: int) -> Int64Array:
        chapter = self._recipe.chapter
        if chapter is not None and chapter.ramps:
            in_lane = Fraction(chapter.ramp_slots, self._recipe.num_lanes)
            self._arrivals.fraction = min((num_planned - self._begin) / in_lane, Fraction(1))
        return self._arrivals.next()

    def blocks(self) -> dict[int, list[int]]:
        """Return, per stream, the shuffle blocks of unreleased packs and of the next samples."""
        blocks = super().blocks()
        then = self._snapshots[0].blocks() if self._snapshots else {}
        for stream, (first, _) in then.items():
            if stream not in blocks:  # it left, and packs that are not released hold its samples
                blocks[stream] = list(range(first, self._arrivals.block_before(stream) + 1))
        return blocks

    def rest(self, number: int) -> State:
        """Return what the queue continues from after `number` packs, as `restore` takes it."""
        kept = self.snapshot(number)
        return kept[0] if kept else _as_text(self._state_now(self._packer.state_dict()))

    def restore(self, state: State) -> None:
        """Continue from a snapshot; see `PackQueue.restore`."""
        self._continue_from(state | {name: text_as_rows(state[name]) for name in SEGMENTS})


def _as_text(state: State) -> State:
    return state | {name: rows_as_text(state[name]) for name in SEGMENTS}
