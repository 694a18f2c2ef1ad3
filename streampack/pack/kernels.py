"""The integer kernels of the packers: a pool of segment rows, and loops that form packs from it.

::

    rows     a  b  c  d | e  f  g  h        buffered segments, then the newly arrived ones
    order       b     d   e                 the pool: places in `rows`, oldest first
             head^       ^tail ^next        next: the first row that was not pulled yet
    out      packs that closed, row by row; `ends` contains the end of each one

A kernel pulls one row at a time, and only if the pool cannot fill a pack. Building a pack only adds
to the pool; a single commit at the end removes its segments. A build that runs out of rows is
restarted by the next call and arrives at the same pack. The packs are therefore independent of how
segments are divided into calls, and of where the state is saved.

With `pad_to_multiple`, lengths in this module are the slots that segments take, including padding.

Cost: see `fit_exactly` and `fit_in_order`. Memory: nothing outlives a call.

Inner kernels take the arrays of a `Work` one by one: reading an array from a tuple, or slicing it,
costs two atomic reference counts, which used to take half of the time.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from streampack._numba import compiled, compiled_inline, kernel_allocating
from streampack.types import LENGTH, NUM_COLUMNS, SAMPLE, START, TOTAL, Int64Array

HEAD, TAIL, NEXT, TOKENS, HIGH_TOKENS, HIGH_SAMPLES, NUM_OUT, NUM_PACKS, POOL_PACKS = range(9)
SEEN, MOST_PACKS, NUM_ROWS, NUM_OPEN = 9, 10, 11, 12
NUM_CURSORS = 13
NO_LIMIT = 2**62
ORDER, BORN, CHOSEN = range(3)  # rows of `Work.pool`
PULLED, FULL, EMPTY = range(3)
WAIT, TOO_SMALL = 0, -1  # results of a search
ADDED, FILLED = range(2)  # results of add_row
FIRST_ROWS = 32  # rows of sums allocated initially; a pack of web text needs about 14
COUNTED_ROWS = 256  # segments examined for a pack with limited samples
NEVER = 20_000  # marks a sum as unreachable: more samples than COUNTED_ROWS allows
# Python constants are part of numba's argument types. A kernel called with different ones is
# compiled several times, with all of its callees. numpy scalars have a type without a value.
NOTHING = cast(int, np.int64(0))
FINAL = cast(bool, np.bool_(True))
ONE = np.uint64(1)
LAST_BIT = np.uint64(63)
ALL_BITS = np.uint64(2**64 - 1)


class Limits(NamedTuple):
    """Limits of a packer, in tokens unless stated otherwise."""

    pack_tokens: int
    buffer_tokens: int
    """Hard limit on the tokens in the pool."""
    buffer_samples: int
    """Hard limit on the segments in the pool."""
    search_tokens: int
    """A pack takes segments in plain order until fewer free tokens than this would be left."""
    tolerance: int
    """A gap of at most this size is acceptable after `patience` more looks."""
    patience: int
    """Segments examined once the gap is within `tolerance`."""
    split_gap: int
    """A larger gap is filled by cutting a segment. pack_tokens: never cut."""
    min_fragment: int
    """Minimum length of either piece of a cut."""
    guard: int
    """Packs that may be emitted while a segment waits. After that it is packed in order."""
    max_samples: int
    """Maximum segments per pack."""
    multiple: int
    """All lengths and cuts are multiples of this."""


class Work(NamedTuple):
    """The arrays of one call."""

    rows: Int64Array
    """Segment rows, buffered ones first, shape (n, 6). A cut moves the start of its row."""
    pool: Int64Array
    """Shape (3, n). ORDER: the pool, as places in `rows`, in [head, tail). BORN: value of
    POOL_PACKS when each row was pulled. CHOSEN: by place in the pool from head, 1 for segments of
    the current pack; of open packs, by row, the next row of the same pack."""
    out: Int64Array
    """Segment rows of closed packs, shape (2n, 6): every row may be cut once."""
    cursor: Int64Array
    """HEAD, TAIL, NEXT, TOKENS, HIGH_TOKENS, HIGH_SAMPLES, NUM_OUT, NUM_PACKS, POOL_PACKS. SEEN is
    one past the last row that was looked at. No further row is examined when MOST_PACKS packs are
    closed, or after NUM_ROWS. From NUM_CURSORS on, one past the last segment of each closed pack.
    Shape (NUM_CURSORS + n,)."""


@compiled_inline
def continues_last(work: Work, row: int) -> bool:
    """Whether a row continues the last segment of the current pack."""
    rows, out, cursor = work.rows, work.out, work.cursor
    last = cursor[NUM_OUT] - 1
    num_packs = cursor[NUM_PACKS]
    if last < (cursor[NUM_CURSORS + num_packs - 1] if num_packs else 0):
        return False
    for column in range(START):
        if out[last, column] != rows[row, column]:
            return False
    return bool(out[last, START] + out[last, LENGTH] == rows[row, START])


@compiled_inline
def emit(work: Work, row: int, length: int) -> None:
    """Append the first `length` tokens of a row to the current pack, as a new segment."""
    rows, out, cursor = work.rows, work.out, work.cursor
    place = cursor[NUM_OUT]
    for column in range(NUM_COLUMNS):
        out[place, column] = rows[row, column]
    out[place, LENGTH] = length
    cursor[NUM_OUT] = place + 1


@compiled
def emit_piece(work: Work, row: int, length: int) -> None:
    """Append as `emit` does, but merge a row that continues the last segment into it.

    Separate from `emit`, which is inlined and must stay small. Few rows start inside a sample.
    """
    if continues_last(work, row):
        work.out[work.cursor[NUM_OUT] - 1, LENGTH] += length
    else:
        emit(work, row, length)


@compiled_inline
def close(cursor: Int64Array) -> None:
    """Close the current pack."""
    cursor[NUM_CURSORS + cursor[NUM_PACKS]] = cursor[NUM_OUT]
    cursor[NUM_PACKS] += 1


@compiled
def cut_head(limits: Limits, work: Work, row: int, gap: int) -> int:
    """Fill a gap with the head of a row if that is allowed; return the tokens taken."""
    length = work.rows[row, LENGTH]
    # If the tail would be too short, cut earlier instead of not at all. Otherwise packs of segments
    # of half a pack would stay half empty.
    taken = min(gap, length - limits.min_fragment)
    taken -= taken % limits.multiple
    if gap <= limits.split_gap or length <= gap or taken < limits.min_fragment:
        return 0
    emit_piece(work, row, taken)
    work.rows[row, START] += taken
    work.rows[row, LENGTH] -= taken
    return int(taken)


@compiled_inline
def note_high_water(cursor: Int64Array) -> None:
    """Update the high-water marks of the pool."""
    cursor[HIGH_TOKENS] = max(cursor[HIGH_TOKENS], cursor[TOKENS])
    cursor[HIGH_SAMPLES] = max(cursor[HIGH_SAMPLES], cursor[TAIL] - cursor[HEAD])


@compiled
def pull(limits: Limits, work: Work, final: bool) -> int:
    """Pull one row into the pool. Full rows before it become packs of their own."""
    rows, pool, cursor = work.rows, work.pool, work.cursor
    while cursor[NEXT] < cursor[NUM_ROWS]:
        row = cursor[NEXT]
        if cursor[NUM_PACKS] >= cursor[MOST_PACKS] and row >= cursor[SEEN]:
            break
        cursor[SEEN] = max(cursor[SEEN], row + 1)
        length = rows[row, LENGTH]
        if length < limits.pack_tokens:
            num_samples = cursor[TAIL] - cursor[HEAD] + 1
            if (
                num_samples > limits.buffer_samples
                or cursor[TOKENS] + length > limits.buffer_tokens
            ):
                return FULL
            pool[ORDER, cursor[TAIL]] = row
            pool[BORN, row] = cursor[POOL_PACKS]
            cursor[TAIL] += 1
            cursor[NEXT] += 1
            cursor[TOKENS] += length
            note_high_water(cursor)
            return PULLED
        emit_piece(work, row, length)
        close(cursor)
        cursor[NEXT] += 1
    return FULL if final else EMPTY


@compiled
def take_in_order(limits: Limits, work: Work, final: bool) -> tuple[int, int]:
    """Count the oldest segments to take in order, and the tokens then left; (0, 0): wait."""
    rows, pool, cursor = work.rows, work.pool, work.cursor
    head = cursor[HEAD]
    left = limits.pack_tokens - rows[pool[ORDER, head], LENGTH]
    count = 1
    while head + count < cursor[TAIL] and count < limits.max_samples:
        row = pool[ORDER, head + count]
        has_waited = cursor[POOL_PACKS] - pool[BORN, row] >= limits.guard
        if not has_waited or rows[row, LENGTH] > left:
            break
        left -= rows[row, LENGTH]
        count += 1
    while left > limits.search_tokens and count < limits.max_samples:
        if head + count == cursor[TAIL]:
            status = pull(limits, work, final)
            if status == EMPTY:
                return 0, 0
            if status == FULL:
                break
        length = rows[pool[ORDER, head + count], LENGTH]
        if left - length < limits.search_tokens:
            break
        left -= length
        count += 1
    return count, left


@compiled_inline
def has_bit(sums: npt.NDArray[np.uint64], begin: int, bit: int) -> bool:
    """Whether a sum is reachable in the row of words that starts at `begin`."""
    return bool((sums[begin + (bit >> 6)] >> np.uint64(bit & 63)) & ONE)


@compiled
def highest_bit(sums: npt.NDArray[np.uint64], begin: int, last: int, first: int) -> int:
    """Return the largest reachable sum in [first, last], or -1."""
    if last < first:
        return -1
    word = last >> 6
    # Bits up to `high`, aligned to the top of a word. Those above `last` are shifted out.
    bits = sums[begin + word] << (LAST_BIT - np.uint64(last & 63))
    high = last
    while bits == 0 and word > first >> 6:
        word -= 1
        high = (word << 6) + 63
        bits = sums[begin + word]
    if high - first < 63:
        bits &= ALL_BITS << (LAST_BIT - np.uint64(high - first))
    if bits == 0:
        return -1
    step = 32
    while step > 0:
        if bits >> np.uint64(64 - step) == 0:
            bits <<= np.uint64(step)
            high -= step
        step >>= 1
    return high


@compiled
def add_length(
    sums: npt.NDArray[np.uint64], begin: int, num_words: int, used: int, length: int
) -> None:
    """Write the next row of sums: those of the row at `begin`, and those plus `length`.

    Rows are `num_words` apart, and the first `used` words of them are initialised.
    """
    # Unsigned: signed indices need a check for negative values, which prevents vectorisation.
    source, target = np.uint64(begin), np.uint64(begin + num_words)
    skip = np.uint64(length >> 6)
    left = np.uint64(length & 63)
    right = LAST_BIT - left
    for word in range(skip):
        sums[target + word] = sums[source + word]
    sums[target + skip] = sums[source + skip] | (sums[source] << left)
    above, here = target + skip + ONE, source + skip + ONE
    low = source + ONE
    for word in range(np.uint64(used) - skip - ONE):
        # Two shifts, because a shift by 64 is undefined (if the length is a multiple of 64).
        carried = (sums[source + word] >> ONE) >> right
        sums[above + word] = sums[here + word] | (sums[low + word] << left) | carried


@compiled_inline
def add_row(sums: npt.NDArray[np.uint64], row: int, left: int, total: int, length: int) -> int:
    """Write the row of sums after `row`, by adding a segment of `length` tokens.

    Only words up to `total`, the sum of all segments so far, are ever written. Returns FILLED if
    `left` is reached, in which case no row is written, or TOO_SMALL if the scratch has no room.
    """
    num_words = (left >> 6) + 1
    begin = row * num_words
    before = min(total, left)
    used = (min(total + length, left) >> 6) + 1
    for word in range(np.uint64(begin + (before >> 6) + 1), np.uint64(begin + used)):
        sums[word] = 0
    if left - length <= before and has_bit(sums, begin, left - length):
        return FILLED
    if begin + 2 * num_words > len(sums):
        return TOO_SMALL
    add_length(sums, begin, num_words, used, length)
    return ADDED


@compiled_inline
def mark(
    work: Work, sums: npt.NDArray[np.uint64], span: tuple[int, int, int, int, int], best: int
) -> None:
    """Mark the segments that first reached the sum `best`, by going back through the rows."""
    rows, pool = work.rows, work.pool
    head, first, last, left, num_rows = span
    num_words = (left >> 6) + 1
    for place in range(last - 1, first - 1, -1):
        length = rows[pool[ORDER, head + place], LENGTH]
        pool[CHOSEN, place] = 0
        if length <= left:
            num_rows -= 1
            # Not reachable without this segment, so this one reached it first.
            if best > 0 and not has_bit(sums, num_rows * num_words, best):
                pool[CHOSEN, place] = 1
                best -= length


@compiled
def search(
    limits: Limits, work: Work, sums: npt.NDArray[np.uint64], task: tuple[int, int, bool]
) -> int:
    """Choose segments of the pool, from place `first` on, to fill `left` tokens with few looks.

    `sums`: scratch for rows of sums; `task`: `first`, `left`, and whether no more rows will come.

    Returns:
        The number of places examined; WAIT if more rows are needed; TOO_SMALL if the search must be
        repeated with larger scratch.
    """
    rows, pool, cursor = work.rows, work.pool, work.cursor
    first, left, final = task
    num_words = (left >> 6) + 1
    sums[0] = 1
    head, place, num_rows, looks = cursor[HEAD], first, 0, limits.patience
    best = total = 0
    while looks > 0 and best < left:
        if head + place == cursor[TAIL]:
            status = pull(limits, work, final)
            if status == EMPTY:
                return WAIT
            if status == FULL:
                break
        length = rows[pool[ORDER, head + place], LENGTH]
        place += 1
        if length <= left:
            status = add_row(sums, num_rows, left, total, length)
            num_rows += 1
            total += length
            if status == FILLED:
                best = left
                break
            if status == TOO_SMALL:
                return TOO_SMALL
        begin = num_rows * num_words
        best = highest_bit(sums, begin, min(left, total), max(left - limits.tolerance, 0))
        if best >= 0:
            looks -= 1
    if best < 0:
        best = highest_bit(sums, num_rows * num_words, min(left, total), 0)
    mark(work, sums, (head, first, place, left, num_rows), best)
    return place


@compiled
def best_counted(counts: npt.NDArray[np.int16], last: int, first: int, budget: int) -> int:
    """Return the largest sum in [first, last] of at most `budget` segments, or -1."""
    for best in range(last, first - 1, -1):
        if counts[best] <= budget:
            return best
    return -1


@compiled_inline
def mark_counted(
    work: Work, counts: npt.NDArray[np.int16], span: tuple[int, int, int, int, int], best: int
) -> None:
    """Mark at most `budget` segments that add up to `best`, preferring the oldest."""
    rows, pool = work.rows, work.pool
    head, first, last, left, budget = span
    num_rows = len(counts)
    for place in range(last - 1, first - 1, -1):
        length = rows[pool[ORDER, head + place], LENGTH]
        pool[CHOSEN, place] = 0
        if length <= left:
            num_rows -= 1
            # Not reachable with so few segments without this one, so it is one of them.
            if counts[num_rows, best] > budget:
                pool[CHOSEN, place] = 1
                best -= length
                budget -= 1


@kernel_allocating
def search_counted(limits: Limits, work: Work, task: tuple[int, int, bool]) -> int:
    """Choose as `search` does, but respect `max_samples`; the result is never TOO_SMALL.

    A row of counts contains, for each sum, the minimum number of segments that reach it.
    """
    rows, pool, cursor = work.rows, work.pool, work.cursor
    first, left, final = task
    budget = limits.max_samples - first
    counts = np.empty((COUNTED_ROWS + 1, left + 1), np.int16)
    counts[0, :] = NEVER
    counts[0, 0] = 0
    head, place, num_rows, looks = cursor[HEAD], first, 0, limits.patience
    best = left if budget == 0 else 0
    while looks > 0 and best < left and num_rows < COUNTED_ROWS:
        if head + place == cursor[TAIL]:
            status = pull(limits, work, final)
            if status == EMPTY:
                return WAIT
            if status == FULL:
                break
        length = rows[pool[ORDER, head + place], LENGTH]
        place += 1
        if length <= left:
            before, after = counts[num_rows], counts[num_rows + 1]
            num_rows += 1
            for total in range(length):  # numba takes seconds to compile a slice assignment
                after[total] = before[total]
            for total in range(length, left + 1):
                after[total] = min(before[total], before[total - length] + 1)
        best = best_counted(counts[num_rows], left, max(left - limits.tolerance, 0), budget)
        if best >= 0:
            looks -= 1
    best = best_counted(counts[num_rows], left, 0, budget)
    mark_counted(work, counts[:num_rows], (head, first, place, left, budget), best)
    return place


@compiled
def close_chosen(limits: Limits, work: Work, looked: tuple[int, int]) -> None:
    """Close a pack of the chosen segments, and compact the pool.

    `looked`: the first place that was examined (all before it are taken), and one past the last.
    """
    rows, pool, cursor = work.rows, work.pool, work.cursor
    first, last = looked
    head = cursor[HEAD]
    num_tokens, num_samples = 0, 0
    for place in range(last):
        if place < first or pool[CHOSEN, place]:
            row = pool[ORDER, head + place]
            if rows[row, START]:
                emit_piece(work, row, rows[row, LENGTH])
            else:
                emit(work, row, rows[row, LENGTH])
            num_tokens += rows[row, LENGTH]
            num_samples += 1
    target = head + last
    for place in range(last - 1, first - 1, -1):
        if not pool[CHOSEN, place]:
            target -= 1
            pool[ORDER, target] = pool[ORDER, head + place]
    cursor[HEAD] = target
    cursor[TOKENS] -= num_tokens
    gap = limits.pack_tokens - num_tokens
    if target < cursor[TAIL] and num_samples < limits.max_samples:
        cursor[TOKENS] -= cut_head(limits, work, pool[ORDER, target], gap)
    cursor[POOL_PACKS] += 1
    close(cursor)


@kernel_allocating
def one_pack(
    limits: Limits, work: Work, sums: npt.NDArray[np.uint64], final: bool
) -> tuple[bool, npt.NDArray[np.uint64]]:
    """Close a pack opened by the oldest segment. Return whether that succeeded, and the scratch."""
    first, left = take_in_order(limits, work, final)
    if first == 0:
        return False, sums
    task = (first, left, final)
    looked = search(limits, work, sums, task)
    while looked == TOO_SMALL:
        sums = np.empty(2 * len(sums), np.uint64)
        looked = search(limits, work, sums, task)
    num_samples = first
    for place in range(first, looked):
        num_samples += work.pool[CHOSEN, place]
    if num_samples > limits.max_samples:
        looked = search_counted(limits, work, task)
    if looked > 0:
        close_chosen(limits, work, (first, looked))
    return looked > 0, sums


@kernel_allocating
def first_sums(limits: Limits) -> npt.NDArray[np.uint64]:
    """Return scratch for rows of sums."""
    # At least one row of full width: a full buffer may end the plain order early.
    num_words = max(FIRST_ROWS * ((limits.search_tokens >> 6) + 1), (limits.pack_tokens >> 6) + 1)
    return np.empty(num_words, np.uint64)


@kernel_allocating
def fit_exactly(limits: Limits, work: Work, final: bool) -> None:
    """Close every pack that can be closed; with `final`, also those that no row will fill."""
    sums = first_sums(limits)
    cursor = work.cursor
    closed = True
    while closed and (cursor[HEAD] < cursor[TAIL] or pull(limits, work, final) == PULLED):
        closed, sums = one_pack(limits, work, sums, final)


@kernel_allocating
def fill_room(limits: Limits, work: Work, room: int) -> None:
    """Close a pack of at most `room` tokens from the pool. It may leave the oldest segment."""
    sums = first_sums(limits)
    looked = search(limits, work, sums, (NOTHING, room, FINAL))
    while looked == TOO_SMALL:
        sums = np.empty(2 * len(sums), np.uint64)
        looked = search(limits, work, sums, (NOTHING, room, FINAL))
    close_chosen(limits, work, (NOTHING, looked))


@compiled
def empty_pool(work: Work) -> None:
    """Move the whole pool to the current pack."""
    rows, pool, cursor = work.rows, work.pool, work.cursor
    for place in range(cursor[HEAD], cursor[TAIL]):
        row = pool[ORDER, place]
        emit_piece(work, row, rows[row, LENGTH])
    cursor[HEAD] = cursor[TAIL]
    cursor[TOKENS] = 0


@compiled
def fit_in_order(limits: Limits, work: Work, final: bool) -> None:
    """Add rows to the open pack, which is the whole pool. Close it if a row does not fit."""
    rows, pool, cursor = work.rows, work.pool, work.cursor
    while cursor[NEXT] < cursor[NUM_ROWS] and cursor[NUM_PACKS] < cursor[MOST_PACKS]:
        row = cursor[NEXT]
        cursor[NEXT] += 1
        gap = limits.pack_tokens - cursor[TOKENS]
        if rows[row, LENGTH] > gap:
            empty_pool(work)
            cut_head(limits, work, row, gap)
            close(cursor)
        pool[ORDER, cursor[TAIL]] = row
        cursor[TAIL] += 1
        cursor[TOKENS] += rows[row, LENGTH]
        note_high_water(cursor)
        num_samples = cursor[TAIL] - cursor[HEAD]
        most = min(limits.buffer_samples, limits.max_samples)
        if cursor[TOKENS] == limits.pack_tokens or num_samples == most:
            empty_pool(work)
            close(cursor)
    if final and cursor[HEAD] < cursor[TAIL]:
        empty_pool(work)
        close(cursor)


FREE, COUNT, OPENED, FIRST, LAST = range(5)  # of an open pack: OPENED is POOL_PACKS at that time
NUM_OPEN_COLUMNS = 5
NO_ROW = -1


@compiled
def close_slot(limits: Limits, work: Work, opened: Int64Array, slot: int, row: int) -> None:
    """Close an open pack, and fill its gap with the head of `row` if there is one.

    Later open packs move up.
    """
    cursor, place = work.cursor, opened[slot, FIRST]
    while place != NO_ROW:
        emit(work, place, work.rows[place, LENGTH])
        place = work.pool[CHOSEN, place]
    if row != NO_ROW:
        cut_head(limits, work, row, opened[slot, FREE])
    close(cursor)
    cursor[TOKENS] -= limits.pack_tokens - opened[slot, FREE]
    cursor[HEAD] += opened[slot, COUNT]
    cursor[POOL_PACKS] += 1
    cursor[NUM_OPEN] -= 1
    for later in range(slot, cursor[NUM_OPEN]):
        for column in range(NUM_OPEN_COLUMNS):
            opened[later, column] = opened[later + 1, column]


@compiled
def find_slot(work: Work, opened: Int64Array, length: int, fullest: bool) -> int:
    """Return the fullest or the oldest open pack with room for a segment, or -1."""
    best = -1
    for slot in range(work.cursor[NUM_OPEN]):
        free = opened[slot, FREE]
        if free >= length and (best < 0 or free < opened[best, FREE]):
            best = slot
            if not fullest:
                break
    return best


@compiled
def close_waiting(limits: Limits, work: Work, opened: Int64Array) -> None:
    """Close the packs that have seen `guard` packs close since they were opened."""
    cursor = work.cursor
    while cursor[NUM_OPEN] > 0 and cursor[POOL_PACKS] - opened[0, OPENED] >= limits.guard:
        close_slot(limits, work, opened, 0, NO_ROW)


@compiled
def put_row(limits: Limits, work: Work, opened: Int64Array, row: int, fullest: bool) -> None:
    """Place a row that is shorter than a pack, and close packs as necessary."""
    cursor = work.cursor
    while True:
        length = work.rows[row, LENGTH]
        slot = find_slot(work, opened, length, fullest)
        has_room = slot >= 0 or cursor[NUM_OPEN] < len(opened)
        is_bound_kept = (
            cursor[TOKENS] + length <= limits.buffer_tokens
            and cursor[TAIL] - cursor[HEAD] < limits.buffer_samples
        )
        if has_room and is_bound_kept:
            break
        # Every pack has room for 0 tokens, so this finds the fullest or the oldest.
        close_slot(limits, work, opened, find_slot(work, opened, 0, fullest), row)
        close_waiting(limits, work, opened)
    if slot < 0:
        slot = cursor[NUM_OPEN]
        opened[slot, FREE], opened[slot, COUNT] = limits.pack_tokens, 0
        opened[slot, OPENED], opened[slot, FIRST] = cursor[POOL_PACKS], row
        cursor[NUM_OPEN] += 1
    else:
        work.pool[CHOSEN, opened[slot, LAST]] = row
    work.pool[CHOSEN, row] = NO_ROW
    opened[slot, LAST] = row
    opened[slot, FREE] -= length
    opened[slot, COUNT] += 1
    cursor[TOKENS] += length
    cursor[TAIL] += 1
    note_high_water(cursor)
    if opened[slot, FREE] == 0 or opened[slot, COUNT] == limits.max_samples:
        close_slot(limits, work, opened, slot, NO_ROW)
        close_waiting(limits, work, opened)


@compiled
def fit_open(limits: Limits, work: Work, opened: Int64Array, fullest: bool, final: bool) -> None:
    """Place rows into open packs, shape (open_packs, NUM_OPEN_COLUMNS), oldest first.

    A full row becomes a pack by itself. `fullest`: best fit, not first fit; `final`: close all.
    """
    pool, cursor = work.pool, work.cursor
    while cursor[NEXT] < cursor[NUM_ROWS]:
        row = cursor[NEXT]
        cursor[NEXT] += 1
        if work.rows[row, LENGTH] < limits.pack_tokens:
            put_row(limits, work, opened, row, fullest)
        else:
            emit(work, row, work.rows[row, LENGTH])
            close(cursor)
    while final and cursor[NUM_OPEN] > 0:
        close_slot(limits, work, opened, 0, NO_ROW)
    place = cursor[HEAD]
    for slot in range(cursor[NUM_OPEN]):
        row = opened[slot, FIRST]
        while row != NO_ROW:
            pool[ORDER, place] = row
            place, row = place + 1, pool[CHOSEN, row]


ADD, FLUSH, CLOSE_OLDEST = (cast(int, np.int64(task)) for task in range(3))  # of a tier
TURN, TURN_TOKENS, HIGH_TURN, HIGH_HELD, ITEMS, ITEM_ROWS, ITEM_SAMPLES, OUT, ROWS = range(9)
NUM_COUNTS = 9
TURN_SAMPLES = 64  # short segments collected before they are passed to the short tier


class Tiers(NamedTuple):
    """The arrays of one call of `fit_tiers`: each tier's work, and what passes between them."""

    short_limits: Limits
    long_limits: Limits
    short: Work
    """Its rows from NUM_ROWS on are collected for its next turn."""
    long: Work
    """Its rows represent items. The sample column is the item's number."""
    items: Int64Array
    """Segments of the items, one item after the other, shape (n, 6)."""
    spans: Int64Array
    """Begin and end of each item in `items`, shape (n, 2)."""
    out: Int64Array
    """Segments of the closed rows, shape (n, 6)."""
    ends: Int64Array
    """One past the last segment of each closed row, shape (n,)."""
    counts: Int64Array
    """TURN, TURN_TOKENS, ... up to NUM_COUNTS."""


