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

from typing import NamedTuple

import numpy as np

from streampack._numba import compiled
from streampack.config import Packing
from streampack.pack.buffered import BufferedPacker, limits_of, rooms, without_padding
from streampack.pack.kernels import Limits
from streampack.types import LENGTH, START, Int64Array, Packs, State

# Columns of an open pack, columns of a piece, and indices of the counters.
FREE, COUNT, SERIAL, BORN = range(4)
ROW, OFFSET, TOKENS, OWNER = range(4)
NUM_OPEN, NUM_PIECES, NUM_SERIALS, NUM_CLOSED, POOL_PACKS = range(5)
HELD_TOKENS, HELD_SAMPLES, HIGH_TOKENS, HIGH_SAMPLES, NUM_COUNTERS = range(5, 10)


class OpenPacksWork(NamedTuple):
    """The arrays of one call."""

    open: Int64Array
    """Open packs, oldest first: FREE, COUNT, SERIAL, BORN; shape (open_packs, 4)."""
    pieces: Int64Array
    """Placement of each piece of a row: ROW, OFFSET in the row, TOKENS, OWNER (a serial)."""
    closed: Int64Array
    """By serial: the pack's number among the closed packs, or -1 while it is open."""
    counters: Int64Array
    """NUM_OPEN up to NUM_COUNTERS."""


@compiled
def put_piece(work: OpenPacksWork, row: int, offset: int, length: int, owner: int) -> None:
    """Record that a piece of a row is in a pack."""
    piece = work.pieces[work.counters[NUM_PIECES]]
    piece[ROW], piece[OFFSET], piece[TOKENS], piece[OWNER] = row, offset, length, owner
    work.counters[NUM_PIECES] += 1


@compiled
def close_slot(limits: Limits, work: OpenPacksWork, slot: int) -> None:
    """Close an open pack and assign its number. Later open packs move up."""
    counters = work.counters
    pack = work.open[slot]
    work.closed[pack[SERIAL]] = counters[NUM_CLOSED]
    counters[HELD_TOKENS] -= limits.pack_tokens - pack[FREE]
    counters[HELD_SAMPLES] -= pack[COUNT]
    counters[NUM_CLOSED] += 1
    counters[POOL_PACKS] += 1
    counters[NUM_OPEN] -= 1
    for place in range(slot, counters[NUM_OPEN]):
        for column in range(work.open.shape[1]):
            work.open[place, column] = work.open[place + 1, column]


@compiled
def close_waiting(limits: Limits, work: OpenPacksWork) -> None:
    """Close the packs that have seen `guard` packs close since they were opened."""
    counters = work.counters
    while counters[NUM_OPEN] > 0:
        if counters[POOL_PACKS] - work.open[0, BORN] < limits.guard:
            return
        close_slot(limits, work, 0)


@compiled
def find_slot(work: OpenPacksWork, length: int, fullest: bool) -> int:
    """Return the fullest or the oldest open pack with room for a piece, or -1."""
    best = -1
    for slot in range(work.counters[NUM_OPEN]):
        free = work.open[slot, FREE]
        if free >= length and (best < 0 or free < work.open[best, FREE]):
            best = slot
            if not fullest:
                break
    return best


@compiled
def cut_into(
    limits: Limits, work: OpenPacksWork, slot: int, row: int, offset: int, length: int
) -> int:
    """Fill a pack that is about to close with the head of a row; return the tokens taken."""
    gap = work.open[slot, FREE]
    taken = min(gap, length - limits.min_fragment)
    taken -= taken % limits.multiple
    if gap <= limits.split_gap or length <= gap or taken < limits.min_fragment:
        return 0
    put_piece(work, row, offset, taken, work.open[slot, SERIAL])
    return int(taken)


@compiled
def new_serial(work: OpenPacksWork) -> int:
    """Return a serial for a new pack, marked as open."""
    serial = work.counters[NUM_SERIALS]
    work.counters[NUM_SERIALS] += 1
    work.closed[serial] = -1
    return int(serial)


@compiled
def put_row(limits: Limits, work: OpenPacksWork, row: int, length: int, fullest: bool) -> None:
    """Place a row that is shorter than a pack, and close packs as necessary."""
    counters = work.counters
    offset = 0
    while True:
        slot = find_slot(work, length, fullest)
        has_room = slot >= 0 or counters[NUM_OPEN] < len(work.open)
        is_bound_kept = (
            counters[HELD_TOKENS] + length <= limits.buffer_tokens
            and counters[HELD_SAMPLES] < limits.buffer_samples
        )
        if has_room and is_bound_kept:
            break
        # Every pack has room for 0 tokens, so this finds the fullest or the oldest.
        victim = find_slot(work, 0, fullest)
        taken = cut_into(limits, work, victim, row, offset, length)
        offset += taken
        length -= taken
        close_slot(limits, work, victim)
        close_waiting(limits, work)
    if slot < 0:
        slot = counters[NUM_OPEN]
        pack = work.open[slot]
        pack[FREE], pack[COUNT] = limits.pack_tokens, 0
        pack[SERIAL], pack[BORN] = new_serial(work), counters[POOL_PACKS]
        counters[NUM_OPEN] += 1
    pack = work.open[slot]
    put_piece(work, row, offset, length, pack[SERIAL])
    pack[FREE] -= length
    pack[COUNT] += 1
    counters[HELD_TOKENS] += length
    counters[HELD_SAMPLES] += 1
    counters[HIGH_TOKENS] = max(counters[HIGH_TOKENS], counters[HELD_TOKENS])
    counters[HIGH_SAMPLES] = max(counters[HIGH_SAMPLES], counters[HELD_SAMPLES])
    if pack[FREE] == 0 or pack[COUNT] == limits.max_samples:
        close_slot(limits, work, slot)
        close_waiting(limits, work)


