"""The packs of one packer of a worker, in the order in which they leave.

::

    StreamMixer --a chunk--> waiting segments --> packer --> packs --> 0 1 2 3 | 4 5 ..  windows
                             (tokens: SampleStore)                     2 0 3 1 --> batches

The packer takes what the next packs need, and the rest of a chunk waits.

Cost: about 60 us a chunk, and 40 us per call of the packer. Memory: the tokens of a window and of a
chunk, in the `SampleStore`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

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

CHUNK_TOKENS = 1 << 16  # of a chunk, if a device batch has fewer


class LiveQueue:
    """The packs of one packer, shuffled in windows of `window` packs; 0: they leave as they came.

    `seed_path` identifies the epoch, the worker and the packer, and decides the order of each
    window. Its last number is the stream that is packed, unless all are. The rest is the worker's;
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
        window: int,
    ) -> None:
        self._number = number = seed_path[-1]
        self._plan = plan
        self._mixer = mixer
        self._store = store
        self._bytes = held_bytes
        self._counts = counts
        self._packer = plan.packer()
        own = mixer.samplers if plan.num_packers == 1 else [mixer.samplers[number]]
        self._chunk_samples = min(sampler.most_together for sampler in own)
        row_tokens = plan.packing.row_tokens
        # Samples with payloads are drawn one by one, as the packer needs them.
        has_payloads = self._chunk_samples == 1
        self._chunk_tokens = 1 if has_payloads else max(plan.batch_size * row_tokens, CHUNK_TOKENS)
        self._waiting = NO_SEGMENTS  # drawn, and not given to the packer yet
        self._window = window
        self._seed_path = seed_path
        self._num_windows = 0
        self._arrived = NO_PACKS  # packs of the window that is not complete yet
        self._ready = NO_PACKS  # packs that can leave
        self._has_ended = False

    def has_pack(self) -> bool:
        """Whether there is another pack, which may have to be completed."""
        while not len(self._ready) and self._feed(1):
            pass
        return len(self._ready) > 0

    def take(self, most: int) -> Packs:
        while len(self._ready) < most and self._feed(most):
            pass
        num = len(self._ready)
        packs, self._ready = self._ready.slice(0, most), self._ready.slice(min(most, num), num)
        return packs

    def _feed(self, wanted: int) -> bool:
        """Give the packer its next segments; False once the packs have ended.

        It stops when `wanted` packs are ready, or some more of a window have arrived.
        """
        if self._has_ended:
            return False
        num_packs = wanted - len(self._ready)
        if self._window:
            num_packs = min(self._window - len(self._arrived), self._plan.batch_size)
        needed = min(num_packs * self._plan.packing.row_tokens, self._chunk_tokens)
        has_more = True
        while self._waiting[:, LENGTH].sum() < needed and (has_more := self._draw()):
            pass
        packs, num_added = self._packer.add_until(self._waiting, num_packs)
        num_tokens = int(self._waiting[:num_added, LENGTH].sum())
        self._waiting = self._waiting[num_added:]
        self._store.count(num_tokens)
        if not has_more and not len(self._waiting):
            self._has_ended = True
            packs = Packs.join([packs, self._packer.flush()])
        self._append(packs)
        return True

    def _draw(self) -> bool:
        chunk = self._mixer.draw(self._number, self._chunk_tokens, self._chunk_samples)
        if chunk is None:
            return False
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
            dropped = count_dropped(rows, packing.row_tokens, packing.overflow, num)
            self._counts[:, DROPPED] += dropped
        elif packing.overflow == "truncate":
            is_cut = rows[:, TOKENS] > packing.row_tokens
            self._counts[:, TRUNCATED] += np.bincount(rows[is_cut, STREAM], minlength=num)
        if len(self._waiting):
            segments = np.concatenate([self._waiting, segments])
        self._waiting = segments
        return True

    # Windows.

    def _append(self, packs: Packs) -> None:
        if not self._window:
            self._ready = Packs.join([self._ready, packs])
            return
        arrived = Packs.join([self._arrived, packs])
        while len(arrived) >= self._window or (self._has_ended and len(arrived)):
            num, seed_path = min(len(arrived), self._window), (*self._seed_path, self._num_windows)
            order = permutation(num, self._plan.seed, "packs of iterables", *seed_path)
            self._ready = Packs.join([self._ready, take_packs(arrived, order)])
            arrived = arrived.slice(num, len(arrived))
            self._num_windows += 1
        self._arrived = arrived

    # State.

    def state_dict(self) -> State:
        """Return the packer's state and the queues; see `online.state.as_json`."""
        state: State = {
            "packer": self._packer.state_dict(),
            "full": self._ready,
            "waiting": self._waiting,
            "has_ended": self._has_ended,
        }
        if self._window:
            state |= {"arrived": self._arrived, "num_windows": self._num_windows}
        return state

    def load_state_dict(self, state: State) -> None:
        self._packer.load_state_dict(state["packer"])
        self._ready = _packs_of(state["full"])
        self._waiting = np.array(state["waiting"], np.int64).reshape(-1, NO_SEGMENTS.shape[1])
        self._has_ended = bool(state["has_ended"])
        if self._window:
            self._arrived = _packs_of(state["arrived"])
            self._num_windows = int(state["num_windows"])


def _packs_of(packs: list[list[Any]]) -> Packs:
    rows = [row for pack in packs for row in pack]
    segments = np.array(rows, np.int64).reshape(-1, NO_SEGMENTS.shape[1])
    return Packs(segments=segments, ends=np.cumsum([len(pack) for pack in packs], dtype=np.int64))