@compiled
def room_of(length: int, multiple: int) -> int:
    """Return the slots that a segment takes in a pack."""
    return (length + multiple - 1) // multiple * multiple


@compiled
def copy_rows(source: Int64Array, first: int, last: int, target: Int64Array, place: int) -> int:
    """Copy rows [first, last) without padding to `place` in `target`; return the place after them.

    Only the last piece of a sample is followed by padding.
    """
    for row in range(first, last):
        for column in range(NUM_COLUMNS):
            target[place, column] = source[row, column]
        left = source[row, TOTAL] - source[row, START]
        target[place, LENGTH] = min(source[row, LENGTH], left)
        place += 1
    return place


@compiled
def add_item(tiers: Tiers, segments: Int64Array, first: int, last: int) -> None:
    """Store segments as an item, and add the row that represents it to the long tier."""
    counts, rows, cursor = tiers.counts, tiers.long.rows, tiers.long.cursor
    item, begin, place = counts[ITEMS], counts[ITEM_ROWS], cursor[NUM_ROWS]
    num_slots = 0
    for row in range(first, last):
        num_slots += room_of(segments[row, LENGTH], tiers.long_limits.multiple)
    for column in range(NUM_COLUMNS):
        rows[place, column] = 0
    rows[place, SAMPLE], rows[place, LENGTH], rows[place, TOTAL] = item, num_slots, num_slots
    counts[ITEM_ROWS] = copy_rows(segments, first, last, tiers.items, begin)
    tiers.spans[item, 0], tiers.spans[item, 1] = begin, counts[ITEM_ROWS]
    counts[ITEM_SAMPLES] += last - first
    counts[ITEMS] += 1
    cursor[NUM_ROWS] += 1


