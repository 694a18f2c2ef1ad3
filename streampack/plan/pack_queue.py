"""The packs of one queue of a lane, planned one window at a time.

::

    queue 0   arrivals -> overflow -> packer -> a b c d -> shuffle -> [ c | a | d | b ]
    queue 1   arrivals -> overflow -> packer -> e f     -> shuffle -> [ f | e ]
                                                                       ^ a snapshot lies where a
                                                                         window begins

The pieces of a long sample leave the packer one after the other. So that a batch holds pieces of
many samples, the packs of a window are shuffled; `pack_order` spreads those of equal cost. A window
has the packs or the samples of `Recipe.window`, rounded up to whole chunks of samples; a smaller
one is a part of a chunk. Its order depends only on the seed, the lane, the queue and its first
pack. A packer of windows gets the segments of all its chunks together.

A lane has one queue if packs mix streams, otherwise one per stream. Packs are addressed by their
number in the queue. Packs planned ahead are therefore never lost, and planning a queue again
gives the same packs.

Cost: about 0.2-0.4 us a sample. Memory: two windows of segments (48 bytes each), the packer's
buffer, and one shuffle block of each stream: 16 bytes per sample, by default at most 262,144.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from streampack.errors import DataError, ResumeError
from streampack.pack import Packer, count_dropped, fit_samples, make_packer
from streampack.plan.pack_order import even_order, take_packs
from streampack.plan.recipe import Recipe
from streampack.plan.run_samples import RunSamples
from streampack.plan.sample_order import Blocks, SampleSequence
from streampack.plan.slots import ENDLESS
from streampack.plan.small_passes import SmallPass, settle, small_pass, window_starts
from streampack.rng import permutation
from streampack.types import LENGTH, NO_PACKS, TOKENS, Int64Array, Packs, State


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """The state of a queue at the start of a window: enough to plan from there again."""

    num_packs: int
    """Packs of the queue before the window."""
    held: Int64Array
    """Segments in the packer's buffer, shape (n, 6)."""
    blocks: Callable[[], Blocks]
    """Compute the shuffle blocks at this point. A callable, because it is rarely needed."""
    state: State
    """What `PackQueue.restore` needs."""


