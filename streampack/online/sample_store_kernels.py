"""Kernels of the sample store: the table of pieces, and the copies into rows.

::

    table    stream pass sample  start length left  offset after serial next      a line a piece
    heads    hash of (stream, pass, sample) --> line --next--> line ...
    tokens   | a a a a | b b | c c c c c c | ...                                 a piece at `offset`

They share a file, because numba's disk cache does not notice a changed callee in another one.

Cost: about 20 ns per piece, a copy of its tokens, and about 1 ns per token for the digest.
"""

from __future__ import annotations

from typing import TypeAlias

from streampack._checks import MAX_ID
from streampack._numba import compiled
from streampack.special_ids import NO_ID
from streampack.types import (
    IGNORED,
    LENGTH,
    PASS,
    SAMPLE,
    START,
    STREAM,
    TOKENS,
    TOTAL,
    BoolArray,
    Int32Array,
    Int64Array,
    IntArray,
)

Held: TypeAlias = tuple[Int64Array, Int64Array, Int32Array, Int32Array]

SIZE, LEFT, OFFSET, AFTER, SERIAL, NEXT = range(4, 10)
NUM_TABLE = 10
NO_LINE = -1
FACTOR = 6364136223846793005  # Knuth's MMIX multiplier: its powers repeat only after 2**62
# Its powers in int64 (products wrap): four tokens are mixed in without waiting for each other.
FACTOR_2, FACTOR_3, FACTOR_4 = (
    (pow(FACTOR, power, 1 << 64) ^ (1 << 63)) - (1 << 63) for power in (2, 3, 4)
)


@compiled
def _bucket(heads: Int64Array, stream: int, pass_: int, sample: int) -> int:
    """Return a sample's hash bucket in `heads` (its length is a power of 2)."""
    mixed = (sample * 0x9E3779B97F4A7C1 + pass_ * 0x85EBCA6B + stream * 0xC2B2AE35) & (2**62 - 1)
    return int((mixed ^ (mixed >> 31)) & (len(heads) - 1))


@compiled
def enter(table: Int64Array, heads: Int64Array, first: int, last: int) -> None:
    """Insert lines `first` to `last` - 1 into the hash table; they leave it in `compact`."""
    for line in range(first, last):
        bucket = _bucket(heads, table[line, 0], table[line, 1], table[line, 2])
        table[line, NEXT] = heads[bucket]
        heads[bucket] = line


@compiled
def _is_same(row: Int64Array, other: Int64Array) -> bool:
    is_near = row[SAMPLE] == other[SAMPLE] and row[PASS] == other[PASS]
    return bool(is_near and row[STREAM] == other[STREAM])


@compiled
def _find(table: Int64Array, heads: Int64Array, segment: Int64Array, start: int) -> int:
    """Return the line of the piece with token `start` of a segment's sample, or NO_LINE."""
    line = heads[_bucket(heads, segment[0], segment[1], segment[2])]
    while line != NO_LINE:
        begin = table[line, START]
        is_in = table[line, LEFT] > 0 and begin <= start < begin + table[line, SIZE]
        if is_in and _is_same(table[line], segment):
            break
        line = table[line, NEXT]
    return int(line)


@compiled
def _copy(source: IntArray, out: IntArray) -> None:
    """Copy tokens, shape (n,), front to back; slices as arguments let LLVM vectorise the loop."""
    for i in range(len(source)):
        out[i] = source[i]


@compiled
def _fill(out: Int32Array, value: int) -> None:
    """Set all of a slice, shape (n,), to a value."""
    for i in range(len(out)):
        out[i] = value


@compiled
def _mix(mixed: int, values: IntArray) -> int:
    """Return `mixed` times FACTOR plus the value, for one value after another, shape (n,)."""
    num_fours = len(values) // 4
    for i in range(num_fours):
        a, b, c, d = values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]
        mixed = mixed * FACTOR_4 + (a * FACTOR_3 + b * FACTOR_2 + (c * FACTOR + d))
    for i in range(4 * num_fours, len(values)):
        mixed = mixed * FACTOR + values[i]
    return mixed