@kernel_allocating
def close_packs(limits: Limits, work: Work, what: int) -> int:
    """Run a tier on its rows; return the number of packs that it closed, in `work.out`."""
    work.cursor[NUM_OUT] = work.cursor[NUM_PACKS] = 0
    if what == CLOSE_OLDEST:
        one_pack(limits, work, first_sums(limits), FINAL)
    else:
        fit_exactly(limits, work, what == FLUSH)
    return int(work.cursor[NUM_PACKS])


@kernel_allocating
def fill_long(tiers: Tiers, what: int) -> None:
    """Run the long tier, and emit the segments of the rows that it closes."""
    counts, spans, packed = tiers.counts, tiers.spans, tiers.long.out
    short, ends = tiers.short, tiers.long.cursor
    first = 0
    for pack in range(close_packs(tiers.long_limits, tiers.long, what)):
        room = tiers.long_limits.pack_tokens
        last = ends[NUM_CURSORS + pack]
        for row in range(first, last):
            begin, end = spans[packed[row, SAMPLE]]
            counts[OUT] = copy_rows(tiers.items, begin, end, tiers.out, counts[OUT])
            counts[ITEM_SAMPLES] -= end - begin
            room -= packed[row, LENGTH]
        first = last
        if short.cursor[HEAD] < short.cursor[TAIL]:
            short.cursor[NUM_OUT] = short.cursor[NUM_PACKS] = 0
            fill_room(tiers.short_limits, short, room)
            num_taken = short.cursor[NUM_OUT]
            counts[OUT] = copy_rows(short.out, 0, num_taken, tiers.out, counts[OUT])
        tiers.ends[counts[ROWS]] = counts[OUT]
        counts[ROWS] += 1


