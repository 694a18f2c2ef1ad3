"""Best-fit decreasing: the segments of a window, longest first, each into the fullest pack it fits.

With max_seq_len=8 and a window of six segments::

    arrival      A5  B4  C6  D2  E1  F3
    decreasing   C6  A5  B4  F3  D2  E1
    packs        A A A A A F F F        F fits into the packs of A and B; that of A is fuller
                 C C C C C C D D
    buffered     B4  E1                 their pack is not full: both wait for the next window

A window is all segments of one call of `add`. After it, packs with a gap of more than 0.1 % are
dissolved, the emptiest first, as far as the buffer has room. Their segments are placed first in the
next window. None waits twice, unless no pack left with its window. docs/packers.md has the promises
of windows, and docs/adr/0028 the reasons.

Packs leave in the order in which their longest segments arrived, which is random in shuffled data:
training would otherwise see packs of long samples at the start of each window. With `cost`,
segments have the sizes of `sizes_in_pack` instead of their lengths.

Cost: two sorts and 50 ns a segment, 0.1 to 0.3 us in all. Memory: the integers of a window, and the
segments that wait.

Source: D. S. Johnson, "Near-optimal bin packing algorithms", MIT, 1973. Its bound is 11/9 of the
fewest packs, plus 4. Bins are kept in a list for each amount of free room, as in "Fewer Truncations
Improve Language Modeling" (Ding et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from streampack._numba import compiled, compiled_inline
from streampack.config import Packing
from streampack.pack.buffered import BufferedPacker, Limits, rooms, without_padding
from streampack.pack.cost import sizes_in_pack
from streampack.types import LENGTH, NO_PACKS, NUM_COLUMNS, Int64Array, Packs, State

# Columns of a pack: free tokens, number of segments, the row that opened it, and the pack before it
# in the list of those with as much room.
FREE, COUNT, OPENER, BEFORE = range(4)
NUM_PACK_COLUMNS = 4
ONE = np.uint64(1)
NONE = -1

# `words` and `groups` as in `find_room`; by room: the pack that got it last, or NONE.
RoomsLeft: TypeAlias = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], Int64Array]


def no_rooms_left(size: int) -> RoomsLeft:
    """Return what `place_segments` notes about packs of `size` tokens, before there is one."""
    num_words = (size >> 6) + 2
    groups = np.zeros((num_words >> 6) + 1, np.uint64)
    return np.zeros(num_words, np.uint64), groups, np.full(size + 1, NONE, np.int64)


@compiled_inline
def lowest_bit(bits: np.uint64) -> int:
    """Return the place of the lowest bit of a word that has one."""
    place, step = 0, 32
    while step > 0:
        if bits & ((ONE << np.uint64(step)) - ONE) == 0:
            bits = bits >> np.uint64(step)
            place += step
        step >>= 1
    return place


@compiled
def find_room(words: npt.NDArray[np.uint64], groups: npt.NDArray[np.uint64], length: int) -> int:
    """Return the least room of at least `length` tokens that a pack has, or NONE.

    `words` has a bit for each room that a pack has, `groups` one for each word that is not 0.
    """
    word = length >> 6
    bits = words[word] >> np.uint64(length & 63)
    if bits != 0:
        return int(length + lowest_bit(bits))
    word += 1
    group = word >> 6
    bits = groups[group] >> np.uint64(word & 63)
    if bits == 0:
        group += 1
        while group < len(groups) and groups[group] == 0:
            group += 1
        if group == len(groups):
            return NONE
        word, bits = group << 6, groups[group]
    word += lowest_bit(bits)
    return int((word << 6) + lowest_bit(words[word]))


@compiled_inline
def note_room(rooms_left: RoomsLeft, packs: Int64Array, pack: int) -> None:
    """Note the room that a pack has, which is not 0."""
    words, groups, lasts = rooms_left
    room = packs[pack, FREE]
    packs[pack, BEFORE] = lasts[room]
    lasts[room] = pack
    word = room >> 6
    words[word] |= ONE << np.uint64(room & 63)
    groups[word >> 6] |= ONE << np.uint64(word & 63)


@compiled
def place_segments(
    limits: Limits,
    rooms_left: RoomsLeft,
    lengths: Int64Array,
    order: Int64Array,
    pack_of: Int64Array,
    packs: Int64Array,
    num_packs: int,
) -> int:
    """Put segments, in this order, where they leave the least room; return the number of packs.

    `pack_of` receives the pack of each segment, shape (n,), and `packs` the packs, shape (m, 4), of
    which `num_packs` are there before. There is room for one more for each segment.
    """
    words, groups, lasts = rooms_left
    size = limits.pack_tokens
    # Of packs with as much room, the first is filled first.
    for pack in range(num_packs - 1, -1, -1):
        note_room(rooms_left, packs, pack)
    for number in range(len(order)):
        segment = order[number]
        length = lengths[segment]
        room = find_room(words, groups, length)
        if room == NONE:
            pack, room = num_packs, size
            num_packs += 1
            packs[pack, COUNT], packs[pack, OPENER] = 0, segment
        else:
            pack = lasts[room]
            lasts[room] = packs[pack, BEFORE]
            if lasts[room] == NONE:
                word = room >> 6
                words[word] &= ~(ONE << np.uint64(room & 63))
                if words[word] == 0:
                    groups[word >> 6] &= ~(ONE << np.uint64(word & 63))
        pack_of[segment] = pack
        packs[pack, FREE] = room - length
        packs[pack, COUNT] += 1
        if room > length and packs[pack, COUNT] < limits.max_samples:
            note_room(rooms_left, packs, pack)
    return num_packs


@compiled
def write_placed(
    rows: Int64Array, order: Int64Array, place_of: Int64Array, ends: Int64Array, out: Int64Array
) -> None:
    """Write the rows, in this order, into their packs of `out`; those of a negative place stay.

    `ends` contains the first row of each pack on entry, and one past its last row on return.
    """
    for number in range(len(order)):
        row = order[number]
        place = place_of[row]
        if place >= 0:
            for column in range(NUM_COLUMNS):
                out[ends[place], column] = rows[row, column]
            ends[place] += 1


class Placed(NamedTuple):
    """Where the segments of a window are, those that waited first."""

    pack_of: Int64Array
    """The pack of each segment, shape (n,)."""
    packs: Int64Array
    """The packs, shape (m, 4)."""
    order: Int64Array
    """The segments in the order in which those of a pack follow each other, shape (n,)."""


Place: TypeAlias = Callable[[Limits, Int64Array, int], Placed]
"""Place segments of these lengths, shape (n,); as many as the third argument waited."""


def decreasing(lengths: Int64Array, num_held: int) -> Int64Array:
    """Return an order of segments, shape (n,): those that waited, then the others, longest first.

    >>> decreasing(np.array([2, 5, 3, 4]), 2).tolist()
    [1, 0, 3, 2]
    """
    # A stable sort of 16-bit integers takes a seventh of the time of longer ones.
    most = int(lengths.max(initial=0))
    keys = (most - lengths).astype(np.min_scalar_type(most))
    held = np.argsort(keys[:num_held], kind="stable")
    return np.concatenate([held, num_held + np.argsort(keys[num_held:], kind="stable")])


def place_decreasing(limits: Limits, lengths: Int64Array, num_held: int) -> Placed:
    """Place segments longest first, each into the fullest pack that it fits."""
    pack_of = np.empty(len(lengths), np.int64)
    packs = np.empty((len(lengths), NUM_PACK_COLUMNS), np.int64)
    rooms_left, order = no_rooms_left(limits.pack_tokens), decreasing(lengths, num_held)
    num_packs = place_segments(limits, rooms_left, lengths, order, pack_of, packs, 0)
    return Placed(pack_of, packs[:num_packs], np.arange(len(lengths)))


class WindowPacker(BufferedPacker):
    """A packer that packs each call of `add` as a whole.

    >>> packing = Packing(max_seq_len=8, method="best_fit_decreasing")
    >>> packer = WindowPacker(place_decreasing, packing)
    >>> lengths = [5, 4, 6, 2, 1, 3]
    >>> rows = [[0, 0, sample, 0, length, length] for sample, length in enumerate(lengths)]
    >>> packs = packer.add(np.array(rows))
    >>> packs[0][:, 2].tolist(), packs[1][:, 2].tolist(), packer.buffered[:, 2].tolist()
    ([0, 5], [2, 3], [1, 4])
    """

    def __init__(self, place: Place, packing: Packing) -> None:
        super().__init__(packing)
        self._place = place
        # Packs that left since the window of each buffered segment began, shape (n,).
        self._waited = np.zeros(0, np.int64)

    def _pack(self, segments: Int64Array, *, final: bool) -> Packs:
        multiple, num_held = self._limits.multiple, len(self._buffered)
        rows = rooms(np.concatenate([self._buffered, segments]), multiple)
        if not len(rows):
            return NO_PACKS
        lengths = np.ascontiguousarray(sizes_in_pack(rows[:, LENGTH], self._packing))
        placed = self._place(self._limits, lengths, num_held)
        may_wait = np.full(len(placed.packs), not final)
        may_wait[placed.pack_of[:num_held][self._waited > 0]] = False
        return self._leave(rows, placed, self._choose(placed.packs, may_wait))

    def _choose(self, packs: Int64Array, may_wait: npt.NDArray[np.bool_]) -> Int64Array:
        """Return the packs that give their segments to the next window, shape (n,)."""
        limits = self._limits
        may_wait &= (packs[:, FREE] > limits.tolerance) & (packs[:, COUNT] < limits.max_samples)
        chosen: Int64Array = np.flatnonzero(may_wait)
        chosen = chosen[np.argsort(-packs[chosen, FREE], kind="stable")]
        tokens = np.cumsum(limits.pack_tokens - packs[chosen, FREE])
        samples = np.cumsum(packs[chosen, COUNT])
        fits = (tokens <= limits.buffer_tokens) & (samples <= limits.buffer_samples)
        chosen = chosen[fits]
        self._note_held(int(tokens[fits].max(initial=0)), int(samples[fits].max(initial=0)))
        return chosen

    def _leave(self, rows: Int64Array, placed: Placed, waiting: Int64Array) -> Packs:
        """Buffer the segments of the packs that wait, and return the other packs."""
        openers = placed.packs[:, OPENER]
        place = np.empty(len(openers), np.int64)
        keys = openers.copy()
        keys[waiting] = len(rows)  # behind all others
        place[np.argsort(keys, kind="stable")] = np.arange(len(openers))
        place[waiting] = NONE
        place_of = place[placed.pack_of]
        leaves = place_of >= 0
        sizes = np.bincount(place_of[leaves], minlength=len(openers) - len(waiting))
        ends = np.cumsum(sizes) - sizes
        out = np.empty((int(sizes.sum()), NUM_COLUMNS), np.int64)
        write_placed(rows, placed.order, place_of, ends, out)
        self._buffered = without_padding(rows[~leaves], self._limits.multiple)
        waited = np.zeros(len(rows), np.int64)
        waited[: len(self._waited)] = self._waited
        self._waited = waited[~leaves] + len(ends)
        return Packs(segments=without_padding(out, self._limits.multiple), ends=ends)

    def state_dict(self) -> State:
        """Return the buffer, and how many packs each segment has seen leave."""
        return {**super().state_dict(), "waited": self._waited.tolist()}

    def load_state_dict(self, state: State) -> None:
        """Resume from a saved state, as every packer."""
        super().load_state_dict(state)
        self._waited = np.array(state["waited"], np.int64).reshape(len(self._buffered))