@compiled
def hold(
    held: Held,
    place: tuple[int, int, int],
    samples: tuple[Int64Array, Int64Array, BoolArray, Int64Array],
    own: tuple[Int32Array, Int32Array, Int32Array],
    digests: tuple[Int64Array, Int64Array],
    ids: tuple[int, int, int],
    is_in_place: bool,
) -> int:
    """Encode samples and add their pieces to the table.

    Args:
        held: Table, heads, tokens and labels; empty labels: they follow from the tokens.
        place: The next line, the first token, and the first serial number.
        samples: Rows of stream, pass, number and length, shape (n, 4); how many own tokens,
            labels, values of a loss mask, and slots of payloads each has, shape (n, 4); whether
            labels[i] is the target of token i + 1, for each stream; and their pieces, in the same
            order, shape (m, 6).
        own: Tokens, labels and loss masks of all samples, one sample after another.
        digests: Digest so far of each stream, updated with tokens and labels; and a hash of what
            else each sample has, shape (n,).
        ids: BOS and EOS, NO_ID: none; and the token of payload slots.
        is_in_place: The own tokens are where they belong in the store.

    Returns:
        The index of the first sample with an invalid token id or label; n: all are valid.
    """
    table, heads, tokens, labels = held
    rows, sizes, are_shifted, segments = samples
    own_tokens, own_labels, own_mask = own
    first_line, offset, serial = place
    at_token, at_label, at_mask, first_bad, piece = 0, 0, 0, len(rows), 0
    for i in range(len(rows)):
        num, num_labels, num_mask, num_slots = sizes[i]
        length = rows[i, TOKENS] - num_slots
        own_ids = own_tokens[at_token : at_token + num]
        out = tokens[offset : offset + length]
        beside = labels[offset : offset + length] if len(labels) else labels
        targets = (
            own_labels[at_label : at_label + num_labels],
            own_mask[at_mask : at_mask + num_mask],
        )
        shifted = are_shifted[rows[i, STREAM]]
        is_valid = _encode(own_ids, targets, shifted, ids, out, beside, is_in_place)
        if not is_valid and first_bad == len(rows):
            first_bad = i
        if num_slots:
            _fill(tokens[offset + length : offset + length + num_slots], ids[2])
            if len(labels):
                _fill(labels[offset + length : offset + length + num_slots], IGNORED)
        end, totals = offset + length + num_slots, digests[0]
        mixed = _mix(totals[rows[i, STREAM]] * FACTOR + digests[1][i], tokens[offset:end])
        mixed = _mix(mixed, labels[offset:end] if len(labels) else labels)
        totals[rows[i, STREAM]] = mixed * FACTOR + length
        while piece < len(segments) and _is_same(segments[piece], rows[i]):
            entry = table[first_line + piece]
            is_cut = segments[piece, TOTAL] < rows[i, TOKENS]
            _note_piece(entry, segments[piece], is_cut, offset, tokens, labels)
            entry[SERIAL] = serial + piece
            piece += 1
        offset = end
        at_token, at_label, at_mask = at_token + num, at_label + num_labels, at_mask + num_mask
    enter(table, heads, first_line, first_line + piece)
    return first_bad


@compiled
def _note_piece(
    entry: Int64Array,
    segment: Int64Array,
    is_cut: bool,
    offset: int,
    tokens: Int32Array,
    labels: Int32Array,
) -> None:
    """Fill the line of a piece of a sample, whose tokens begin at `offset`."""
    begin = offset + segment[START]
    end = begin + segment[LENGTH]
    after = IGNORED
    if segment[START] + segment[LENGTH] < segment[TOTAL]:
        after = labels[end - 1] if len(labels) else tokens[end]
    elif len(labels):
        if is_cut:  # the last token of a truncated sample has no target
            labels[end - 1] = IGNORED
        after = labels[end - 1]
    for column in range(START + 1):
        entry[column] = segment[column]
    entry[SIZE] = entry[LEFT] = segment[LENGTH]
    entry[OFFSET], entry[AFTER] = begin, after


@compiled
def _range(tokens: IntArray) -> tuple[int, int]:
    """Return the minimum, at most 0, and the maximum, at least 0."""
    smallest = largest = 0
    for i in range(len(tokens)):
        smallest, largest = min(smallest, tokens[i]), max(largest, tokens[i])
    return smallest, largest


@compiled
def compact(table: Int64Array, num_lines: int, tokens: Int32Array, labels: Int32Array) -> int:
    """Move the live lines and their tokens to the front; return the number of live lines.

    Lines and tokens are in the same order, so nothing live is overwritten.
    """
    line, used = 0, 0
    for old in range(num_lines):
        if not table[old, LEFT]:
            continue
        offset, size = table[old, OFFSET], table[old, SIZE]
        _copy(tokens[offset : offset + size], tokens[used : used + size])
        if len(labels):
            _copy(labels[offset : offset + size], labels[used : used + size])
        for column in range(NUM_TABLE):
            table[line, column] = table[old, column]
        table[line, OFFSET] = used
        line, used = line + 1, used + size
    return line


