"""Kernels that cut rows into the chunks of one context-parallel rank, and their segments.

Rank 0 of 2, layout "zigzag", one row of 16 with segments of 6 and 5 tokens::

    row       a0 a1 a2 a3 | a4 a5 b0 b1 | b2 b3 b4  . |  .  .  .  .       four chunks
    slice     a0 a1 a2 a3                             |  .  .  .  .       the first and the last
    pieces    a, 4 slots                                padding, 4 slots

A *unit* ends at an edge of cu_seqlens: a segment with the padding behind it, or the padding of a
row's end. A *piece* is the part of one chunk that one unit takes. It has tokens of its segment,
then padding.

Cost: about 15 ns per segment.
"""

from __future__ import annotations

from typing import TypeAlias

from streampack._numba import compiled, kernel_holding_gil
from streampack.types import LENGTH, Int64Array

# Columns of a piece: its first slot in the slice's row, its slots, its tokens, the segment or
# NO_SEGMENT, the slots of its unit before it, and its document in the row, 0 for padding.
AT, SLOTS, TOKENS, SEGMENT, SKIPPED, DOCUMENT = range(6)
PIECE_COLUMNS = 6
NO_SEGMENT = -1

# Columns of a unit: its begin and end in its frame, the segment, and the document.
BEGIN, END, UNIT_SEGMENT, UNIT_DOCUMENT = range(4)
UNIT_COLUMNS = 4

# Slots of a row, the multiple of slots that a segment takes, and rows that are cut as one: a frame.
Sizes: TypeAlias = tuple[int, int, int]
# The rank, its chunks (a head, and a tail or none), the number of equal parts, and whether each
# unit is divided into them, not the whole frame.
Share: TypeAlias = tuple[int, int, int, bool]


@compiled
def _list_units(
    packs: tuple[Int64Array, Int64Array], sizes: Sizes, frame: int, k: int, units: Int64Array
) -> tuple[int, int]:
    """Fill `units` with those of a frame, which begins with segment `k`; return the next segment
    and the number of units."""
    segments, ends = packs
    row_tokens, multiple, frame_rows = sizes
    num_units = 0
    for row in range(frame_rows):
        pack = frame * frame_rows + row
        at, stop, document = row * row_tokens, (row + 1) * row_tokens, 0
        end = ends[pack] if pack < len(ends) else k
        while at < stop:
            unit = units[num_units]
            unit[BEGIN], unit[UNIT_SEGMENT], unit[UNIT_DOCUMENT] = at, NO_SEGMENT, 0
            if k < end:
                length = max(segments[k, LENGTH], 1)  # a bad length is the gather's to report
                document += 1
                unit[UNIT_SEGMENT], unit[UNIT_DOCUMENT] = k, document
                at += length + -length % multiple
                k += 1
            else:
                at = stop
            unit[END] = at
            num_units += 1
    return k, num_units


@compiled
def _cut_chunk(
    segments: Int64Array,
    units: Int64Array,
    first: int,
    chunk: tuple[int, int],
    at: int,
    pieces: Int64Array,
) -> int:
    """Fill `pieces` with those of a chunk, whose first unit is `first` or later; return their
    number."""
    low, high = chunk
    count, u = 0, first
    while u < len(units) and units[u, BEGIN] < high:
        begin, segment = units[u, BEGIN], units[u, UNIT_SEGMENT]
        skipped = max(low - begin, 0)
        slots = min(high, units[u, END]) - begin - skipped
        if slots > 0:
            piece = pieces[count]
            own = segments[segment, LENGTH] if segment != NO_SEGMENT else 0
            piece[AT], piece[SLOTS] = at, slots
            piece[TOKENS] = min(max(own - skipped, 0), slots)
            piece[SEGMENT], piece[SKIPPED] = segment, skipped
            piece[DOCUMENT] = units[u, UNIT_DOCUMENT]
            at += slots
            count += 1
        u += 1
    return count


@kernel_holding_gil
def cut_rows(
    packs: tuple[Int64Array, Int64Array],
    sizes: Sizes,
    share: Share,
    units: Int64Array,
    pieces: Int64Array,
    piece_ends: Int64Array,
) -> None:
    """Fill `pieces` with those of one rank's chunks.

    Args:
        packs: Segment rows, shape (n, 6), and one past the last segment of each pack.
        sizes, share: As above.
        units: Room for the units of a frame, shape (m, UNIT_COLUMNS).
        pieces: Filled, in the order of the slice; shape (p, PIECE_COLUMNS).
        piece_ends: Filled: one past the last piece of each frame, shape (num_frames,).
    """
    row_tokens, _, frame_rows = sizes
    rank, num_chunks, num_parts, per_unit = share
    k, num_pieces = 0, 0
    for frame in range(len(piece_ends)):
        k, num_units = _list_units(packs, sizes, frame, k, units)
        at, begin, end = 0, 0, row_tokens * frame_rows
        for span in range(num_units if per_unit else 1):
            if per_unit:
                begin, end = units[span, BEGIN], units[span, END]
            size = (end - begin) // num_parts
            for chunk in range(num_chunks):
                part = rank if chunk == 0 else num_parts - 1 - rank
                low = begin + size * part
                num_pieces += _cut_chunk(
                    packs[0], units[:num_units], span, (low, low + size), at, pieces[num_pieces:]
                )
                at += size
        piece_ends[frame] = num_pieces
