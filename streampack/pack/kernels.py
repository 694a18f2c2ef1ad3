"""The integer machinery under the packers: a pool of segment rows, and the loops that empty it.

::

    rows     a  b  c  d | e  f  g  h        what was buffered, then what has just arrived
    order       b     d   e                 the pool: places in `rows`, oldest first
             head^       ^tail ^next        next: the first row that was not pulled yet
    out      packs that closed, row by row; `ends` says where each one ends

A kernel pulls one row at a time, and only when the pool cannot fill a pack. Building a pack only
grows the pool; one commit at its end empties it. So a build that runs out of rows is begun
again at the next call and comes to the same pack, wherever the calls and the saves fall.

With `pad_to_multiple`, lengths are here what segments take in a pack, padding included.

Cost: see `exact_fit` and `next_fit`. Memory: nothing lives longer than a call.

All kernels of the room stand in this one file: numba's disk cache does not see that a callee in
another file has changed. `Limits` and `Work` are tuples, because numba takes no dataclasses.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streampack.compiled import compiled
from streampack.types import LENGTH, START, Int64Array

__all__ = ["NO_LIMIT", "Limits", "Work", "close_oldest", "exact_fit", "fill_room", "next_fit"]

HEAD, TAIL, NEXT, TOKENS, HIGH_TOKENS, HIGH_SAMPLES, NUM_OUT, NUM_PACKS, POOL_PACKS = range(9)
NUM_CURSORS = 9
NO_LIMIT = 2**62
PULLED, FULL, EMPTY = range(3)
FIRST_ROWS = 32  # rows of sums that are there at once; a web pack needs about 14
COUNTED_ROWS = 256  # segments that a pack of limited samples chooses among
NEVER = 20_000  # more samples than those rows are
ONE = np.uint64(1)
LAST_BIT = np.uint64(63)


class Limits(NamedTuple):
    """What a packer must keep to, in tokens unless said."""

    max_seq_len: int
    buffer_tokens: int
    """Hard bound on the tokens in the pool."""
    buffer_samples: int
    """Hard bound on the segments in the pool."""
    window: int
    """A pack takes its segments in plain order until fewer tokens than this would be left."""
    tolerance: int
    """A gap that is worth only `patience` more looks."""
    patience: int
    """Segments looked at once the gap is within `tolerance`."""
    split_gap: int
    """A larger gap is filled by cutting a segment; max_seq_len: never cut."""
    min_fragment: int
    """The shortest piece that a cut may leave on either side."""
    guard: int
    """Packs of the pool that a segment may see leave; then it goes in as it came."""
    max_samples: int
    """Segments in a pack."""
    multiple: int
    """What all lengths are multiples of, and all cuts."""


class Work(NamedTuple):
    """The arrays of one call."""

    rows: Int64Array
    """Segment rows, buffered ones first, shape (n, 6); a cut moves the start of its row."""
    order: Int64Array
    """The pool: places in `rows` in [head, tail), shape (n,)."""
    born: Int64Array
    """POOL_PACKS when each row came into the pool, shape (n,)."""
    chosen: npt.NDArray[np.bool_]
    """Which of the pool, counted from head, go into the pack at hand, shape (n,)."""
    out: Int64Array
    """Segment rows of closed packs, shape (2n, 6): every row can be cut once."""
    ends: Int64Array
    """One past the last segment of each closed pack, shape (n,)."""
    cursor: Int64Array
    """HEAD, TAIL, NEXT, TOKENS, HIGH_TOKENS, HIGH_SAMPLES, NUM_OUT, NUM_PACKS, POOL_PACKS."""


@compiled
def goes_on(work: Work, row: int) -> bool:
    """Tell whether a row goes on where the last segment of the pack at hand stops."""
    last = work.cursor[NUM_OUT] - 1
    num_packs = work.cursor[NUM_PACKS]
    if last < (work.ends[num_packs - 1] if num_packs else 0):
        return False
    for column in range(START):
        if work.out[last, column] != work.rows[row, column]:
            return False
    return bool(work.out[last, START] + work.out[last, LENGTH] == work.rows[row, START])


@compiled
def emit(work: Work, row: int, length: int) -> None:
    """Hand out the first `length` tokens of a row, as the next segment of the pack at hand."""
    place = work.cursor[NUM_OUT]
    if work.rows[row, START] > 0 and goes_on(work, row):
        work.out[place - 1, LENGTH] += length
        return
    for column in range(work.rows.shape[1]):
        work.out[place, column] = work.rows[row, column]
    work.out[place, LENGTH] = length
    work.cursor[NUM_OUT] = place + 1


@compiled
def close(work: Work) -> None:
    """End the pack at hand."""
    work.ends[work.cursor[NUM_PACKS]] = work.cursor[NUM_OUT]
    work.cursor[NUM_PACKS] += 1


@compiled
def cut(limits: Limits, work: Work, row: int, gap: int) -> int:
    """Fill a gap with the head of a row, if that is allowed; return the tokens it took."""
    length = work.rows[row, LENGTH]
    # Near its end a segment is cut earlier, not spared: sparing leaves packs of halves half empty.
    taken = min(gap, length - limits.min_fragment)
    taken -= taken % limits.multiple
    if gap <= limits.split_gap or length <= gap or taken < limits.min_fragment:
        return 0
    emit(work, row, taken)
    work.rows[row, START] += taken
    work.rows[row, LENGTH] -= taken
    return int(taken)


@compiled
def note_high_water(cursor: Int64Array) -> None:
    """Keep the most that the pool ever held."""
    cursor[HIGH_TOKENS] = max(cursor[HIGH_TOKENS], cursor[TOKENS])
    cursor[HIGH_SAMPLES] = max(cursor[HIGH_SAMPLES], cursor[TAIL] - cursor[HEAD])


@compiled
def pull(limits: Limits, work: Work, final: bool) -> int:
    """Move one row into the pool; full ones pass straight through, each a pack of its own."""
    cursor = work.cursor
    while cursor[NEXT] < len(work.rows):
        row = cursor[NEXT]
        length = work.rows[row, LENGTH]
        if length < limits.max_seq_len:
            num_samples = cursor[TAIL] - cursor[HEAD] + 1
            if (
                num_samples > limits.buffer_samples
                or cursor[TOKENS] + length > limits.buffer_tokens
            ):
                return FULL
            work.order[cursor[TAIL]] = row
            work.born[row] = cursor[POOL_PACKS]
            cursor[TAIL] += 1
            cursor[NEXT] += 1
            cursor[TOKENS] += length
            note_high_water(cursor)
            return PULLED
        emit(work, row, length)
        close(work)
        cursor[NEXT] += 1
    return FULL if final else EMPTY


@compiled
def take_in_order(limits: Limits, work: Work, final: bool) -> tuple[int, int]:
    """Count the oldest segments that go in as they come, and the tokens then left; (0, 0): wait."""
    head = work.cursor[HEAD]
    left = limits.max_seq_len - work.rows[work.order[head], LENGTH]
    count = 1
    while head + count < work.cursor[TAIL] and count < limits.max_samples:
        row = work.order[head + count]
        has_waited = work.cursor[POOL_PACKS] - work.born[row] >= limits.guard
        if not has_waited or work.rows[row, LENGTH] > left:
            break
        left -= work.rows[row, LENGTH]
        count += 1
    while left > limits.window and count < limits.max_samples:
        if head + count == work.cursor[TAIL]:
            status = pull(limits, work, final)
            if status == EMPTY:
                return 0, 0
            if status == FULL:
                break
        length = work.rows[work.order[head + count], LENGTH]
        if left - length < limits.window:
            break
        left -= length
        count += 1
    return count, left


@compiled
def has_bit(sums: npt.NDArray[np.uint64], begin: int, bit: int) -> bool:
    """Tell whether a sum is reachable in the row of words that starts at `begin`."""
    return bool((sums[begin + (bit >> 6)] >> np.uint64(bit & 63)) & ONE)


@compiled
def highest_bit(sums: npt.NDArray[np.uint64], begin: int, last: int, first: int) -> int:
    """Return the largest reachable sum in [first, last], or -1."""
    word = last >> 6
    # Bits past `last` may be set in its word; no shift ever brings them back below.
    bits = sums[begin + word] << (LAST_BIT - np.uint64(last & 63))
    high = last
    while bits == 0 and word > first >> 6:
        word -= 1
        high = (word << 6) + 63
        bits = sums[begin + word]
    while bits != 0 and bits >> LAST_BIT == 0:
        bits <<= ONE
        high -= 1
    return high if bits != 0 and high >= first else -1


@compiled
def add_length(sums: npt.NDArray[np.uint64], begin: int, num_words: int, length: int) -> None:
    """Write the row of sums after `begin`: those there, and those there plus `length`."""
    source = sums[begin : begin + num_words]
    target = sums[begin + num_words : begin + 2 * num_words]
    skip = length >> 6
    left = np.uint64(length & 63)
    right = LAST_BIT - left
    for word in range(skip):
        target[word] = source[word]
    target[skip] = source[skip] | (source[0] << left)
    # Slices, so that every index is the loop's own: then LLVM makes vectors of it.
    here, low, lower = source[skip + 1 :], source[1 : num_words - skip], source
    above = target[skip + 1 :]
    for word in range(len(above)):
        # Two shifts: one by 64 is undefined, when the length is a multiple of 64.
        above[word] = here[word] | (low[word] << left) | ((lower[word] >> ONE) >> right)


@compiled
def grown(sums: npt.NDArray[np.uint64], num_words: int) -> npt.NDArray[np.uint64]:
    """Return `sums` if it holds `num_words`, else a copy of twice that."""
    if num_words <= len(sums):
        return sums
    larger = np.empty(2 * num_words, np.uint64)
    # A loop, for numba takes two seconds to compile the assignment of a slice.
    for word in range(len(sums)):
        larger[word] = sums[word]
    return larger


@compiled
def mark(
    work: Work, sums: npt.NDArray[np.uint64], span: tuple[int, int, int, int], best: int
) -> None:
    """Mark the segments that first reached the sum `best`, going back through the rows of sums."""
    first, last, left, num_rows = span
    head = work.cursor[HEAD]
    num_words = (left >> 6) + 1
    for place in range(last - 1, first - 1, -1):
        length = work.rows[work.order[head + place], LENGTH]
        work.chosen[place] = False
        if length <= left:
            num_rows -= 1
            # Not reachable without it: so it was this one that reached it first.
            if best > 0 and not has_bit(sums, num_rows * num_words, best):
                work.chosen[place] = True
                best -= length


@compiled
def search(
    limits: Limits, work: Work, sums: npt.NDArray[np.uint64], first: int, left: int, final: bool
) -> tuple[int, int, npt.NDArray[np.uint64]]:
    """Choose among the pool from place `first` on, as few as it takes to fill `left` tokens.

    Returns:
        Places looked at (0: wait for more rows), tokens filled, and the scratch, perhaps grown.
    """
    cursor = work.cursor
    num_words = (left >> 6) + 1
    sums = grown(sums, 2 * num_words)
    sums[:num_words] = 0
    sums[0] = 1
    place, num_rows, looks = first, 0, limits.patience
    best = 0
    while looks > 0 and best < left:
        if cursor[HEAD] + place == cursor[TAIL]:
            status = pull(limits, work, final)
            if status == EMPTY:
                return 0, 0, sums
            if status == FULL:
                break
        length = work.rows[work.order[cursor[HEAD] + place], LENGTH]
        place += 1
        if length <= left:
            begin = num_rows * num_words
            num_rows += 1
            if has_bit(sums, begin, left - length):
                best = left
                break
            sums = grown(sums, begin + 2 * num_words)
            add_length(sums, begin, num_words, length)
        best = highest_bit(sums, num_rows * num_words, left, max(left - limits.tolerance, 0))
        if best >= 0:
            looks -= 1
    if best < 0:
        best = highest_bit(sums, num_rows * num_words, left, 0)
    mark(work, sums, (first, place, left, num_rows), best)
    return place, best, sums


@compiled
def best_counted(counts: npt.NDArray[np.int16], last: int, first: int, budget: int) -> int:
    """Return the largest sum in [first, last] of at most `budget` segments, or -1."""
    for best in range(last, first - 1, -1):
        if counts[best] <= budget:
            return best
    return -1


@compiled
def mark_counted(
    work: Work, counts: npt.NDArray[np.int16], span: tuple[int, int, int, int], best: int
) -> None:
    """Mark at most `budget` segments that make the sum `best`, the oldest that do."""
    first, last, left, budget = span
    num_rows = len(counts)
    for place in range(last - 1, first - 1, -1):
        length = work.rows[work.order[work.cursor[HEAD] + place], LENGTH]
        work.chosen[place] = False
        if length <= left:
            num_rows -= 1
            # Not reachable without it by so few: so it is one of them.
            if counts[num_rows, best] > budget:
                work.chosen[place] = True
                best -= length
                budget -= 1


@compiled
def search_counted(
    limits: Limits, work: Work, first: int, left: int, final: bool
) -> tuple[int, int]:
    """Choose as `search` does, but at most as many segments as a pack may still take.

    A row of counts says for each sum how few segments make it.

    Returns:
        Places looked at (0: wait for more rows), and tokens filled.
    """
    cursor = work.cursor
    budget = limits.max_samples - first
    counts = np.empty((COUNTED_ROWS + 1, left + 1), np.int16)
    counts[0, :] = NEVER
    counts[0, 0] = 0
    place, num_rows, looks = first, 0, limits.patience
    best = left if budget == 0 else 0
    while looks > 0 and best < left and num_rows < COUNTED_ROWS:
        if cursor[HEAD] + place == cursor[TAIL]:
            status = pull(limits, work, final)
            if status == EMPTY:
                return 0, 0
            if status == FULL:
                break
        length = work.rows[work.order[cursor[HEAD] + place], LENGTH]
        place += 1
        if length <= left:
            before, after = counts[num_rows], counts[num_rows + 1]
            num_rows += 1
            after[:length] = before[:length]
            for total in range(length, left + 1):
                after[total] = min(before[total], before[total - length] + 1)
        best = best_counted(counts[num_rows], left, max(left - limits.tolerance, 0), budget)
        if best >= 0:
            looks -= 1
    best = best_counted(counts[num_rows], left, 0, budget)
    mark_counted(work, counts[:num_rows], (first, place, left, budget), best)
    return place, best


@compiled
def commit(limits: Limits, work: Work, first: int, looked: int) -> None:
    """Close a pack of the chosen, and the pool over the places they leave."""
    cursor = work.cursor
    head = cursor[HEAD]
    num_tokens, num_samples = 0, 0
    for place in range(looked):
        if place < first or work.chosen[place]:
            row = work.order[head + place]
            emit(work, row, work.rows[row, LENGTH])
            num_tokens += work.rows[row, LENGTH]
            num_samples += 1
    target = head + looked
    for place in range(looked - 1, first - 1, -1):
        if not work.chosen[place]:
            target -= 1
            work.order[target] = work.order[head + place]
    cursor[HEAD] = target
    cursor[TOKENS] -= num_tokens
    gap = limits.max_seq_len - num_tokens
    if target < cursor[TAIL] and num_samples < limits.max_samples:
        cursor[TOKENS] -= cut(limits, work, work.order[target], gap)
    cursor[POOL_PACKS] += 1
    close(work)


@compiled
def one_pack(
    limits: Limits, work: Work, sums: npt.NDArray[np.uint64], final: bool
) -> tuple[bool, npt.NDArray[np.uint64]]:
    """Close a pack that the oldest of the pool opens; return whether, and the scratch."""
    first, left = take_in_order(limits, work, final)
    if first == 0:
        return False, sums
    looked, _, sums = search(limits, work, sums, first, left, final)
    num_samples = first
    for place in range(first, looked):
        num_samples += work.chosen[place]
    if num_samples > limits.max_samples:
        looked, _ = search_counted(limits, work, first, left, final)
    if looked > 0:
        commit(limits, work, first, looked)
    return looked > 0, sums


@compiled
def first_sums(limits: Limits) -> npt.NDArray[np.uint64]:
    """Return scratch for rows of sums."""
    return np.empty(FIRST_ROWS * ((limits.window >> 6) + 1), np.uint64)


@compiled
def exact_fit(limits: Limits, work: Work, final: bool) -> None:
    """Close every pack that can be closed; `final`: also those that no row will fill any more."""
    sums = first_sums(limits)
    cursor = work.cursor
    closed = True
    while closed and (cursor[HEAD] < cursor[TAIL] or pull(limits, work, final) == PULLED):
        closed, sums = one_pack(limits, work, sums, final)


@compiled
def close_oldest(limits: Limits, work: Work) -> None:
    """Close one pack of what is in the pool, which is not empty."""
    one_pack(limits, work, first_sums(limits), True)


@compiled
def fill_room(limits: Limits, work: Work, room: int) -> None:
    """Close a pack of at most `room` tokens out of the pool, whether or not it takes the oldest."""
    looked, _, _ = search(limits, work, first_sums(limits), 0, room, True)
    commit(limits, work, 0, looked)


@compiled
def empty_pool(work: Work) -> None:
    """Hand out the whole pool, in the pack at hand."""
    cursor = work.cursor
    for place in range(cursor[HEAD], cursor[TAIL]):
        row = work.order[place]
        emit(work, row, work.rows[row, LENGTH])
    cursor[HEAD] = cursor[TAIL]
    cursor[TOKENS] = 0


@compiled
def next_fit(limits: Limits, work: Work, final: bool) -> None:
    """Put every row into the open pack, which is the whole pool; where it does not fit, close."""
    cursor = work.cursor
    for row in range(cursor[NEXT], len(work.rows)):
        gap = limits.max_seq_len - cursor[TOKENS]
        if work.rows[row, LENGTH] > gap:
            empty_pool(work)
            cut(limits, work, row, gap)
            close(work)
        work.order[cursor[TAIL]] = row
        cursor[TAIL] += 1
        cursor[TOKENS] += work.rows[row, LENGTH]
        note_high_water(cursor)
        num_samples = cursor[TAIL] - cursor[HEAD]
        most = min(limits.buffer_samples, limits.max_samples)
        if cursor[TOKENS] == limits.max_seq_len or num_samples == most:
            empty_pool(work)
            close(work)
    cursor[NEXT] = len(work.rows)
    if final and cursor[HEAD] < cursor[TAIL]:
        empty_pool(work)
        close(work)