@compiled
def _encode(
    own: IntArray,
    targets: tuple[IntArray, IntArray],
    shifted: bool,
    ids: tuple[int, int, int],
    tokens: IntArray,
    labels: IntArray,
    is_in_place: bool,
) -> bool:
    """Write a sample's tokens, with BOS and EOS where they are missing, and its shifted labels.

    A token is a target if the labels and the loss mask allow it. An added EOS is a target if the
    token before it is. Arguments as in `hold`, but for one sample; `labels` may be empty: they are
    not wanted. Return whether all token ids are valid and all labels are within int32.
    """
    own_labels, mask = targets
    num = len(own)
    lead = 1 if ids[0] != NO_ID and own[0] != ids[0] else 0
    tokens[0] = ids[0] if lead else tokens[0]
    if not is_in_place:
        _copy(own, tokens[lead : lead + num])
    smallest, largest = _range(own)
    is_valid = smallest >= 0 and largest <= MAX_ID
    if lead + num < len(tokens):
        tokens[lead + num] = ids[1]
    if not len(labels):
        return is_valid
    target = own[num - 1]
    for i in range(num):
        if not len(own_labels):
            target = own[i]
        elif shifted:
            target = own_labels[i - 1] if i else IGNORED
        else:
            target = own_labels[i]
        if len(mask) and mask[i] == 0:
            target = IGNORED
        if lead + i:
            labels[lead + i - 1] = target
    after = own_labels[num - 1] if len(own_labels) and shifted else IGNORED
    if lead + num < len(tokens):  # an EOS was added: a target if the token before it is one
        last = after if len(own_labels) and shifted else target
        labels[lead + num - 1] = ids[1] if last != IGNORED else IGNORED
        after = IGNORED
    labels[len(tokens) - 1] = after
    smallest, largest = _range(own_labels)
    return is_valid and smallest >= -MAX_ID and largest <= MAX_ID


@compiled
def take_out(
    held: Held,
    packs: tuple[Int64Array, Int64Array],
    multiple: int,
    padding_id: int,
    made: tuple[Int32Array, Int32Array, Int64Array, Int64Array],
) -> tuple[int, int]:
    """Copy the segments of packs into rows; a piece is freed with its last token.

    Args:
        held: Table, heads, tokens and labels; empty labels: they follow from the tokens.
        packs: Segment rows, shape (n, 6), and the end of each pack, shape (num_packs,).
        multiple: Each segment is padded to a multiple of this many tokens.
        padding_id: Token of the padding; its label is IGNORED.
        made: Outputs: tokens and labels, shape (B, S); the token after each segment, shape (n,);
            and the copies, shape (most, 5), as row, offset in the row, line, first token in the
            piece, number of tokens.

    Returns:
        The number of copies, and the first segment that is not buffered or does not fit, or -1.
    """
    (table, heads, tokens, labels), (segments, ends) = held, packs
    out_tokens, out_labels, nexts, copies = made
    num_copies, segment = 0, 0
    for row in range(len(out_tokens)):
        filled = 0
        while row < len(ends) and segment < ends[row]:
            start, left = segments[segment, START], segments[segment, LENGTH]
            is_last = start + left == segments[segment, TOTAL]
            while left > 0:
                line = _find(table, heads, segments[segment], start)
                first = start - table[line, START]
                size = min(left, table[line, SIZE] - first)
                is_full = filled + size > out_tokens.shape[1] or num_copies == len(copies)
                if line == NO_LINE or is_full:
                    return num_copies, segment
                at = table[line, OFFSET] + first
                _copy(tokens[at : at + size], out_tokens[row, filled : filled + size])
                if len(labels):
                    _copy(labels[at : at + size], out_labels[row, filled : filled + size])
                copy = copies[num_copies]
                copy[0], copy[1], copy[2], copy[3], copy[4] = row, filled, line, first, size
                num_copies += 1
                is_whole = first + size == table[line, SIZE]
                nexts[segment] = table[line, AFTER] if is_whole else tokens[at + size]
                table[line, LEFT] -= size
                filled, start, left = filled + size, start + size, left - size
            if is_last:
                nexts[segment] = IGNORED
            padded = filled + -segments[segment, LENGTH] % multiple
            _fill(out_tokens[row, filled:padded], padding_id)
            if len(labels):
                _fill(out_labels[row, filled:padded], IGNORED)
            filled, segment = padded, segment + 1
        _fill(out_tokens[row, filled:], padding_id)
        if len(labels):
            _fill(out_labels[row, filled:], IGNORED)
    return num_copies, -1


@compiled
def release(table: Int64Array, heads: Int64Array, segments: Int64Array) -> None:
    """Free what the store has of segments, shape (n, 6), without copying it."""
    for segment in range(len(segments)):
        start, left = segments[segment, START], segments[segment, LENGTH]
        while left > 0:
            line = _find(table, heads, segments[segment], start)
            size = min(left, table[line, START] + table[line, SIZE] - start)
            table[line, LEFT] -= size
            start, left = start + size, left - size


@compiled
def mark_held(pieces: Int64Array, held: Int64Array, is_held: BoolArray) -> int:
    """Mark the pieces that segments are made of, both in order of arrival, shape (n, 6).

    Return how many tokens of the first of them are in no segment; only that one may be cut.
    """
    piece, cut = 0, 0
    for segment in range(len(held)):
        start = held[segment, START]
        end = start + held[segment, LENGTH]
        while not (
            _is_same(pieces[piece], held[segment])
            and start < pieces[piece, START] + pieces[piece, LENGTH]
        ):
            piece += 1
        if segment == 0:
            cut = start - pieces[piece, START]
        while (
            piece < len(pieces)
            and _is_same(pieces[piece], held[segment])
            and pieces[piece, START] < end
        ):
            is_held[piece] = True
            piece += 1
    return int(cut)
