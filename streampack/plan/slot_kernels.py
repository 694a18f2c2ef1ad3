"""The walk over slots, compiled: which lane and queue serve each slot.

Where it does not know whether a queue has another pack, it stops and names the queue. If a global
batch has one stream, the stream is chosen when the batch begins, and must have packs left in some
lane.

Cost: about 10 ns a slot.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from streampack._numba import compiled, compiled_inline, kernel_holding_gil
from streampack.types import Int64Array

DRY = -2
# For a queue: packs taken, packs known, whether that is all, and packs expected.
SERVED, KNOWN, COMPLETE, EXPECTED = range(4)
# Cursor of the walk: the current lane, the packs left in its turn, the stream chosen for a whole
# global batch, the slots for which that choice is still valid, and the queue that serves the turn.
TURN, LEFT, CHOSEN, HOLDS, SERVING = range(5)
# Slots of a lane's turn; of these, slots that one queue serves together, which are 1 or all, and in
# which queues are known; slots over all lanes for which a choice of stream is valid, or 0 if slots
# choose separately; the least slots of a stream for which it is chosen.
Sizes: TypeAlias = tuple[int, int, int, int]
# For a slot. SUBSTITUTED counts choices served by another stream: the slot's own, and in the first
# slot of a global batch with one stream, also the batch's.
LANE, QUEUE, PACK, SUBSTITUTED = range(4)


@compiled
def _serve(queues: Int64Array, lane: int, wanted: int) -> tuple[int, int]:
    """Return the queue that serves a slot of a lane, or a queue to learn about first.

    That is (queue, -1), or (-1, queue to learn about), or (-1, -1) if the lane is dry.
    """
    served, known = queues[SERVED, lane], queues[KNOWN, lane]
    if served[wanted] < known[wanted]:
        return wanted, -1
    if not queues[COMPLETE, lane, wanted]:
        return -1, wanted
    # The wanted queue is exhausted: take the live one with the most expected packs left.
    best, most = -1, 0
    for other in range(len(served)):
        left = queues[EXPECTED, lane, other] - served[other]
        if served[other] < known[other]:
            if best < 0 or left > most:
                best, most = other, left
        elif not queues[COMPLETE, lane, other]:
            return -1, other
    return best, -1


@compiled_inline
def _serve_turn(
    queues: Int64Array,
    turn: Int64Array,
    wanted: int,
    sizes: Sizes,
    is_pure: bool,
) -> tuple[int, int]:
    """Return as `_serve` the queue that serves a slot of the current lane.

    A queue serves whole turns, if there are any. With `is_pure`, no other stream takes the place of
    one that is chosen for a global batch.
    """
    _, together, valid, _ = sizes
    if turn[LEFT] < together:
        return turn[SERVING], -1
    lane = turn[TURN]
    if not is_pure or not valid:
        return _serve(queues, lane, wanted)
    if queues[SERVED, lane, wanted] < queues[KNOWN, lane, wanted]:
        return wanted, -1
    return -1, -1 if queues[COMPLETE, lane, wanted] else wanted


@compiled
def _look_at(queues: Int64Array, stream: int, least: int) -> tuple[bool, int, int]:
    """Check whether a stream has at least this many slots left in all lanes together.

    Return whether it is known to have them; the first lane that may have more than is known, or -1;
    the packs that all lanes are expected to have left.
    """
    open_lane = -1
    left = num_known = 0
    for lane in range(queues.shape[1]):
        served = queues[SERVED, lane, stream]
        left += queues[EXPECTED, lane, stream] - served
        num_known += min(max(queues[KNOWN, lane, stream] - served, 0), least)
        if open_lane < 0 and not queues[COMPLETE, lane, stream]:
            open_lane = lane
    return num_known >= least, open_lane, left


@compiled_inline
def _choose(queues: Int64Array, wanted: int, least: int) -> tuple[int, int, int]:
    """Return the stream of a global batch, or a queue to learn about first.

    That is (stream, -1, -1), or (-1, lane, queue to learn about), or (-1, DRY, -1) if all lanes
    are dry. A stream with fewer than `least` slots left is exhausted.
    """
    is_live, open_lane, _ = _look_at(queues, wanted, least)
    if is_live:
        return wanted, -1, -1
    if open_lane >= 0:
        return -1, open_lane, wanted
    # It is exhausted in all lanes: take the live one with the most expected packs left.
    best, best_lane, most = -1, DRY, 0
    for other in range(queues.shape[2]):
        is_live, open_lane, left = _look_at(queues, other, least)
        if (is_live or open_lane >= 0) and (best < 0 or left > most):
            best, best_lane, most = other, -1 if is_live else open_lane, left
    return (best, -1, -1) if best_lane == -1 else (-1, best_lane, best)


@compiled_inline
def _fill(slot: Int64Array, queues: Int64Array, turn: Int64Array, queue: int) -> None:
    lane = turn[TURN]
    slot[LANE], slot[QUEUE], slot[PACK] = lane, queue, queues[SERVED, lane, queue]
    queues[SERVED, lane, queue] += 1
    turn[SERVING] = queue
    turn[LEFT] -= 1
    turn[HOLDS] -= 1  # negative without a choice; never read then


@kernel_holding_gil
def walk_slots(
    wanted: Int64Array,
    sizes: Sizes,
    is_pure: bool,
    turn: Int64Array,
    queues: Int64Array,
    out: Int64Array,
) -> tuple[int, int, int]:
    """Fill `out` (n, 4) with the next slots, given their `wanted` queues (n,).

    `turn` and `queues` are updated. With `is_pure`, a choice of stream skips lanes without packs of
    it; if no lane has any, empty packs complete the global batch. Returns the number of slots
    filled, and the lane and queue to learn about before the next one. These are -1 if all slots are
    filled. The lane is DRY if all lanes are dry.
    """
    lane_turn, _, valid, least = sizes
    num_lanes = queues.shape[1]
    num_dry = 0
    before, left = turn[TURN], turn[LEFT]  # where the search for a slot begins
    filled = 0
    while filled < len(out):
        asked = wanted[filled]
        if valid:
            if turn[HOLDS] == 0:
                turn[CHOSEN], lane, unknown = _choose(queues, asked, least)
                if turn[CHOSEN] < 0:
                    return filled, lane, unknown
                turn[HOLDS] = valid
            asked = turn[CHOSEN]
        if turn[LEFT] == 0:
            turn[TURN] = (turn[TURN] + 1) % num_lanes
            turn[LEFT] = lane_turn
        lane = turn[TURN]
        queue, unknown = _serve_turn(queues, turn, asked, sizes, is_pure)
        if unknown >= 0:
            # Search for this slot again from the same lane: which lane serves it, or is padded,
            # must not depend on when the ends of queues become known.
            turn[TURN], turn[LEFT] = before, left
            return filled, lane, unknown
        if queue < 0:
            num_dry += 1
            if num_dry < num_lanes:
                turn[LEFT] = 0
                continue
            if not is_pure or not valid:
                return filled, DRY, -1
            queue = asked
        num_dry = 0
        # The first slot of a global batch also counts the batch's choice.
        is_swapped = turn[HOLDS] == valid and asked != wanted[filled]
        _fill(out[filled], queues, turn, queue)
        out[filled, SUBSTITUTED] = np.int64(queue != asked) + np.int64(is_swapped)
        before, left = turn[TURN], turn[LEFT]
        filled += 1
    return filled, -1, -1
