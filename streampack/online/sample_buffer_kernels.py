"""Kernels of the sample buffer: the table of pieces, and the copies into rows.

::

    table    stream pass sample  start length left digest  offset after  rank next   a line a piece
    heads    hash of (stream, pass, sample) --> line --next--> line ...
    tokens   | a a a a | b b | c c c c c c | ...                                 a piece at `offset`

All kernels are in this one file, because numba's disk cache does not notice a changed callee in
another file.

A digest verifies a piece that is read again on resume. It uses only int64 arithmetic, so states are
portable between machines.

Cost: about 20 ns per piece, a copy of its tokens, and about 1 ns per token for the digest.
"""

from __future__ import annotations

from streampack._numba import compiled
from streampack.config import MAX_ID
from streampack.types import IGNORED, LENGTH, START, TOTAL, Int64Array

KEY = 3  # number of key columns: stream, pass, sample; START follows, as in segment rows
SIZE, LEFT, DIGEST, OFFSET, AFTER, RANK, NEXT = range(4, 11)
NUM_TABLE = 11
NO_LINE = -1
FACTOR = 6364136223846793005  # Knuth's MMIX multiplier: its powers repeat only after 2**62
DIGEST_BITS = 53  # precision that every JSON reader keeps


@compiled
def _place(heads: Int64Array, stream: int, pass_: int, sample: int) -> int:
    """Return a sample's hash slot in `heads`, whose length is a power of 2."""
    mixed = (sample * 0x9E3779B97F4A7C1 + pass_ * 0x85EBCA6B + stream * 0xC2B2AE35) & (2**62 - 1)
    return int((mixed ^ (mixed >> 31)) & (len(heads) - 1))


@compiled
def enter(table: Int64Array, heads: Int64Array, first: int, last: int) -> None:
    """Insert lines `first` to `last` - 1 into the hash table, if they have tokens left."""
    for line in range(first, last):
        if not table[line, LEFT]:
            continue
        place = _place(heads, table[line, 0], table[line, 1], table[line, 2])
        table[line, NEXT] = heads[place]
        heads[place] = line


@compiled
def _leave(table: Int64Array, heads: Int64Array, line: int) -> None:
    """Remove a line from the hash table."""
    place = _place(heads, table[line, 0], table[line, 1], table[line, 2])
    if heads[place] == line:
        heads[place] = table[line, NEXT]
        return
    before = heads[place]
    while table[before, NEXT] != line:
        before = table[before, NEXT]
    table[before, NEXT] = table[line, NEXT]


@compiled
def _find(table: Int64Array, heads: Int64Array, segment: Int64Array, start: int) -> int:
    """Return the line of the piece that holds token `start` of a segment's sample, or NO_LINE."""
    line = heads[_place(heads, segment[0], segment[1], segment[2])]
    while line != NO_LINE:
        is_same = (
            table[line, 0] == segment[0]
            and table[line, 1] == segment[1]
            and table[line, 2] == segment[2]
        )
        if is_same and table[line, START] <= start < table[line, START] + table[line, SIZE]:
            break
        line = table[line, NEXT]
    return int(line)


@compiled
def _copy(source: Int64Array, out: Int64Array) -> None:
    """Copy tokens, shape (n,), front to back; slices as arguments let LLVM vectorise the loop."""
    for i in range(len(source)):
        out[i] = source[i]


@compiled
def digest_of(tokens: Int64Array, labels: Int64Array, after: int, seed: int) -> int:
    """Return a 53-bit polynomial hash of a piece.

    Args:
        tokens: Shape (n,).
        labels: Shape (n,), or (0,): they follow from the tokens.
        after: The token that follows the piece, or IGNORED.
        seed: Start value, a hash of the piece's other contents.
    """
    # The high bits of the polynomial depend on all inputs; int64 wraps.
    mixed = seed
    for i in range(len(tokens)):
        mixed = mixed * FACTOR + tokens[i]
    for i in range(len(labels)):
        mixed = mixed * FACTOR + labels[i]
    mixed = (mixed * FACTOR + after) * FACTOR
    return int((mixed >> (64 - DIGEST_BITS)) & ((1 << DIGEST_BITS) - 1))