class PackQueue:
    """The packs of one queue of a lane, by number.

    Attributes:
        first_known: Number of the first pack that is not released.
        is_complete: Whether all packs of the queue are planned.

    `queue` is the stream, or 0 if packs mix streams. With carry, `epoch` is the run's first. The
    samples come from `arrivals`; None: from that epoch on. Where packs are only counted, they need
    no shuffle, and windows only if they are packed as a whole.
    """

    def __init__(
        self,
        recipe: Recipe,
        lane: int,
        queue: int,
        epoch: int,
        *,
        arrivals: RunSamples | None = None,
        is_shuffled: bool = True,
    ) -> None:
        self._recipe = recipe
        self._lane = lane
        self._queue = queue
        self._seed_path: tuple[int | str, ...] = ("packs", queue, lane, epoch)
        self._is_shuffled = is_shuffled
        self._set_windows()
        self._num_dropped = 0  # consecutive samples that were all dropped
        self._arrivals = arrivals or SampleSequence(recipe, lane, queue, epoch)
        self._packer = self._new_packer()
        self._hold(NO_PACKS)
        self.first_known = 0
        self._snapshots: deque[Snapshot] = deque()
        self.is_complete = False
        self.num_moves = 0
        # Samples without segments so far, per stream.
        self.dropped = np.zeros(len(recipe.streams), np.int64)

    def _set_windows(self) -> None:
        """Set the packing, and the windows in which packs are made and shuffled."""
        recipe, lane, queue = self._recipe, self._lane, self._queue
        self._small = small_pass(recipe, lane, queue)
        self._packing = self._small.packing if self._small else recipe.shapes.packings[queue]
        packs_windows = self._packing.packs_windows if self._small else recipe.packs_windows
        self._packing_window = recipe.packing_window(lane, queue) if packs_windows else 0
        has_windows = self._is_shuffled or packs_windows
        self._max_packs, self._max_samples = recipe.window(lane, queue) if has_windows else (0, 0)
        if self._small:
            self._max_samples = min(self._max_samples, self._small.num_samples)

    def _new_packer(self) -> Packer:
        return make_packer(self._packing, passes_once=self._small is not None)

    @property
    def num_known(self) -> int:
        """Number of packs of the queue planned so far."""
        return self.first_known + len(self._packs.ends)

    @property
    def high_water_tokens(self) -> int:
        """Maximum number of tokens that the packer has held."""
        return self._packer.high_water_tokens

    def extend(self) -> None:
        """Plan one more window; at the end, flush the packer."""
        if self.is_complete:
            return
        self._snapshots.append(self._snapshot_now())
        self.num_moves += 1
        window = self._next_window()
        self._hold(Packs.join([self._packs, window]) if len(self._packs.ends) else window)

    def _snapshot_now(self) -> Snapshot:
        held, packer = self._buffered(), self._packer.state_dict()
        return Snapshot(
            num_packs=self.num_known,
            held=held,
            blocks=self._arrivals.blocks(),
            state=self._state_now(packer),
        )

    def _state_now(self, packer: State) -> State:
        """Return what `restore` needs to plan from here again; `packer` is the packer's state."""
        return {
            "num_packs": self.num_known,
            "arrivals": self._arrivals.state(),
            "packer": packer,
            "dropped": self.dropped.tolist(),
        }

    def _buffered(self) -> Int64Array:
        """Return the segments that are not packed yet, shape (n, 6)."""
        return self._packer.buffered

    def _next_window(self) -> Packs:
        """Return the packs of the next chunks, shuffled."""
        parts = self._pack_passes(self._small) if self._small else [self._pack_window()]
        packs = Packs.join([part for part, _ in parts]) if len(parts) > 1 else parts[0][0]
        if not self._is_shuffled or not self._max_packs or not len(packs.ends):
            return packs
        bounds = [0]
        for part, num_windows in parts:
            num_packs, first = len(part.ends), bounds[-1]
            num = min(num_windows, num_packs)
            bounds += [first + num_packs * window // num for window in range(1, num + 1)]
        return take_packs(packs, self._order_of(packs, bounds))

    def _pack_passes(self, small: SmallPass) -> list[tuple[Packs, int]]:
        """Return the packs of the next chunks, of one pass after the other, as `_pack_window`."""
        segments = np.concatenate(self._next_chunks()[0])
        most = self._packing_window or len(segments)
        packs = []
        for part in np.split(segments, window_starts(segments, small.least, most)):
            packs += [settle(self._packer, part)] if small.settles else []
            packs.append(self._packer.add(part))
        packs += [self._packer.flush()] if self.is_complete else []
        return [(part, self._num_windows(len(part), len(part.segments))) for part in packs]

    def _pack_window(self) -> tuple[Packs, int]:
        """Return the packs of the next chunks, and the number of windows that share them."""
        packs, num_chunks, num_samples = (
            self._pack_together() if self._packing_window else self._pack_chunks()
        )
        # A window may be smaller than a chunk.
        return packs, 1 if num_chunks > 1 else self._num_windows(len(packs.ends), num_samples)

    def _num_windows(self, num_packs: int, num_samples: int) -> int:
        """Return the windows that share so many packs and samples."""
        if not self._max_packs:
            return 1
        return max(-(-num_packs // self._max_packs), -(-num_samples // self._max_samples))

    def _next_rows(self, num_planned: int) -> Int64Array:  # noqa: ARG002 - for runs of chapters
        """Return the next samples, where this many packs of the queue are planned."""
        return self._arrivals.next()

    def _pack_chunks(self) -> tuple[Packs, int, int]:
        """Return the packs, chunks and samples of a window whose chunks are packed as they come."""
        chunks: list[Packs] = []
        num_packs = num_samples = 0
        while not self.is_complete:
            rows = self._next_rows(self.num_known + num_packs)
            segments = self._next_segments(rows)
            chunks.append(self._packer.flush() if self.is_complete else self._packer.add(segments))
            num_packs += len(chunks[-1])
            num_samples += len(rows)
            if self._ends_window(num_packs >= self._max_packs, num_samples):
                break
        packs = Packs.join(chunks) if len(chunks) > 1 else chunks[0]
        return packs, len(chunks), num_samples

    def _pack_together(self) -> tuple[Packs, int, int]:
        """Return the packs, chunks and samples of a window that is packed as a whole."""
        chunks, num_samples = self._next_chunks()
        segments = np.concatenate(chunks)
        # As for the shuffle, a window may be smaller than a chunk.
        num_windows = -(-num_samples // self._packing_window) if len(chunks) == 1 else 1
        packs = [self._packer.add(part) for part in np.array_split(segments, max(num_windows, 1))]
        if self.is_complete:
            packs.append(self._packer.flush())
        return Packs.join(packs), len(chunks), num_samples

    def _next_chunks(self) -> tuple[list[Int64Array], int]:
        """Return the segments of the chunks that begin in a window, and their samples."""
        chunks: list[Int64Array] = []
        num_tokens = num_samples = 0
        max_seq_len = self._packing.max_seq_len
        max_tokens = self._max_packs * max_seq_len
        while not self.is_complete:
            rows = self._next_rows(self.num_known + num_tokens // max_seq_len)
            chunks.append(self._next_segments(rows))
            num_tokens += int(chunks[-1][:, LENGTH].sum())
            num_samples += len(rows)
            if self._ends_window(num_tokens >= max_tokens, num_samples):
                break
        return chunks, num_samples

    def _ends_window(self, is_full: bool, num_samples: int) -> bool:
        # What was drawn before a stream ran out is not shuffled with what takes its place.
        return is_full or num_samples >= self._max_samples or self._arrivals.ran_out

    def _order_of(self, packs: Packs, bounds: list[int]) -> Int64Array:
        """Return the order in which the packs of windows leave, shape (len(packs),)."""
        seed = self._recipe.order.seed
        windows = [
            first + permutation(stop - first, seed, *self._seed_path, self.num_known + first)
            for first, stop in pairwise(bounds)
        ]
        if self._recipe.packing.max_cost is not None:
            lengths = np.append(0, np.cumsum(packs.segments[:, LENGTH]))[packs.ends]
            tokens = np.diff(lengths, prepend=0)
            windows = [order[even_order(tokens[order])] for order in windows]
        return np.concatenate(windows)

    def _next_segments(self, rows: Int64Array) -> Int64Array:
        """Return the segments of a chunk of samples. A chunk without samples is the last."""
        self.is_complete = not len(rows)
        return self._fit(rows)

    def _fit(self, rows: Int64Array) -> Int64Array:
        """Return the segments of samples, in order."""
        max_seq_len = self._packing.max_seq_len
        self.dropped += count_dropped(rows, max_seq_len, self._packing.overflow, len(self.dropped))
        segments = fit_samples(rows, max_seq_len, self._packing.overflow, self._recipe.names)
        if len(rows):
            self._check_empty(rows)
            self._check_drops(rows, segments)
        return segments

    def _hold(self, packs: Packs) -> None:
        self._packs = packs
        self._sizes = np.diff(packs.ends, prepend=0)

    def _check_empty(self, rows: Int64Array) -> None:
        """Raise a DataError for an empty sample where other lanes count on one token a sample."""
        recipe = self._recipe
        if recipe.num_lanes == 1 or rows[:, TOKENS].all():
            return
        for number, _, sample, _ in rows[rows[:, TOKENS] == 0].tolist():
            if not recipe.streams[number].may_be_empty:
                raise DataError(
                    f"stream {recipe.names[number]!r}, sample {sample}: 0 tokens; with several "
                    "lanes (num_lanes, or more than one node), empty samples are skipped only if "
                    "the stream has a length file: run `streampack index` on it"
                )

    def _check_drops(self, rows: Int64Array, segments: Int64Array) -> None:
        """Raise a DataError if more samples in a row were dropped than the streams hold."""
        self._num_dropped = 0 if len(segments) else self._num_dropped + len(rows)
        limit = self._recipe.max_consecutive_drops(self._queue)
        if limit is not None and self._num_dropped > limit:
            names = [self._recipe.names[number] for number in np.unique(rows[:, 0])]
            if not rows[:, TOKENS].any():
                raise DataError(
                    f"stream {names}: all of {self._num_dropped} samples in a row have no tokens; "
                    "leave the stream out, or write it with tokens"
                )
            raise DataError(
                f"stream {names}: all of {self._num_dropped} samples in a row are longer than "
                f"max_seq_len={self._packing.max_seq_len}, and overflow='drop' leaves "
                "nothing; raise max_seq_len, or set overflow to split or truncate"
            )

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
        rows = packs - self.first_known
        if packs[-1] < self.num_known:
            sizes = self._sizes[rows]
            return self._packs.ends[rows] - sizes, sizes
        begins, sizes = np.zeros((2, len(packs)), np.int64)
        known = rows < len(self._packs.ends)
        sizes[known] = self._sizes[rows[known]]
        begins[known] = self._packs.ends[rows[known]] - sizes[known]
        return begins, sizes

    def release(self, number: int) -> None:
        """Release the packs before `number`."""
        number = min(number, self.num_known)
        if number - self.first_known > len(self._packs.ends) // 2:
            self._hold(self._packs.slice(number - self.first_known, len(self._packs.ends)))
            self.first_known = number
        while len(self._snapshots) > 1 and self._snapshots[1].num_packs <= number:
            self._snapshots.popleft()
            self.num_moves += 1

    def blocks(self) -> dict[int, list[int]]:
        """Return, per stream, the shuffle blocks of unreleased packs and of the next samples.

        They change only when `num_moves` does.
        """
        now = self._arrivals.blocks()()
        then = self._snapshots[0].blocks() if self._snapshots else now
        blocks = {}
        for stream, (block, last) in now.items():
            first = then.get(stream, (block, block))[0]
            # A fixed order with carry restarts from the first block: skip the blocks in between.
            middle = range(first, block) if first <= block else (first,)
            blocks[stream] = [*middle, *range(block, last + 1)]
        return blocks

    def shards_in(self, stream: int, block: int) -> Int64Array:
        """Return the shards of one shuffle block of a stream in this lane, shape (n,)."""
        return next(own for own in self._arrivals.streams if own.number == stream).shards_in(block)

    def held(self) -> Int64Array:
        """Return the segments that were buffered before the oldest of `blocks`, shape (n, 6)."""
        return self._snapshots[0].held if self._snapshots else self._buffered()

    def snapshot(self, number: int) -> list[State]:
        """Return the latest snapshot at or before pack `number`, as a list of at most one."""
        kept = [snapshot for snapshot in self._snapshots if snapshot.num_packs <= number]
        return [snapshot.state for snapshot in kept[-1:]]

    def restore(self, state: State) -> None:
        """Continue from a snapshot, with a packer that was never used.

        Raises a ResumeError if the snapshot is not one of such a queue.
        """
        try:
            self.first_known = int(state["num_packs"])
            self._arrivals.restore([int(value) for value in state["arrivals"]])
            self._packer.load_state_dict(state["packer"])
            self.dropped = np.array(state["dropped"], np.int64).reshape(self.dropped.shape)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ResumeError(
                f"one of the state's snapshots is damaged ({type(error).__name__}: {error}); "
                "take 'snapshots' out of the state: they are only a speed-up"
            ) from error
