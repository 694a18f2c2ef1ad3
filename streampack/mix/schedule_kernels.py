"""Earliest deadline first: the loops that choose the stream of each slot.

::

    slots that a unit may have   web    |---0---|---1---|---2---|
                                 code   |-------0-------|-------1-------|
    served: closes first                web code web    web ...

`schedule.py` has the promise, and keeps the amounts carried from chunk to chunk.
With lanes, a slot without a forced stream takes the one that its lane is owed most.

Cost: O(streams) a slot, about 10 ns; 100 ns with lanes.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from streampack._numba import compiled
from streampack.types import Int64Array

SCALE = 1 << 32  # shares are counted in 2**-32
FAR = 1 << 44  # more slots than any schedule has

Rates: TypeAlias = tuple[Int64Array, npt.NDArray[np.float64]]
"""Amount due to each stream in a slot, scaled by SCALE, and half of its change per slot."""


@compiled
def _first_of(slots: Int64Array) -> int:
    best = 0
    for stream in range(len(slots)):
        if slots[stream] < slots[best]:
            best = stream
    return best


@compiled
def _due(share: int, slope: float, num_slots: int) -> int:
    """Return the amount due to a stream in the next slots, scaled by SCALE."""
    # The share grows by 2 * slope a slot: the first n sum up to share * n + slope * n**2.
    due = share * num_slots
    if slope != 0.0:
        due += math.floor(slope * num_slots * num_slots)
    return due


@compiled
def _slots_for(need: int, share: int, slope: float) -> int:
    """Return the least number of slots after which `need` is due; FAR if it never is."""
    if slope == 0.0:
        return FAR if share <= 0 else -(-need // share)
    if need <= 0:
        return 0
    # The smaller root of slope * n**2 + share * n = need, in the form that does not cancel digits.
    square = float(share) * share + 4.0 * slope * need
    base = share + math.sqrt(max(square, 0.0))
    # A share that shrinks to 0 may never reach `need`.
    if square < 0.0 or base <= 0.0 or 2.0 * need / base >= FAR:
        return FAR
    num_slots = math.ceil(2.0 * need / base)
    # Floats may be off by a slot or two; integers decide.
    while num_slots > 0 and _due(share, slope, num_slots - 1) >= need:
        num_slots -= 1
    return num_slots


@compiled
def _bounds_of(lag: int, share: int, slope: float) -> tuple[int, int]:
    """Return the first slot in which the next unit may be served, and one past its last.

    Slots count from where the stream is `lag` behind. The unit may be served as soon as the stream
    would not get a whole unit ahead, and must be before it is a whole unit behind.
    """
    return _slots_for(1 - lag, share, slope) - 1, _slots_for(SCALE - lag, share, slope)


@compiled
def earliest_deadline(
    rates: Rates,
    lags: Int64Array,
    units: Int64Array,
    out: Int64Array,
    bounds: Int64Array,
) -> None:
    """Fill `out` with the streams of the next slots; `lags` decrease by the units served.

    `units` has room for the bounds of each stream's next unit, shape (2, streams).
    """
    shares, slopes = rates
    opens, closes = units
    for stream in range(len(lags)):
        opens[stream], closes[stream] = _bounds_of(lags[stream], shares[stream], slopes[stream])
    for i in range(len(out)):
        best = -1
        for stream in range(len(lags)):
            # On a tie the first stream wins, in every process.
            if opens[stream] <= i and (best < 0 or closes[stream] < closes[best]):
                best = stream
        if best < 0:  # only where shares that change were rounded down
            best = _first_of(opens)
        out[i] = best
        bounds[i, 0] = opens[best]
        bounds[i, 1] = closes[best] - 1
        lags[best] -= SCALE
        opens[best], closes[best] = _bounds_of(lags[best], shares[best], slopes[best])


@compiled
def swap_neighbours(
    out: Int64Array, bounds: Int64Array, order: Int64Array, coins: Int64Array
) -> None:
    """Swap random neighbours if both stay inside their bounds, so that the bound is still met."""
    # Each swap sees the bounds that earlier swaps left, so a unit may move by several slots.
    for place in range(len(order)):
        i = order[place]
        # Slot i may become i + 1, and slot i + 1 may become i.
        late, early = bounds[i, 1] > i, bounds[i + 1, 0] <= i
        if coins[place] and late and early:
            out[i], out[i + 1] = out[i + 1], out[i]
            for edge in range(2):
                bounds[i, edge], bounds[i + 1, edge] = bounds[i + 1, edge], bounds[i, edge]


@compiled
def _room_at(rates: Rates, lags: Int64Array, num_left: int, num_slots: int) -> int:
    """Return the slack of the next slots: those not needed by units that are due in `num_slots`.

    The first slots of these are used already; `num_left` are not.
    """
    shares, slopes = rates
    room = num_left
    for stream in range(len(shares)):
        if shares[stream] > 0 or slopes[stream] > 0.0:
            # Whole units only: the fraction of a unit is due later.
            due = lags[stream] + _due(shares[stream], slopes[stream], num_slots)
            room -= max(0, due >> 32)
    return room


@compiled
def _most_owed(
    opens: Int64Array, deadlines: Int64Array, owed: Int64Array, slot: int, latest: int
) -> int:
    """Return the stream owed most among those due by `latest`, or else the first one due."""
    best = first_due = -1
    for stream in range(len(opens)):
        if opens[stream] <= slot:  # it would not get a unit ahead
            if first_due < 0 or deadlines[stream] < deadlines[first_due]:
                first_due = stream
            if deadlines[stream] <= latest and (best < 0 or owed[stream] > owed[best]):
                best = stream
    if best >= 0:
        return best
    return first_due if first_due >= 0 else _first_of(opens)


@compiled
def _look_ahead(
    rates: Rates,
    lags: Int64Array,
    rooms: Int64Array,
    place: tuple[int, int, int],
    tight: int,
) -> int:
    """Start a block: compute the slack of one more block, and return the next without slack.

    `place` is the slot, slots per block, and slots left for which shares are known. `tight` is the
    result for the block before. Others are as in `spread_over_lanes`.
    """
    slot, block, num_left = place
    # A power of 2, so `& mask` is the place in the ring.
    mask = len(rooms) - 1
    current = slot // block
    last = current + mask
    num_slots = min((last + 1) * block, num_left)
    rooms[last & mask] = _room_at(rates, lags, num_slots - slot, num_slots)
    # Otherwise the next block without slack is still ahead, and stays the next.
    if tight <= current or tight == last - 1:
        tight = max(tight, current + 1)
        while tight < last and rooms[tight & mask] > 0:
            tight += 1
    return tight


@compiled
def spread_over_lanes(
    rates: Rates,
    lags: Int64Array,
    owed: Int64Array,
    units: Int64Array,
    rooms: Int64Array,
    shape: tuple[int, int, int, int],
    out: Int64Array,
) -> None:
    """Fill `out` with the streams of slots first, first + 1, ..., which rotate over the lanes.

    Args:
        rates: The amount due to each stream in slot `first`, shape (streams,), scaled by SCALE; and
            half of its change per slot.
        lags: How far each stream is behind at `first`. Decreased by the units served.
        owed: Units owed to each stream in each lane, shape (lanes, streams), scaled by SCALE.
            Updated.
        units: Room for the bounds of each stream's next unit, shape (2, streams).
        rooms: Ring buffer of a power of 2, to be overwritten: slack before the end of block b, at b
            modulo its length. At 0, nothing that is due later may be served before that end.
        shape: First slot, which starts a block; slots per block; consecutive slots per lane; slots
            left for which shares are known.
        out: Whole blocks.
    """
    shares, slopes = rates
    first, block, lane_turn, num_left = shape
    mask = len(rooms) - 1
    opens, deadlines = units
    for stream in range(len(lags)):
        opens[stream], close = _bounds_of(lags[stream], shares[stream], slopes[stream])
        deadlines[stream] = -(-close // block) * block
    for ahead in range(mask):
        num_slots = min((ahead + 1) * block, num_left)
        rooms[ahead] = _room_at(rates, lags, num_slots, num_slots)
    tight = -1
    for i in range(len(out)):
        current = i // block
        if i % block == 0:
            tight = _look_ahead(rates, lags, rooms, (i, block, num_left), tight)
        lane = (first + i) // lane_turn % len(owed)
        for stream in range(len(shares)):
            # Every stream earns its share in the lane that this slot belongs to.
            owed[lane, stream] += shares[stream]
            if slopes[stream] != 0.0:
                # (i + 1)**2 - i**2: what slot i adds to the sum of `_due`.
                owed[lane, stream] += math.floor(slopes[stream] * (2 * i + 1))
        # Asked of this block by itself: it often has no slack left, and what is next stays known.
        until = current if rooms[current & mask] <= 0 else tight
        best = _most_owed(opens, deadlines, owed[lane], i, (until + 1) * block)
        # A unit that is due after the end of a block took a slot that the block had to spare.
        for ahead in range(current, min(deadlines[best] // block - 1, current + mask + 1)):
            rooms[ahead & mask] -= 1
            if rooms[ahead & mask] == 0 and current < ahead < tight:
                tight = ahead
        out[i] = best
        owed[lane, best] -= SCALE
        lags[best] -= SCALE
        opens[best], close = _bounds_of(lags[best], shares[best], slopes[best])
        deadlines[best] = -(-close // block) * block
