"""Which stream each slot holds: shares kept to within one slot at every moment.

With shares 1/2, 1/4, 1/4::

    slot      0  1  2  3  4  5  6  7
    stream    0  1  2  0  0  1  2  0     after n slots: n * share, give or take less than 1

A slot is one pack, one device batch or one global batch; the batching method says which. Each next
unit of a stream has a window of slots in which it must lie for that promise to hold, and the unit
whose window closes first is served (earliest deadline first, which on one machine meets every
deadline: Liu & Layland 1973; the windows are those of Pfair scheduling, Baruah et al. 1996).
Integers only.

Cost: O(streams) a slot, about 10 ns. A pure function of (shares, seed, place).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

from streampack.compiled import compiled
from streampack.mix.apportion import scaled_shares
from streampack.rng import random_bits
from streampack.types import Int64Array

__all__ = ["SCALE", "Schedule"]

SCALE = 1 << 32  # shares are counted in 2**-32, so products fit 64 bits for 2**31 slots
WINDOW = 1024  # slots, at least, that are put in order together


@compiled
def _earliest_deadline(
    shares: Int64Array, served: Int64Array, first: int, out: Int64Array, windows: Int64Array
) -> None:
    """Fill `out` with the streams of slots first, first + 1, ...; `served` moves on."""
    for i in range(len(out)):
        best = -1
        best_deadline = np.int64(0)
        for stream in range(len(shares)):
            share = shares[stream]
            # Eligible once (first + i + 1) * share > served: serving it would not run ahead by one.
            if share > 0 and (first + i + 1) * share > served[stream] * SCALE:
                deadline = ((served[stream] + 1) * SCALE + share - 1) // share
                if best < 0 or deadline < best_deadline:
                    best = stream
                    best_deadline = deadline
        out[i] = best
        windows[i, 0] = served[best] * SCALE // shares[best]  # first slot where it may lie
        windows[i, 1] = best_deadline - 1  # last slot where it may lie
        served[best] += 1


@compiled
def _swap_neighbours(
    out: Int64Array, windows: Int64Array, first: int, order: Int64Array, coins: Int64Array
) -> None:
    """Swap random neighbours where both stay inside their windows, so that the promise holds."""
    for turn in range(len(order)):
        i = order[turn]
        late, early = windows[i, 1] > first + i, windows[i + 1, 0] <= first + i
        if coins[turn] and late and early:
            out[i], out[i + 1] = out[i + 1], out[i]
            for edge in range(2):
                windows[i, edge], windows[i + 1, edge] = windows[i + 1, edge], windows[i, edge]


class Schedule:
    """The streams of slots 0, 1, 2, ... in blocks of a fixed number of slots.

    Args:
        amounts: Expected tokens of each stream; only their ratios matter.
        block: Slots in a block. The streams of a block are put in random order, so with blocks of
            one global batch every rank sees every stream; with block=1 only swaps that keep the
            promise at every slot are made.
        seed: The run's seed.
        place: What this schedule is for, such as an epoch.

    >>> blocks = Schedule([2, 1, 1], block=4, seed=17, place=("epoch", 0)).blocks()
    >>> sorted(next(blocks).tolist())
    [0, 0, 1, 2]
    """

    def __init__(
        self, amounts: Sequence[int], *, block: int, seed: int, place: tuple[int | str, ...]
    ) -> None:
        self._shares = scaled_shares(amounts, SCALE)
        self._block = block
        self._seed = seed
        self._place = place

    def blocks(self) -> Iterator[Int64Array]:
        """Yield the streams of one block after the other, each of shape (block,)."""
        for blocks in self.windows():
            yield from blocks

    def windows(self) -> Iterator[Int64Array]:
        """Yield the streams of some blocks at once, shape (num_blocks, block)."""
        served = np.zeros(len(self._shares), np.int64)
        width = -(-WINDOW // self._block) * self._block  # whole blocks, some at once for speed
        for first in count(0, width):
            out = np.empty(width, np.int64)
            windows = np.empty((width, 2), np.int64)
            _earliest_deadline(self._shares, served, first, out, windows)
            blocks = out.reshape(-1, self._block)
            if self._block == 1:
                self._swap_some(out, windows, first)
                yield blocks
            else:
                bits = random_bits(width, self._seed, *self._place, "block", first)
                order = np.argsort(bits.reshape(blocks.shape), axis=1, kind="stable")
                yield np.take_along_axis(blocks, order, axis=1)

    def _swap_some(self, out: Int64Array, windows: Int64Array, first: int) -> None:
        bits = random_bits(4 * len(out), self._seed, *self._place, "swap", first)
        order = ((bits >> np.uint64(1)) % np.uint64(len(out) - 1)).astype(np.int64)
        _swap_neighbours(out, windows, first, order, (bits & np.uint64(1)).astype(np.int64))
