"""The complete packs of one packer, which leave as they came or shuffled within windows.

Windows of four packs::

    packer --> 0 1 2 3 | 4 5 ...       a window waits until it is complete
               2 0 3 1 --> batches     and leaves before the next one is packed

The pieces of a long sample follow each other, so without a shuffle they are trained on together. A
window fills before it leaves: its first pack waits for its last, and a run that resumes shuffles
every later window as the run that was saved.

Cost: about 10 us a window. Memory: the tokens of one window, in the `SampleBuffer`.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from streampack.config import Buffers
from streampack.online.byte_budget import footprint_of
from streampack.online.plan import FlowPlan
from streampack.rng import permutation
from streampack.types import Int64Array, Packs, State

FEWEST_PACKS = 2  # a window of one pack keeps its order


def fitting_window(plan: FlowPlan, buffers: Buffers, num_workers: int) -> int:
    """Return the packs that each worker shuffles together, at most `plan.pack_shuffle`.

    They fit beside the packers' buffers and one batch, except if that leaves fewer than two packs;
    `max_prefetch` refuses such buffers.
    """
    limits = [buffers.worker_tokens]
    if buffers.rank_tokens is not None:
        limits.append(buffers.rank_tokens // max(num_workers, 1))
    footprint = footprint_of(plan, num_workers)
    used = footprint.packer_tokens + footprint.batch_tokens
    rooms = [(limit - used) // plan.packing.max_seq_len for limit in limits if limit is not None]
    return max(min([plan.pack_shuffle, *rooms]), min(plan.pack_shuffle, FEWEST_PACKS))


class PackWindow:
    """A queue of complete packs, shuffled in windows of `size`; 0: they leave as they came.

    At most `most` packs are asked for in one call, unless a batch needs more. `seed` and
    `seed_path`, which identifies the packer and the epoch, decide the order of each window.
    >>> window = PackWindow(size=2, most=8, seed=1, seed_path=(0,))
    >>> window.append(Packs(segments=np.zeros((3, 6), np.int64), ends=np.array([1, 2, 3])))
    >>> len(window.ready), window.missing(3)
    (2, 1)
    """

    def __init__(self, *, size: int, most: int, seed: int, seed_path: tuple[int, ...]) -> None:
        self._size = size
        self._most = most
        self._seed = seed
        self._seed_path = seed_path
        self._arrived: list[Int64Array] = []  # packs of the window that is not complete yet
        self.ready: deque[Int64Array] = deque()
        """Packs that can leave; the caller takes them from the left."""
        self.num_appended = 0
        """Packs that this process has added."""
        self._num_windows = 0

    def missing(self, wanted: int) -> int:
        """Return how many packs to ask the packer for, if `wanted` are to be ready."""
        if not self._size:
            return wanted - len(self.ready)
        return min(self._size - len(self._arrived), self._most)

    def append(self, packs: Packs) -> None:
        """Add complete packs."""
        self.num_appended += len(packs.ends)
        begin = 0
        for end in packs.ends.tolist():
            (self._arrived if self._size else self.ready).append(packs.segments[begin:end])
            begin = end
        while self._size and len(self._arrived) >= self._size:
            self._shuffle(self._size)

    def finish(self) -> None:
        """End the last window: no more packs will come."""
        if self._arrived:
            self._shuffle(len(self._arrived))

    def _shuffle(self, num_packs: int) -> None:
        seed_path = (*self._seed_path, self._num_windows)
        order = permutation(num_packs, self._seed, "packs of iterables", *seed_path)
        self.ready.extend(self._arrived[index] for index in order.tolist())
        del self._arrived[:num_packs]
        self._num_windows += 1

    # State.

    def packs(self) -> list[Int64Array]:
        """Return the segment rows of all packs that wait here."""
        return [*self.ready, *self._arrived]

    def state_dict(self) -> State:
        """Return the packs, as JSON."""
        state: State = {"full": [rows.tolist() for rows in self.ready]}
        if self._size:
            state["arrived"] = [rows.tolist() for rows in self._arrived]
            state["num_windows"] = self._num_windows
        return state

    def load_state_dict(self, state: State) -> None:
        """Resume from a state of a queue with the same windows."""
        self.ready.clear()
        self.ready.extend(np.array(rows, np.int64) for rows in state["full"])
        if self._size:
            self._arrived = [np.array(rows, np.int64) for rows in state["arrived"]]
            self._num_windows = int(state["num_windows"])
