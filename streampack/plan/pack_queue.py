"""The packs of one queue of a lane by number, planned one window at a time.

::

    windows of packs     [ c | a | d | b ] [ f | e ]
                         ^ a snapshot       ^ is where a window begins

Packs are addressed by their number in the queue, so planning a queue again gives the same packs.
A chapter begins after `number` packs of the queue were delivered::

    mixed         window  a b c | d e      the samples of d and e, and those that the packer has
    new packing   window  a b c | d e      buffered, are given back: their streams draw them first
    other queues  window  a b c | d e      d and e come first

Windows after the one with pack `number` - 1 are replanned, so how far ahead a process
planned changes nothing.

Cost: see `pack_windows`; at the start of a chapter, two windows of segments at most. Memory: two
windows of segments (48 bytes each).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from streampack.plan.pack_windows import PackWindows
from streampack.plan.recipe import Recipe
from streampack.plan.slots import ENDLESS
from streampack.plan.snapshots import rows_as_text, text_as_rows
from streampack.types import NO_PACKS, NO_SEGMENTS, STREAM, Int64Array, Packs, State


class Snapshot(NamedTuple):
    """The state of a queue at the start of a window: enough to plan from there again."""

    state: State
    """What the windows are restored from."""
    packed: Int64Array
    """Segments that the packer held, shape (n, 6)."""

    @property
    def num_packs(self) -> int:
        """Packs of the queue before the window."""
        return int(self.state["num_packs"])


class PackQueue:
    """The packs of one queue of a lane, by number.

    Attributes:
        first_known: Number of the first pack that is not released.
        num_known: Number of packs of the queue planned so far.

    `queue` is the stream, or 0 if packs mix streams. The recipe is of a run with epochs, which is
    planned from `epoch` on, or of the first chapter of a run; or else of a chapter to be restored
    in. Where packs are only counted, they need no shuffle, and windows only if they are packed as
    a whole.
    """

    def __init__(
        self, recipe: Recipe, lane: int, queue: int, epoch: int = 0, *, is_shuffled: bool = True
    ) -> None:
        self._queue = queue
        self.windows = PackWindows(recipe, lane, queue, epoch, is_shuffled=is_shuffled)
        """What makes the packs."""
        self._hold(NO_PACKS, 0)
        self._snapshots: deque[Snapshot] = deque()
        self.num_moves = 0

    @property
    def is_complete(self) -> bool:
        """Whether all packs of the queue are planned."""
        return self.windows.is_complete

    def extend(self) -> None:
        """Plan one more window."""
        if self.is_complete:
            return
        self._snapshots.append(self._snapshot())
        self.num_moves += 1
        window = self.windows.next(self.num_known)
        packs = Packs.join([self._packs, window]) if len(self._packs.ends) else window
        self._hold(packs, self.first_known)

    def _snapshot(self) -> Snapshot:
        return Snapshot(self.windows.state(self.num_known), self.windows.packer.buffered)

    def _hold(self, packs: Packs, first: int) -> None:
        self._packs, self.first_known = packs, first
        self.num_known = first + len(packs.ends)
        # Rows of the packs, and of an empty one after the end of the queue.
        self._begins = np.append(0, packs.ends)
        self._sizes = np.append(np.diff(self._begins), 0)

    def know(self, number: int, keep: int = 0) -> bool:
        """Plan until pack `number` is known. Return False if the queue ends before it.

        Packs before `keep` are released on the way, to bound the memory.
        """
        while self.num_known <= number and not self.is_complete:
            self.extend()
            self.release(keep)
        return number < self.num_known

    @property
    def segments(self) -> Int64Array:
        """Segment rows of the packs that are known and not released, shape (n, 6)."""
        return self._packs.segments

    @property
    def next_crossing(self) -> int:
        """Delivered packs at which the oldest snapshot is dropped; ENDLESS if it is the last."""
        return self._snapshots[1].num_packs if len(self._snapshots) > 1 else ENDLESS

    def places(self, packs: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the first row in `segments` of each pack and its number of rows, shape (n,).

        The packs must not be released. A pack after the end of the queue is empty.
        """
        rows = np.minimum(packs, self.num_known) - self.first_known
        return self._begins[rows], self._sizes[rows]

    def release(self, number: int) -> None:
        """Release the packs before `number`."""
        number = min(number, self.num_known)
        if number - self.first_known > len(self._packs.ends) // 2:
            self._hold(self._packs.slice(number - self.first_known, len(self._packs.ends)), number)
        while len(self._snapshots) > 1 and self._snapshots[1].num_packs <= number:
            self._snapshots.popleft()
            self.num_moves += 1

    # Chapters.

    def start_chapter(self, recipe: Recipe, number: int) -> None:
        """Begin the next chapter after `number` packs of the queue."""
        if not any(map(recipe.uses, recipe.streams_in(self._queue))):
            return  # a queue without a share rests as it is
        self.know(number - 1, keep=number)
        self._cut(number)
        kept = number - self.first_known
        rest = self._packs.slice(kept, len(self._packs)).segments
        if self.windows.start_chapter(recipe, number, rest):
            self._hold(self._packs.slice(0, kept), self.first_known)
        self.num_moves += 1

    def _cut(self, number: int) -> None:
        """Forget the windows that begin at pack `number` or later."""
        first: Snapshot | None = None
        while self._snapshots and self._snapshots[-1].num_packs >= number:
            first = self._snapshots.pop()
        if first is not None:
            kept = self._packs.slice(0, first.num_packs - self.first_known)
            self._hold(kept, self.first_known)
            self.windows.restore(first.state)

    # Shards.

    def blocks(self) -> dict[int, list[int]]:
        """Return, per stream, the shuffle blocks of unreleased packs and of the next samples.

        They change only when `num_moves` does.
        """
        arrivals = self.windows.arrivals
        now = then = arrivals.blocks(arrivals.state())
        if self._snapshots:
            then = arrivals.blocks(self._snapshots[0].state["arrivals"])
        blocks = {}
        for stream, (block, last) in now.items():
            first = then.get(stream, (block, block))[0]
            # A fixed order with carry restarts from the first block: skip the blocks in between.
            middle = range(first, block) if first <= block else (first,)
            blocks[stream] = [*middle, *range(block, last + 1)]
        return blocks

    def shards_in(self, stream: int, block: int) -> Int64Array:
        """Return the shards of one shuffle block of a stream in this lane, shape (n,)."""
        streams = self.windows.arrivals.streams
        return next(own for own in streams if own.number == stream).shards_in(block)

    def held(self) -> Int64Array:
        """Return the segments that were drawn and not packed before `blocks`, shape (n, 6)."""
        state, packed = self._snapshots[0] if self._snapshots else self._snapshot()
        again = state.get("undelivered")
        left = again.segments if again else NO_SEGMENTS
        return np.concatenate([packed, left[np.isin(left[:, STREAM], self.windows.recipe.used)]])

    # State.

    def snapshot(self, number: int) -> list[State]:
        """Return the latest snapshot at or before pack `number`, as a list of at most one."""
        kept = [snapshot for snapshot in self._snapshots if snapshot.num_packs <= number]
        return [_as_text(snapshot.state) for snapshot in kept[-1:]]

    def rest(self, number: int) -> State:
        """Return what the queue continues from after `number` packs, as `restore` takes it."""
        kept = self.snapshot(number)
        return kept[0] if kept else _as_text(self._snapshot().state)

    def restore(self, state: State) -> None:
        """Continue from a snapshot, in a queue that planned nothing."""
        self._hold(NO_PACKS, int(state["num_packs"]))
        if "undelivered" in state:
            again = self.windows.arrivals.undelivered_of(text_as_rows(state["undelivered"]))
            state = state | {"undelivered": again}
        self.windows.restore(state)


def _as_text(state: State) -> State:
    if "undelivered" not in state:
        return state
    again = state["undelivered"]
    return state | {"undelivered": rows_as_text(again.segments if again else NO_SEGMENTS)}
