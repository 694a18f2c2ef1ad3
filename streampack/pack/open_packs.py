"""First fit and best fit: several packs are open, and each segment goes into one of them.

With max_seq_len=8, open_packs=2 and segments in arrival order::

    arrival       A4  B5  C3  D4              A and B open a pack each, 4 and 3 tokens are free
    first fit     A A A A C C C .             C goes into the oldest pack that has room
                  B B B B B . . .             D fits nowhere: A closes, and D opens a pack
    best fit      B B B B B C C C             C goes where it leaves the least
                  A A A A D D D D

A segment that fits nowhere opens a new pack. If `open_packs` are open, one is closed first: the
oldest for first fit, the fullest for best fit. With `split_gap`, it takes the head of that segment.
With `guard`, a pack that has seen that many packs close is closed next.

Cost: `open_packs` comparisons a segment, about 30 ns with 8.
"""

from __future__ import annotations

import numpy as np

from streampack.config import Packing
from streampack.pack import kernels
from streampack.pack.buffered import BufferedPacker, limits_of
from streampack.types import LENGTH, Int64Array, Packs, State


class OpenPacksPacker(BufferedPacker):
    """A packer that keeps several packs open. Every buffered segment is in one of them.

    >>> rows = [[0, 0, sample, 0, length, length] for sample, length in enumerate([4, 5, 3, 4])]
    >>> for method in ("first_fit", "best_fit"):
    ...     packer = OpenPacksPacker(method, Packing(max_seq_len=8, method=method, open_packs=2))
    ...     print([pack[:, 2].tolist() for pack in packer.add(np.array(rows))])
    [[0, 2]]
    [[1, 2], [0, 3]]
    """

    def __init__(self, method: str, packing: Packing):
        super().__init__(method, limits_of(packing))
        self._num_open = packing.num_open_packs
        self._sizes = np.zeros(0, np.int64)  # number of segments in each open pack, oldest first

    def state_dict(self) -> State:
        """Return the buffer, and its division into open packs."""
        return {**super().state_dict(), "packs": self._sizes.tolist()}

    def _restore(self, state: State) -> None:
        super()._restore(state)
        self._sizes = sizes = np.array(state["packs"], np.int64).reshape(-1)
        self._waited = np.array(state.get("waited", 0 * sizes), np.int64).reshape(len(sizes))

    def _pack(self, segments: Int64Array, *, final: bool) -> Packs:
        sizes, num_held, work = self._sizes, len(self._buffered), self.open_work(segments)
        ends = np.cumsum(sizes)
        opened = np.zeros((self._num_open, kernels.NUM_OPEN_COLUMNS), np.int64)
        held = opened[: len(sizes)]
        held[:, kernels.COUNT], held[:, kernels.OPENED] = sizes, -self._waited
        held[:, kernels.FIRST], held[:, kernels.LAST] = ends - sizes, ends - 1
        taken = np.append(0, np.cumsum(work.rows[:num_held, LENGTH]))
        held[:, kernels.FREE] = self._limits.pack_tokens - (taken[ends] - taken[ends - sizes])
        work.pool[kernels.CHOSEN, :num_held] = np.arange(1, num_held + 1)
        work.pool[kernels.CHOSEN, ends - 1] = kernels.NO_ROW
        work.cursor[kernels.NUM_OPEN] = len(sizes)
        kernels.fit_open(self._limits, work, opened, self._method == "best_fit", final)
        packs = self.close_work(work)
        opened = opened[: work.cursor[kernels.NUM_OPEN]]
        self._sizes = opened[:, kernels.COUNT].copy()
        self._waited = work.cursor[kernels.POOL_PACKS] - opened[:, kernels.OPENED]
        return packs
