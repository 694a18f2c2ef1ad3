"""Which stream each slot holds. Shares are met to within one slot at every moment.

With shares 1/2, 1/4, 1/4::

    slot      0  1  2  3  4  5  6  7
    stream    0  1  2  0  0  1  2  0     after n slots: n * share, give or take less than 1

A slot is one pack, one device batch or one global batch, depending on the batching method. To stay
within one slot, each unit of a stream must lie in a certain window of slots. The unit whose window
closes first is served (earliest deadline first, which on one machine meets every deadline: Liu &
Layland 1973; the windows are those of Pfair scheduling, Baruah et al. 1996). All arithmetic is on
integers.

If slots belong to lanes, each stream must also be spread evenly over the lanes. Deadlines leave
slack: as long as every unit can still be served in time, the slot takes the stream that its lane is
owed most. The bound then holds at the end of each block, and at any time a stream's units in two
lanes differ by at most a small constant.

Cost: O(streams) a slot, about 10 ns; 100 ns with lanes. A pure function of (shares, lanes, seed,
place).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

from streampack._numba import compiled
from streampack.mix.apportion import scaled_shares
from streampack.rng import random_bits
from streampack.types import Int64Array

SCALE = 1 << 32  # shares are counted in 2**-32, so products fit 64 bits for 2**31 slots
WINDOW = 1024  # minimum number of slots computed together
MAX_SLOTS = 1 << 31
HORIZON = 64  # minimum number of slots for which deadlines are checked ahead, with lanes


@compiled
def _earliest_deadline(
    shares: Int64Array, served: Int64Array, first: int, out: Int64Array, windows: Int64Array
) -> None:
    """Fill `out` with the streams of slots first, first + 1, ...; `served` is updated."""
    for i in range(len(out)):
        best = -1
        best_deadline = np.int64(0)
        for stream in range(len(shares)):
            share = shares[stream]
            # Eligible once (first + i + 1) * share > served: it would not get a unit ahead.
            if share > 0 and (first + i + 1) * share > served[stream] * SCALE:
                deadline = ((served[stream] + 1) * SCALE + share - 1) // share
                if best < 0 or deadline < best_deadline:
                    best = stream
                    best_deadline = deadline
        out[i] = best
        windows[i, 0] = served[best] * SCALE // shares[best]  # first slot of the unit's window
        windows[i, 1] = best_deadline - 1  # last slot of the unit's window
        served[best] += 1


@compiled
def _swap_neighbours(
    out: Int64Array, windows: Int64Array, first: int, order: Int64Array, coins: Int64Array
) -> None:
    """Swap random neighbours if both stay inside their windows, so that the bound still holds."""
    for turn in range(len(order)):
        i = order[turn]
        late, early = windows[i, 1] > first + i, windows[i + 1, 0] <= first + i
        if coins[turn] and late and early:
            out[i], out[i + 1] = out[i + 1], out[i]
            for edge in range(2):
                windows[i, edge], windows[i + 1, edge] = windows[i + 1, edge], windows[i, edge]


@compiled
def _room_at(shares: Int64Array, served: Int64Array, slot: int, end: int) -> int:
    """Return the slack before `end`: slots not needed by units that are due by then."""
    room = end - slot
    for stream in range(len(shares)):
        room -= max(0, (end * shares[stream] >> 32) - served[stream])
    return room


@compiled
def _most_owed(
    state: tuple[Int64Array, Int64Array, Int64Array], owed: Int64Array, slot: int, latest: int
) -> int:
    """Return the stream owed most among those due by `latest`, or else the first one due."""
    shares, served, deadlines = state
    best = first_due = -1
    for stream in range(len(shares)):
        # Eligible if it would not get a unit ahead.
        if (slot + 1) * shares[stream] > served[stream] * SCALE:
            if first_due < 0 or deadlines[stream] < deadlines[first_due]:
                first_due = stream
            if deadlines[stream] <= latest and (best < 0 or owed[stream] > owed[best]):
                best = stream
    return best if best >= 0 else first_due


@compiled
def _look_ahead(
    state: tuple[Int64Array, Int64Array, Int64Array],
    rooms: Int64Array,
    slot: int,
    block: int,
    tight: int,
) -> int:
    """Start a block: compute the slack of one more block, and return the first without slack."""
    shares, served, _ = state
    mask = len(rooms) - 1
    current = slot // block
    last = current + mask
    rooms[last & mask] = _room_at(shares, served, slot, (last + 1) * block)
    if tight < current or tight == last - 1:
        tight = max(tight, current)
        while tight < last and rooms[tight & mask] > 0:
            tight += 1
    return tight


@compiled
def _spread_over_lanes(
    state: tuple[Int64Array, Int64Array, Int64Array],
    owed: Int64Array,
    rooms: Int64Array,
    shape: tuple[int, int, int],
    out: Int64Array,
) -> None:
    """Fill `out` with the streams of slots first, first + 1, ..., which rotate over the lanes.

    Args:
        state: For each stream: its share, the units served before `first`, and the end of the block
            in which its next unit is due. Each has shape (streams,). The last two are updated.
        owed: Units owed to each stream in each lane, shape (lanes, streams), scaled by SCALE.
            Updated.
        rooms: Ring buffer of a power of 2: slack before the end of block b, at b modulo its
            length. Updated. At 0, nothing that is due later may be served before that end.
        shape: (first slot, which starts a block; slots per block; consecutive slots per lane).
        out: Whole blocks.
    """
    shares, served, deadlines = state
    first, block, run = shape
    mask = len(rooms) - 1
    tight = -1
    for i in range(len(out)):
        slot = first + i
        if slot % block == 0:
            tight = _look_ahead(state, rooms, slot, block, tight)
        lane = slot // run % len(owed)
        for stream in range(len(shares)):
            owed[lane, stream] += shares[stream]
        best = _most_owed(state, owed[lane], slot, (tight + 1) * block)
        current = slot // block
        for ahead in range(current, min(deadlines[best] // block - 1, current + mask + 1)):
            rooms[ahead & mask] -= 1
            if rooms[ahead & mask] == 0 and ahead < tight:
                tight = ahead
        out[i] = best
        owed[lane, best] -= SCALE
        served[best] += 1
        due = ((served[best] + 1) * SCALE + shares[best] - 1) // shares[best]
        deadlines[best] = -(-due // block) * block


class Schedule:
    """The streams of slots 0, 1, 2, ..., in blocks of a fixed number of slots.

    Args:
        amounts: Expected tokens of each stream; only their ratios matter.
        block: Slots per block. The streams within a block are shuffled, so with one global batch
            per block every rank sees every stream. With block=1, neighbours are swapped only where
            the bound still holds at every slot.
        seed: The run's seed.
        place: Identifies the schedule, such as ("epoch", 0).
        num_lanes: Number of lanes that take the slots in turn.
        run: Consecutive slots per lane.

    >>> blocks = Schedule([2, 1, 1], block=4, seed=17, place=("epoch", 0)).blocks()
    >>> sorted(next(blocks).tolist())
    [0, 0, 1, 2]
    """

    def __init__(
        self,
        amounts: Sequence[int],
        *,
        block: int,
        seed: int,
        place: tuple[int | str, ...],
        num_lanes: int = 1,
        run: int = 1,
    ) -> None:
        self._shares = scaled_shares(amounts, SCALE)
        self._block = block
        self._seed = seed
        self._place = place
        self._num_lanes = num_lanes
        self._run = run

    def blocks(self) -> Iterator[Int64Array]:
        """Yield the streams of one block at a time, shape (block,)."""
        for blocks in self.windows():
            yield from blocks

    def windows(self) -> Iterator[Int64Array]:
        """Yield the streams of several blocks at a time, shape (num_blocks, block)."""
        if self._num_lanes > 1:
            yield from self._lane_windows()
            return
        served = np.zeros(len(self._shares), np.int64)
        width = -(-WINDOW // self._block) * self._block  # several whole blocks, for speed
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

    def _lane_windows(self) -> Iterator[Int64Array]:
        """Implement `windows` for slots that rotate over lanes."""
        shares, block = self._shares, self._block
        served = np.zeros(len(shares), np.int64)
        due = [-(-SCALE // int(share)) if share else MAX_SLOTS for share in shares]
        state = (shares, served, np.array([-(-slot // block) * block for slot in due]))
        # Start from random debts, so that the lanes do not all begin with the same stream.
        bits = random_bits(self._num_lanes * len(shares), self._seed, *self._place, "lanes")
        owed = (bits >> np.uint64(34)).astype(np.int64).reshape(self._num_lanes, -1)
        num_ahead = max(HORIZON, 2 * self._num_lanes * self._run) // block + 1
        rooms = np.zeros(1 << num_ahead.bit_length(), np.int64)
        for ahead in range(len(rooms) - 1):
            rooms[ahead] = _room_at(shares, served, 0, (ahead + 1) * block)
        width = -(-WINDOW // block) * block
        for first in count(0, width):
            out = np.empty(width, np.int64)
            _spread_over_lanes(state, owed, rooms, (first, block, self._run), out)
            if self._run > 1:
                slots = first + np.arange(width)
                begins = (slots % self._run == 0) | (slots % block == 0)
                bits = random_bits(width, self._seed, *self._place, "run", first)
                # Shuffle the slots of each run within its block.
                out = out[np.argsort(np.cumsum(begins) << 32 | (bits >> np.uint64(32)).astype(int))]
            yield out.reshape(-1, block)
