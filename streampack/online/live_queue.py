"""The packs of one packer of a worker: windows of samples, each packed as a whole.

::

    StreamMixer --64 samples--> packer --> packs, in another order if they are shuffled --> batches
                 --128 samples--> ...
                 --1,024 samples--> ...    (tokens: SampleStore)

A window ends at 1,024 samples, but not before it has the tokens of 16 packs. It always ends at the
most tokens that it may have: the rest of a long sample is for the next window. The first windows
are smaller, because a slow source would otherwise delay the first batch. Packs that are shuffled
together are those of one window, which ends only at its tokens.

Cost: about 60 us a chunk of a window, and 0.2 ms a window. Memory: the tokens of a window and of
the samples that wait for the next, in the `SampleStore`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streampack.errors import StreampackError
from streampack.online.byte_budget import HeldBytes
from streampack.online.plan import FlowPlan
from streampack.online.sample_store import SampleStore
from streampack.online.stream_mixer import StreamMixer
from streampack.pack import count_dropped
from streampack.plan.pack_order import take_packs
from streampack.rng import permutation
from streampack.runtime.stats import DROPPED, TRUNCATED
from streampack.types import (
    LENGTH,
    NO_PACKS,
    NO_SEGMENTS,
    SAMPLE,
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
        held_bytes: HeldBytes,
        counts: Int64Array,
        *,
        seed_path: tuple[int, ...],
        window_tokens: int,
    ) -> None:
        self._number = number = seed_path[-1]
        self._plan = plan
        self._mixer = mixer
        self._store = store
        self._bytes = held_bytes
        self._counts = counts
        self._packer = plan.packer()
        own = mixer.samplers if plan.num_packers == 1 else [mixer.samplers[number]]
        self._has_payloads = any(sampler.most_together == 1 for sampler in own)
        self._doubles = not self._has_payloads and plan.bucketing is None
        self._waiting = NO_SEGMENTS  # drawn, and not given to the packer yet
        self._window_tokens = window_tokens
        self._seed_path = seed_path
        self._num_windows = 0
        self._ready = NO_PACKS  # packs that can leave
        self._error: StreampackError | None = None  # behind the samples of the last window
        self._has_ended = False

    def has_pack(self) -> bool:
        """Whether there is another pack, which may have to be completed."""
        while not len(self._ready) and self._feed():
            pass
        return len(self._ready) > 0

    def take(self, most: int) -> Packs:
        while len(self._ready) < most and self._feed():
            pass
        num = len(self._ready)
        packs, self._ready = self._ready.slice(0, most), self._ready.slice(min(most, num), num)
        return packs

    def _feed(self) -> bool:
        """Pack another window, which may complete no pack; False once the packs have ended."""
        if self._has_ended:
            return False
        if self._error is not None:
            raise self._error
        has_more = self._fill()
        ends = np.cumsum(self._waiting[:, LENGTH])
        num = max(int(ends.searchsorted(self._window_tokens, side="right")), 1)
        window, self._waiting = self._waiting[:num], self._waiting[num:]
        self._store.count(int(window[:, LENGTH].sum()))
        packs = self._packer.add(window)
        if not has_more and not len(self._waiting):
            self._has_ended = True
            packs = Packs.join([packs, self._packer.flush()])
        if self._plan.pack_shuffle:
            path = (*self._seed_path, self._num_windows)
            order = permutation(len(packs), self._plan.seed, "packs of iterables", *path)
            packs = take_packs(packs, order)
        self._ready = Packs.join([self._ready, packs])
        self._num_windows += 1
        return True

    def _fill(self) -> bool:
        """Draw the samples of a window; False if these are the last ones."""
        doublings = min(self._num_windows, MOST_DOUBLINGS)
        most_samples = FEW_SAMPLES << (doublings if self._doubles else 0)
        least_tokens = self._plan.packing.row_tokens << doublings
        if self._plan.pack_shuffle:
            least_tokens = self._window_tokens
        num_samples = 0
        while True:
            has_all = num_samples >= most_samples
            wanted = min(least_tokens, self._window_tokens) if has_all else self._window_tokens
            room = wanted - int(self._waiting[:, LENGTH].sum())
            is_full = self._bytes.ends_window(self._store.payload_bytes)
            if room <= 0 or (is_full and len(self._waiting)):
                return True
            most = NO_LIMIT if has_all else most_samples - num_samples
            try:
                num_drawn = self._draw(min(room, CHUNK_TOKENS), 1 if self._has_payloads else most)
            except StreampackError as error:
                if not len(self._waiting):
                    raise
                self._error = error  # after the packs of the samples before it
                return True
            if not num_drawn:
                return False
            num_samples += num_drawn

    def _draw(self, most_tokens: int, most_samples: int) -> int:
        """Let more samples wait for the packer; return their number."""
        chunk = self._mixer.draw(self._number, most_tokens, most_samples)
        if chunk is None:
            return 0
        (rows, columns), packing, num = chunk, self._plan.packing, len(self._counts)
        are_shifted = [bool(sampler.labels_shifted) for sampler in self._mixer.samplers]
        segments, first_bad = self._store.extend(rows, columns, are_shifted)
        if first_bad < len(rows):
            stream, number = rows[first_bad, [STREAM, SAMPLE]].tolist()
            tokens, labels, *_ = columns
            self._plan.streams[stream].check_ids(number, tokens[first_bad])
            self._plan.streams[stream].check_labels(number, labels[first_bad] if labels else None)
        if self._store.payload_bytes:
            stream, number = rows[-1, [STREAM, SAMPLE]].tolist()
            where = self._plan.streams[stream].where(number)
            self._bytes.check(self._store.payload_bytes, where)
        if packing.overflow == "drop":
            dropped = count_dropped(rows, packing.max_seq_len, packing.overflow, num)
            self._counts[:, DROPPED] += dropped
        elif packing.overflow == "truncate":
            is_cut = rows[:, TOKENS] > packing.max_seq_len
            self._counts[:, TRUNCATED] += np.bincount(rows[is_cut, STREAM], minlength=num)
        if len(self._waiting):
            segments = np.concatenate([self._waiting, segments])
        self._waiting = segments
        return len(rows)

    # State.

    def state_dict(self) -> State:
        """Return the packer's state and the queues; see `online.state.as_json`."""
        state: State = {
            "packer": self._packer.state_dict(),
            "full": self._ready,
            "waiting": self._waiting,
            "has_ended": self._has_ended,
            "num_windows": self._num_windows,
        }
        return state

    def load_state_dict(self, state: State) -> None:
        self._packer.load_state_dict(state["packer"])
        self._ready = _packs_of(state["full"])
        self._waiting = np.array(state["waiting"], np.int64).reshape(-1, NO_SEGMENTS.shape[1])
        self._has_ended = bool(state["has_ended"])
        self._num_windows = int(state["num_windows"])


def _packs_of(packs: list[list[Any]]) -> Packs:
    rows = [row for pack in packs for row in pack]
    segments = np.array(rows, np.int64).reshape(-1, NO_SEGMENTS.shape[1])
    return Packs(segments=segments, ends=np.cumsum([len(pack) for pack in packs], dtype=np.int64))