@compiled
def fit_rows(
    limits: Limits, work: OpenPacksWork, lengths: Int64Array, fullest: bool, final: bool
) -> None:
    """Place rows of these lengths into packs, those of open packs first.

    A full row becomes a pack by itself. `fullest`: best fit, not first fit; `final`: close all.
    """
    counters = work.counters
    for row in range(counters[NUM_PIECES], len(lengths)):
        if lengths[row] < limits.pack_tokens:
            put_row(limits, work, row, lengths[row], fullest)
        else:
            serial = new_serial(work)
            put_piece(work, row, 0, lengths[row], serial)
            work.closed[serial] = counters[NUM_CLOSED]
            counters[NUM_CLOSED] += 1
    while final and counters[NUM_OPEN] > 0:
        close_slot(limits, work, 0)


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

    def _free(self) -> Int64Array:
        taken = rooms(self._buffered, self._limits.multiple)[:, LENGTH]
        ends = np.append(0, np.cumsum(taken))[np.append(0, np.cumsum(self._sizes))]
        free: Int64Array = self._limits.pack_tokens - np.diff(ends)
        return free

    def _work(self, lengths: Int64Array) -> OpenPacksWork:
        """Return the arrays for rows of these lengths, the buffered ones first."""
        sizes, num_rows, num_held = self._sizes, len(lengths), len(self._buffered)
        packs = np.zeros((self._num_open, 4), np.int64)
        packs[: len(sizes), FREE] = self._free()
        packs[: len(sizes), COUNT] = sizes
        packs[: len(sizes), SERIAL] = np.arange(len(sizes))
        packs[: len(sizes), BORN] = -self._waited
        # Each closing pack takes at most one head; each row has at most one tail.
        pieces = np.zeros((2 * num_rows + len(sizes), 4), np.int64)
        pieces[:num_held, ROW] = np.arange(num_held)
        pieces[:num_held, TOKENS] = lengths[:num_held]
        pieces[:num_held, OWNER] = np.repeat(np.arange(len(sizes)), sizes)
        counters = np.zeros(NUM_COUNTERS, np.int64)
        counters[NUM_OPEN] = counters[NUM_SERIALS] = len(sizes)
        counters[NUM_PIECES] = counters[HELD_SAMPLES] = num_held
        counters[HELD_TOKENS] = lengths[:num_held].sum()
        counters[HIGH_TOKENS], counters[HIGH_SAMPLES] = self._high_water
        closed = np.full(len(sizes) + num_rows, -1)
        return OpenPacksWork(open=packs, pieces=pieces, closed=closed, counters=counters)

    def _pack(self, segments: Int64Array, *, final: bool) -> Packs:
        multiple = self._limits.multiple
        rows = rooms(np.concatenate([self._buffered, segments]), multiple)
        lengths = rows[:, LENGTH].copy()
        work = self._work(lengths)
        fit_rows(self._limits, work, lengths, self._method == "best_fit", final)
        counters = work.counters
        pieces = work.pieces[: counters[NUM_PIECES]]
        placed = rows[pieces[:, ROW]]
        placed[:, START] += pieces[:, OFFSET]
        placed[:, LENGTH] = pieces[:, TOKENS]
        placed = without_padding(placed, multiple)
        # Pieces are in arrival order, and a stable sort by pack keeps it within each pack.
        number = work.closed[pieces[:, OWNER]]
        is_open = number < 0
        order = np.argsort(number[~is_open], kind="stable")
        sizes = np.bincount(number[~is_open], minlength=counters[NUM_CLOSED])
        packs = work.open[: counters[NUM_OPEN]]
        # Serials are assigned in the order in which packs open, which is also that of `packs`.
        self._buffered = placed[is_open][np.argsort(pieces[is_open, OWNER], kind="stable")]
        self._sizes = packs[:, COUNT].copy()
        self._waited = counters[POOL_PACKS] - packs[:, BORN]
        self._high_water = (int(counters[HIGH_TOKENS]), int(counters[HIGH_SAMPLES]))
        return Packs(segments=placed[~is_open][order], ends=np.cumsum(sizes))