@compiled
def settle_whole(
    held: tuple[Int64Array, Int64Array, Int64Array, Int64Array],
    staged: Int64Array,
    place: tuple[int, int, int],
    rows: Int64Array,
) -> bool:
    """Add whole samples, whose tokens are stored already, to the table.

    Args:
        held: Table, heads, tokens and labels; empty labels: they follow from the tokens.
        staged: Stream, pass, sample and number of tokens of each, shape (n, 4).
        place: The next line, the first token, and the first rank.
        rows: Output: segment rows, shape (n, 6).

    Returns:
        Whether any token is not a valid id.
    """
    table, heads, tokens, labels = held
    first, begin, rank = place
    offset = begin
    for i in range(len(staged)):
        line, length = table[first + i], staged[i, KEY]
        for column in range(KEY):
            line[column] = rows[i, column] = staged[i, column]
        line[START] = rows[i, START] = 0
        line[SIZE] = line[LEFT] = rows[i, LENGTH] = rows[i, TOTAL] = length
        line[OFFSET], line[AFTER], line[RANK] = offset, IGNORED, rank + i
        beside = labels[offset : offset + length] if len(labels) else labels
        after = beside[length - 1] if len(beside) else IGNORED
        line[DIGEST] = digest_of(tokens[offset : offset + length], beside, after, length)
        offset += length
    enter(table, heads, first, first + len(staged))
    smallest, largest = _range(tokens[begin:offset])
    return smallest < 0 or largest > MAX_ID


@compiled
def _range(tokens: Int64Array) -> tuple[int, int]:
    """Return the minimum, at most 0, and the maximum, at least 0."""
    smallest = largest = 0
    for i in range(len(tokens)):
        smallest, largest = min(smallest, tokens[i]), max(largest, tokens[i])
    return smallest, largest


@compiled
def compact(table: Int64Array, num_lines: int, tokens: Int64Array, labels: Int64Array) -> int:
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
def put_labels(
    tokens: Int64Array,
    span: tuple[int, int],
    own: Int64Array,
    mask: Int64Array,
    shifted: bool,
    out: Int64Array,
) -> bool:
    """Write the shifted labels of one sample.

    A token is a target if the labels and the loss mask allow it. An added EOS is a target if the
    token before it is.

    Args:
        tokens: With BOS and EOS, shape (n,).
        span: Start of the sample's own tokens (1 if a BOS was added), and their number.
        own: Labels of the sample's own tokens, shape (m,); empty: it has none.
        mask: Which of its own tokens are targets, shape (m,); empty: all.
        shifted: Whether own[i] is the target of token i + 1.
        out: Output, shape (n,).

    Returns:
        Whether any of the sample's own labels is outside int32.
    """
    lead, num = span
    smallest, largest = _range(own)
    target = tokens[lead + num - 1]
    for i in range(num):
        if not len(own):
            target = tokens[lead + i]
        elif shifted:
            target = own[i - 1] if i else IGNORED
        else:
            target = own[i]
        if len(mask) and mask[i] == 0:
            target = IGNORED
        if lead + i:
            out[lead + i - 1] = target
    after = own[num - 1] if len(own) and shifted else IGNORED
    if lead + num < len(tokens):  # an EOS was added: a target if the token before it is one
        speaks = after if len(own) and shifted else target
        out[lead + num - 1] = tokens[lead + num] if speaks != IGNORED else IGNORED
        after = IGNORED
    out[len(tokens) - 1] = after
    return smallest < -MAX_ID or largest > MAX_ID


@compiled
def take_out(
    held: tuple[Int64Array, Int64Array, Int64Array, Int64Array],
    segments: Int64Array,
    ends: Int64Array,
    multiple: int,
    made: tuple[Int64Array, Int64Array, Int64Array, Int64Array],
) -> tuple[int, int]:
    """Copy the segments of packs into rows; a piece is freed with its last token.

    Args:
        held: Table, heads, tokens and labels; empty labels: they follow from the tokens.
        segments: Segment rows, shape (n, 6).
        ends: One past the last segment of each pack, shape (num_packs,).
        multiple: Each segment is padded to a multiple of this many tokens.
        made: Outputs: tokens and labels, shape (B, S); the token after each segment, shape (n,);
            and the copies, shape (most, 5), as row, offset in the row, line, first token in the
            piece, number of tokens.

    Returns:
        The number of copies, and the first segment that is not buffered, or -1.
    """
    table, heads, tokens, labels = held
    out_tokens, out_labels, nexts, copies = made
    num_copies, segment = 0, 0
    for row in range(len(ends)):
        filled = 0
        while segment < ends[row]:
            start, left = segments[segment, START], segments[segment, LENGTH]
            is_last = start + left == segments[segment, TOTAL]
            while left > 0:
                line = _find(table, heads, segments[segment], start)
                if line == NO_LINE:
                    return num_copies, segment
                first = start - table[line, START]
                size = min(left, table[line, SIZE] - first)
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
                if table[line, LEFT] == 0:
                    _leave(table, heads, line)
                filled, start, left = filled + size, start + size, left - size
            if is_last:
                nexts[segment] = IGNORED
            filled += -segments[segment, LENGTH] % multiple
            segment += 1
    return num_copies, -1