@kernel_allocating
def fill_short(tiers: Tiers, what: int) -> None:
    """Run the short tier on the collected segments; its packs become items of the long tier."""
    counts, cursor = tiers.counts, tiers.short.cursor
    cursor[NUM_ROWS] += counts[TURN]
    counts[TURN] = counts[TURN_TOKENS] = 0
    num_packs = close_packs(tiers.short_limits, tiers.short, what)
    first = 0
    for pack in range(num_packs):
        last = cursor[NUM_CURSORS + pack]
        add_item(tiers, tiers.short.out, first, last)
        first = last
    if num_packs > 0:
        fill_long(tiers, ADD)


@compiled
def num_held(tiers: Tiers) -> int:
    """Return the number of segments in the buffer, including collected ones."""
    cursor = tiers.short.cursor
    return int(tiers.counts[TURN] + cursor[TAIL] - cursor[HEAD] + tiers.counts[ITEM_SAMPLES])


@kernel_allocating
def fit_tiers(
    tiers: Tiers, segments: Int64Array, turn_tokens: int, buffer_samples: int, final: bool
) -> None:
    """Add segment rows in arrival order; with `final`, emit rows with everything buffered.

    `turn_tokens` limits the collected short segments, `buffer_samples` the segments of both tiers.
    Nesting of kernels is kept shallow: each one recompiles everything that it calls.
    """
    counts, short, long = tiers.counts, tiers.short, tiers.long.cursor
    short_seq_len, multiple = tiers.short_limits.pack_tokens, tiers.short_limits.multiple
    for row in range(len(segments)):
        while num_held(tiers) >= buffer_samples:
            if counts[TURN]:
                fill_short(tiers, ADD)
            elif long[HEAD] == long[TAIL]:
                fill_short(tiers, CLOSE_OLDEST)
            else:
                fill_long(tiers, CLOSE_OLDEST)
        length = room_of(segments[row, LENGTH], multiple)
        is_long = length > short_seq_len
        if counts[TURN] and (is_long or counts[TURN_TOKENS] + length > turn_tokens):
            fill_short(tiers, ADD)
        if is_long:
            add_item(tiers, segments, row, row + 1)
            fill_long(tiers, ADD)
        else:
            place = short.cursor[NUM_ROWS] + counts[TURN]
            copy_rows(segments, row, row + 1, short.rows, place)
            short.rows[place, LENGTH] = length
            counts[TURN] += 1
            counts[TURN_TOKENS] += length
            if counts[TURN] == TURN_SAMPLES or length > turn_tokens:
                fill_short(tiers, ADD)
        counts[HIGH_TURN] = max(counts[HIGH_TURN], counts[TURN_TOKENS])
        counts[HIGH_HELD] = max(counts[HIGH_HELD], num_held(tiers))
    if final:
        if counts[TURN]:
            fill_short(tiers, ADD)
        fill_short(tiers, FLUSH)
        fill_long(tiers, FLUSH)
