"""The packs of one packer of a worker: windows of samples, each packed as a whole.

::

    StreamMixer --64 samples--> packer --> packs, in another order if they are shuffled --> batches
                 --128 samples--> ...
                 --1,024 samples--> ...    (tokens: SampleStore)

A window ends at 1,024 samples, but not before it has the tokens of 16 packs. It always ends at the
most tokens that it may have: the rest of a long sample is for the next window. The first windows
are smaller, because a slow source would otherwise delay the first batch. Packs that are shuffled
together are those of one window, which ends only at its tokens.

A state tells where the streams were before the oldest sample that waits, which is in this window or
the one before, and which samples waited for this window. They are reread, and a digest of each
window tells whether they are the same.

Cost: about 60 us a chunk of a window, and 0.3 ms a window. Memory: the tokens of a window and of
the samples that wait for the next, in the `SampleStore`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from streampack.errors import DataError, StreampackError
from streampack.online.byte_budget import HeldMemory
from streampack.online.plan import FlowPlan
from streampack.online.sample_store import SampleStore
from streampack.online.stream_mixer import Mark, StreamMixer
from streampack.online.stream_sampler import SAME_SAMPLES
from streampack.pack import count_dropped, make_packer
from streampack.pack.best_fit_decreasing import WindowPacker
from streampack.pack.length_buckets import LengthBucketPacker
from streampack.plan.pack_order import take_packs
from streampack.rng import permutation
from streampack.runtime.stats import DROPPED, TRUNCATED
from streampack.types import (
    LENGTH,
    NO_PACKS,
    NO_SEGMENTS,
    PASS,
    SAMPLE,
    START,
    STREAM,
    TOKENS,
    Int64Array,
    Packs,
    State,
)

CHUNK_TOKENS = 1 << 16  # drawn together
FEW_SAMPLES = 64  # in the first window, and in all windows of payloads or buckets
MOST_DOUBLINGS = 4  # to 1,024 samples, and 16 packs
NO_LIMIT = 1 << 62
NO_ROWS = np.zeros((0, TOKENS + 1), np.int64)
DIGEST_BITS = 53  # precision that every JSON reader keeps


@dataclass(slots=True, eq=False)
class DrawnSamples:
    """The samples that were drawn for a window."""

    mark: Mark
    """Where the streams were before."""
    num_samples: Int64Array
    """Of each stream."""
    digests: Int64Array
    """Of the samples of each stream."""
    num_pieces: int = 0

    def as_json(self) -> list[list[int]]:
        digests = self.digests >> (64 - DIGEST_BITS) & ((1 << DIGEST_BITS) - 1)
        return [self.num_samples.tolist(), digests.tolist()]


class LiveQueue:
    """The packs of one packer, from windows of at most `window_tokens` tokens.

    `seed_path` identifies the epoch, the worker and the packer, and decides the order of shuffled
    packs. Its last number is the stream that is packed, unless all are. The rest is the worker's;
    `counts` has a column for each of `COUNTED`.
    """

    def __init__(
        self,
        plan: FlowPlan,
        mixer: StreamMixer,
        store: SampleStore,
        held: HeldMemory,
        counts: Int64Array,
        *,
        seed_path: tuple[int, ...],
        window_tokens: int,
    ) -> None:
        self._number = number = seed_path[-1]
        self._plan = plan
        self._mixer = mixer
        self._store = store
        self._memory = held
        self._counts = counts
        bucketing = plan.bucketing
        self._packer = LengthBucketPacker(bucketing) if bucketing else make_packer(plan.packing)
        own = mixer.samplers if plan.num_packers == 1 else [mixer.samplers[number]]
        self._has_payloads = any(sampler.most_together == 1 for sampler in own)
        self._doubles = not self._has_payloads and bucketing is None
        self._drawn: list[DrawnSamples] = []  # of the oldest piece that waits, and after
        self._pieces = NO_SEGMENTS  # of all these samples
        self._begin = self._end = 0  # those of the window; the rest is for the next one
        self._held = np.zeros(0, np.bool_)  # whether each piece before the window waited for it
        self._cut = 0  # tokens of the first that waited which were packed before
        self._window_tokens = window_tokens
        self._seed_path = seed_path
        self._num_windows = 0
        self._num_packs = 0  # of the window
        self._has_waited = False  # whether packs of the window before it left
        self._ready = NO_PACKS  # packs that can leave
        self._taken: list[Int64Array] = []  # segments of packs for the batch of this number
        self._batch = -1
        self._state: tuple[State, list[Any]] | None = None
        self._error: StreampackError | None = None  # behind the samples of the last window
        self._has_ended = False

    def has_pack(self) -> bool:
        """Whether there is another pack, which may have to be completed."""
        while not len(self._ready) and self._feed():
            pass
        return len(self._ready) > 0

    def take(self, most: int, batch: int) -> Packs:
        """Return up to so many packs, whose samples stay until packs of another batch are taken."""
        if batch != self._batch:
            self._batch, self._taken = batch, []
        while len(self._ready) < most and self._feed():
            pass
        num = len(self._ready)
        packs, self._ready = self._ready.slice(0, most), self._ready.slice(min(most, num), num)
        self._taken.append(packs.segments)
        return packs

    def drop(self, packs: Packs) -> None:
        """Let go of packs that are not delivered, or were before."""
        self._memory.count(-int(packs.segments[:, LENGTH].sum()))
        self._store.drop(packs.segments)

    def _feed(self) -> bool:
        """Pack another window, which may complete no pack; False once the packs have ended."""
        if self._has_ended:
            return False
        if self._error is not None:
            raise self._error
        self._let_go()
        has_more = self._fill()
        ends = np.cumsum(self._pieces[self._begin :, LENGTH])
        num = max(int(ends.searchsorted(self._window_tokens, side="right")), 1)
        self._end = min(self._begin + num, len(self._pieces))
        self._has_ended = not has_more and self._end >= len(self._pieces)
        self._ready = Packs.join([self._ready, self._pack()])
        self._state = None
        return True

    def _let_go(self) -> None:
        """Forget the samples before the oldest that waits."""
        held, pieces = self._packer.buffered, self._pieces
        is_held = np.zeros(len(pieces), np.bool_)
        self._cut = 0
        if len(held):  # each is a piece, and of the first, some tokens may have left
            oldest = int(pieces[0, SAMPLE])
            order = _order_of(pieces, oldest)
            places = order.searchsorted(_order_of(held, oldest), side="right") - 1
            is_held[places] = True
            self._cut = int(held[0, START] - pieces[places[0], START])
        is_held[self._end :] = True
        left = (self._ready.segments, *self._taken)
        self._store.keep(np.concatenate([held, *left, pieces[self._end :]]))
        oldest, first = int(is_held.argmax()) if is_held.any() else len(is_held), 0
        while self._drawn and first + self._drawn[0].num_pieces <= oldest:
            first += self._drawn.pop(0).num_pieces
        if len(held):
            self._memory.longest_wait = max(self._memory.longest_wait, len(self._drawn))
        self._pieces, self._end = pieces[first:], self._end - first
        self._begin, self._held = self._end, is_held[first:][: self._end]
        self._has_waited = self._num_packs > 0

    def _pack(self) -> Packs:
        window = self._pieces[self._begin : self._end]
        self._memory.count(int(window[:, LENGTH].sum()))
        packs = self._packer.add(window)
        if self._has_ended:
            packs = Packs.join([packs, self._packer.flush()])
        if self._plan.pack_shuffle:
            path = (*self._seed_path, self._num_windows)
            order = permutation(len(packs), self._plan.seed, "packs of iterables", *path)
            packs = take_packs(packs, order)
        self._num_windows += 1
        self._num_packs = len(packs)
        return packs

    def _fill(self) -> bool:
        """Draw the samples of a window; False if these are the last ones."""
        doublings = min(self._num_windows, MOST_DOUBLINGS)
        most_samples = FEW_SAMPLES << (doublings if self._doubles else 0)
        least_tokens = self._plan.packing.row_tokens << doublings
        if self._plan.pack_shuffle:
            least_tokens = self._window_tokens
        self._begin_draw()
        num_samples = 0
        while True:
            has_all = num_samples >= most_samples
            wanted = min(least_tokens, self._window_tokens) if has_all else self._window_tokens
            room = wanted - int(self._pieces[self._begin :, LENGTH].sum())
            is_full = self._memory.ends_window()
            if room <= 0 or (is_full and self._begin < len(self._pieces)):
                return True
            most = NO_LIMIT if has_all else most_samples - num_samples
            try:
                num = len(self._draw(min(room, CHUNK_TOKENS), 1 if self._has_payloads else most))
            except StreampackError as error:
                if self._begin == len(self._pieces):
                    raise
                self._error = error  # after the packs of the samples before it
                return True
            if not num:
                return False
            num_samples += num

    def _begin_draw(self) -> None:
        num = len(self._plan.streams)
        self._store.digests[:] = 0
        self._drawn.append(
            DrawnSamples(self._mixer.mark(self._number), *np.zeros((2, num), np.int64))
        )

    def _draw(self, most_tokens: int, most_samples: int, *, again: bool = False) -> Int64Array:
        """Add samples, maybe those of a state `again`; return their rows, shape (n, 4)."""
        chunk = self._mixer.draw(self._number, most_tokens, most_samples)
        if chunk is None:
            return NO_ROWS
        (rows, columns), packing, num = chunk, self._plan.packing, len(self._counts)
        are_shifted = [bool(sampler.labels_shifted) for sampler in self._mixer.samplers]
        segments, first_bad = self._store.extend(rows, columns, are_shifted)
        if first_bad < len(rows):
            stream, number = rows[first_bad, [STREAM, SAMPLE]].tolist()
            tokens, labels, *_ = columns
            own = labels[first_bad] if labels else None
            self._plan.streams[stream].check_values(number, tokens[first_bad], own)
        if self._memory.payloads and not again:
            stream, number = rows[-1, [STREAM, SAMPLE]].tolist()
            self._memory.check(self._plan.streams[stream].where(number))
        if packing.overflow == "drop":
            dropped = count_dropped(rows, packing.max_seq_len, packing.overflow, num)
            self._counts[:, DROPPED] += dropped
        elif packing.overflow == "truncate":
            is_cut = rows[:, TOKENS] > packing.max_seq_len
            self._counts[:, TRUNCATED] += np.bincount(rows[is_cut, STREAM], minlength=num)
        self._pieces = np.concatenate([self._pieces, segments])
        drawn = self._drawn[-1]
        drawn.num_samples += np.bincount(rows[:, STREAM], minlength=num)
        drawn.digests[:] = self._store.digests
        drawn.num_pieces += len(segments)
        return rows

    # State.

    def state_dict(self) -> tuple[State, list[Any], int]:
        """Return the window, as JSON, the sources' own states, and how many packs were taken.

        The first two are the same objects until there is another window.
        """
        if self._state is None:
            first = self._drawn[0].mark if self._drawn else self._mixer.mark(self._number)
            own, sources = self._mixer.state_dict(self._number, first)
            self._state = (
                {
                    **own,
                    "drawn": [drawn.as_json() for drawn in self._drawn],
                    "held": np.packbits(self._held).tobytes().hex(),
                    "cut": self._cut,
                    "has_waited": self._has_waited,
                    "window": [self._begin, self._end],
                    "num_windows": self._num_windows,
                    "has_ended": self._has_ended,
                },
                sources,
            )
        return *self._state, self._num_packs - len(self._ready)

    def load_state_dict(self, state: State, sources: list[Any], num_delivered: int) -> None:
        """Read the samples of a state again, and pack its window."""
        self._mixer.load_state_dict(self._number, state, sources)
        self._begin, self._end = map(int, state["window"])
        held = np.frombuffer(bytes.fromhex(state["held"]), np.uint8)
        self._held = np.unpackbits(held, count=self._begin).astype(np.bool_)
        self._cut, self._has_waited = int(state["cut"]), bool(state["has_waited"])
        for saved in state["drawn"]:
            self._read_again([list(map(int, each)) for each in saved])
        self._num_windows, self._has_ended = int(state["num_windows"]), bool(state["has_ended"])
        if not self._num_windows:
            return
        self._hold(self._pieces[: self._begin][self._held])
        self._num_windows -= 1
        self._ready = self._pack()
        self.drop(self.take(num_delivered, batch=-1))

    def _read_again(self, saved: list[list[int]]) -> None:
        """Draw the samples of a state; a DataError names those that are not as they were."""
        left, rows = sum(saved[0]), [NO_ROWS]
        self._begin_draw()
        while left > 0:
            rows.append(self._draw(CHUNK_TOKENS, left, again=True))
            if not len(rows[-1]):
                break
            left -= len(rows[-1])
        found = self._drawn[-1]
        if found.as_json() != saved:
            raise self._changed(found.as_json(), saved, np.concatenate(rows))
        # Only those that wait are kept, and those after them.
        is_kept = np.ones(len(self._pieces), np.bool_)
        is_kept[: self._begin] = self._held[: len(is_kept)]
        self._store.drop(self._pieces[~is_kept])
        self._store.keep(self._pieces[is_kept])

    def _changed(
        self, found: list[list[int]], saved: list[list[int]], rows: Int64Array
    ) -> DataError:
        """Return the error that names the first stream which gives other samples than before."""
        stream = int((np.array(found) != np.array(saved)).any(axis=0).argmax())
        own, name = rows[rows[:, STREAM] == stream], self._plan.names[stream]
        if found[0][stream] != saved[0][stream]:
            difference = f"gives {found[0][stream]} samples where it gave {saved[0][stream]}"
        else:
            passes, numbers = own[:, PASS], own[:, SAMPLE]
            last = "" if passes[0] == passes[-1] else f" to {passes[-1]}"
            difference = (
                f"samples {numbers.min()} to {numbers.max()} of pass {passes[0]}{last} have other "
                "tokens, labels or fields"
            )
        return DataError(
            f"stream {name!r}: {difference} than when the state was saved{SAME_SAMPLES}"
        )

    def _hold(self, held: Int64Array) -> None:
        """Let the packer hold what waited for the window."""
        self._memory.count(int(held[:, LENGTH].sum()) - self._cut)
        if self._cut:
            held = held.copy()
            held[0, START] += self._cut
            held[0, LENGTH] -= self._cut
        packer = self._packer
        if isinstance(packer, WindowPacker):
            waited = [int(self._has_waited)] * len(held)
            state = {"buffered": held.tolist(), "waited": waited}
            packer.load_state_dict(packer.state_dict() | state)
        elif len(held):
            packer.add(held)


def _order_of(segments: Int64Array, oldest: int) -> Int64Array:
    """Return an integer for each segment, shape (n,), which grows in order of arrival."""
    order: Int64Array = (segments[:, SAMPLE] - oldest << 32) + segments[:, START]
    return order
