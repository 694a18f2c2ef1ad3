"""Which stream each slot gets. Shares are met to within one slot at every moment.

With shares 1/2, 1/4, 1/4::

    slot      0  1  2  3  4  5  6  7
    stream    0  1  2  0  0  1  2  0     after n slots: n * share, give or take less than 1

A slot is one pack, one device batch or one global batch, depending on the batching method. To stay
within one slot, each unit of a stream has a first and a last slot. The unit with the earliest
last slot is served (earliest deadline first, Liu & Layland 1973; the two bounds are those of Pfair
scheduling, Baruah et al. 1996). docs/adr/0005 explains the choice.

If slots belong to lanes, each stream must also be spread evenly over the lanes: as long as every
unit can still be served in time, the slot takes the stream that its lane is owed most. The bound
is then met at the end of each block. See docs/adr/0019.

Shares may change linearly over a fixed number of slots; the bounds follow from the exact running
integral. All numbers are relative to the first slot that is computed together with others.

Cost: O(streams) a slot, about 10 ns; 100 ns with lanes. A pure function of (shares, lanes, seed,
seed path).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from streampack.mix.apportion import scaled_shares
from streampack.mix.schedule_kernels import (
    FAR,
    SCALE,
    Rates,
    earliest_deadline,
    spread_over_lanes,
    swap_neighbours,
)
from streampack.philox import random_bits
from streampack.types import Int64Array

CHUNK = 1024  # minimum number of slots computed together
HORIZON = 64  # minimum number of slots for which deadlines are checked ahead, with lanes
FARTHEST = 4096  # ... as far as a rare stream asks for more; rarer ones have less choice of lanes
OWED_STEP = 28  # where chapters meet, debts of lanes are rounded to 2**-4 of a unit


class LinearShares:
    """Shares that change linearly over a number of slots; their running integral is exact.

    Args:
        begin: Share of each stream at the first slot; they sum to 1.
        end: Share of each stream after the last slot; they sum to 1.
        num_slots: Number of slots. None: it has no end.
        ramp_slots: Slots over which the shares change, or None for as many as there are.

    >>> shares = LinearShares([Fraction(1), Fraction(0)], [Fraction(0), Fraction(1)], 100)
    >>> (shares.due(0, 100) / SCALE).tolist()
    [50.0, 50.0]
    """

    def __init__(
        self,
        begin: Sequence[Fraction],
        end: Sequence[Fraction],
        num_slots: int | None,
        ramp_slots: int | None = None,
    ) -> None:
        self.num_slots = FAR if num_slots is None else num_slots
        self._ramp_slots = ramp_slots or self.num_slots
        self._begin, self._end = list(begin), list(end)
        self.horizon = self._ramp_slots
        """Slots for which shares are known; `num_slots` may be fewer."""
        self._fixed: Rates | None = None
        if self._begin == self._end:
            self.horizon = FAR
            scaled = [share * SCALE for share in begin]
            # Integers are faster than fractions.
            self._scaled = [int(s) if s.denominator == 1 else s for s in scaled]
            self._fixed = np.array(list(map(int, scaled)), np.int64), np.zeros(len(scaled))

    def least(self) -> int:
        """Return the smallest share that a stream begins or ends with, scaled by SCALE."""
        return max(1, int(min(share for share in (*self._begin, *self._end) if share) * SCALE))

    def at(self, slot: int) -> Rates:
        """Return the amount due in a slot, and half of its change per slot."""
        if self._fixed is not None:
            return self._fixed
        changes = [(b - a) / self._ramp_slots for a, b in zip(self._begin, self._end, strict=True)]
        shares = [int((a + c * slot) * SCALE) for a, c in zip(self._begin, changes, strict=True)]
        return np.array(shares, np.int64), np.array([float(c * SCALE / 2) for c in changes])

    def due(self, first: int, stop: int) -> Int64Array:
        """Return the amount due in slots [first, stop), scaled by SCALE, shape (streams,)."""
        before, after = self._until(first), self._until(stop)
        return np.array([b - a for a, b in zip(before, after, strict=True)], np.int64)

    def _until(self, slot: int) -> list[int]:
        if self._fixed is not None:
            return [int(share * slot) for share in self._scaled]
        half = Fraction(slot * slot, 2 * self._ramp_slots)
        pairs = zip(self._begin, self._end, strict=True)
        return [int((a * slot + (b - a) * half) * SCALE) for a, b in pairs]


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduleState:
    """The position of a schedule; nothing in it grows with the run."""

    slot: int = 0
    """Slots before it."""
    lags: Int64Array
    """How far each stream is behind, shape (streams,), scaled by SCALE."""
    owed: Int64Array
    """Units owed to each stream in each lane, shape (lanes, streams), scaled by SCALE."""

    def copy(self) -> ScheduleState:
        """Return a copy that does not share memory."""
        return ScheduleState(slot=self.slot, lags=self.lags.copy(), owed=self.owed.copy())


class Schedule:
    """The streams of slots 0, 1, 2, ..., in blocks of a fixed number of slots.

    Args:
        amounts: Expected tokens of each stream, of which only the ratios matter; or the shares.
        block: Slots per block. The streams within a block are shuffled, so with one global batch
            per block every rank sees every stream. With block=1, neighbours are swapped only where
            the bound is still met at every slot.
        seed: The run's seed.
        seed_path: Identifies the schedule, such as ("epoch", 0).
        num_lanes: Number of lanes that take the slots in turn.
        lane_turn: Consecutive slots of a lane.
        start: Where to begin. None: at slot 0.

    >>> blocks = Schedule([2, 1, 1], block=4, seed=17, seed_path=("epoch", 0)).blocks()
    >>> sorted(next(blocks).tolist())
    [0, 0, 1, 2]
    """

    def __init__(
        self,
        amounts: Sequence[int] | LinearShares,
        *,
        block: int,
        seed: int,
        seed_path: tuple[int | str, ...],
        num_lanes: int = 1,
        lane_turn: int = 1,
        start: ScheduleState | None = None,
    ) -> None:
        if not isinstance(amounts, LinearShares):
            shares = [Fraction(int(share), SCALE) for share in scaled_shares(amounts, SCALE)]
            amounts = LinearShares(shares, shares, None)
        self._shares = amounts
        self._block = block
        self._seed = seed
        self._seed_path = seed_path
        self._num_lanes = num_lanes
        self._lane_turn = lane_turn
        ahead = self._slots_ahead() if num_lanes > 1 else 0
        self._num_ahead = 1 << (ahead // block + 1).bit_length()
        self._width = -(-max(CHUNK, ahead) // block) * block  # several whole blocks, for speed
        self.now = self._beginning() if start is None else start.copy()
        """Where the next chunk begins."""

    def _slots_ahead(self) -> int:
        """Return for how many slots deadlines are checked ahead: as a rule the rarest's period.

        A lane can take a unit before it has to be served only where its deadline is known to leave
        enough slots for the others.
        """
        period = SCALE // self._shares.least() + 1
        return max(HORIZON, 2 * self._num_lanes * self._lane_turn, min(FARTHEST, period))

    def _beginning(self) -> ScheduleState:
        num_streams = len(self._shares.at(0)[0])
        # Start from random debts, so that the lanes do not all begin with the same stream.
        bits = random_bits(self._num_lanes * num_streams, self._seed, *self._seed_path, "lanes")
        owed = (bits >> np.uint64(34)).astype(np.int64).reshape(self._num_lanes, -1)
        return ScheduleState(lags=np.zeros(num_streams, np.int64), owed=owed)

    def blocks(self) -> Iterator[Int64Array]:
        """Yield the streams of one block at a time, shape (block,)."""
        for blocks in self.chunks():
            yield from blocks

    def chunks(self) -> Iterator[Int64Array]:
        """Yield the streams of several blocks at a time, shape (num_blocks, block)."""
        find = self._spread if self._num_lanes > 1 else self._in_order
        while (left := self._shares.num_slots - self.now.slot) > 0:
            yield find(min(self._width, left)).reshape(-1, self._block)

    def _in_order(self, num_slots: int) -> Int64Array:
        now, first = self.now, self.now.slot
        # Neighbours are swapped over a whole chunk, even where the schedule ends inside it: a
        # chapter that is lengthened, or ends early, keeps the slots that it has in common.
        known = self._shares.horizon - first
        out = np.empty(min(self._width, known) if self._block == 1 else num_slots, np.int64)
        bounds = np.empty((len(out), 2), np.int64)
        units = np.empty((2, len(now.lags)), np.int64)
        earliest_deadline(self._shares.at(first), now.lags.copy(), units, out, bounds)
        if self._block > 1:
            bits = random_bits(len(out), self._seed, *self._seed_path, "block", first)
            order = np.argsort(bits.reshape(-1, self._block), axis=1, kind="stable")
            out = np.take_along_axis(out.reshape(-1, self._block), order, axis=1).ravel()
        elif len(out) > 1:
            bits = random_bits(4 * len(out), self._seed, *self._seed_path, "swap", first)
            order = ((bits >> np.uint64(1)) % np.uint64(len(out) - 1)).astype(np.int64)
            swap_neighbours(out, bounds, order, (bits & np.uint64(1)).astype(np.int64))
        out = out[:num_slots]
        now.lags -= np.bincount(out, minlength=len(now.lags)) * SCALE
        self._move(num_slots)
        return out

    def _spread(self, num_slots: int) -> Int64Array:
        now, lane_turn = self.now, self._lane_turn
        out = np.empty(num_slots, np.int64)
        units = np.empty((2, len(now.lags)), np.int64)
        rooms = np.empty(self._num_ahead, np.int64)
        # Not what is left in the schedule: a chapter that is lengthened, or ends early, keeps the
        # slots that it has in common.
        shape = (now.slot, self._block, lane_turn, self._shares.horizon - now.slot)
        rates = self._shares.at(now.slot)
        spread_over_lanes(rates, now.lags, now.owed, units, rooms, shape, out)
        first = self._move(len(out))
        if lane_turn == 1:
            return out
        slots = first + np.arange(len(out))
        begins = (slots % lane_turn == 0) | (slots % self._block == 0)
        bits = random_bits(len(out), self._seed, *self._seed_path, "run", first)
        # Shuffle the slots of each turn within its block.
        return out[np.argsort(np.cumsum(begins) << 32 | (bits >> np.uint64(32)).astype(int))]

    def _move(self, num_slots: int) -> int:
        now, first = self.now, self.now.slot
        now.slot += num_slots
        now.lags += self._shares.due(first, now.slot)
        return first


def rounded_debts(owed: Int64Array) -> Int64Array:
    """Return debts of lanes as the next chapter begins with them: rounded to 2**-4 of a unit."""
    return (owed + (1 << OWED_STEP - 1)) >> OWED_STEP << OWED_STEP
