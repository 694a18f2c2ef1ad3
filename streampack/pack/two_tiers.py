"""Two tiers: short samples are packed whole into blocks, and blocks and long samples into rows.

With short_seq_len=4, max_seq_len=12 and a window of seven samples::

    arrival    A7  b2  c3  d2  e1  F6  g2
    long       A A A A A A A|. . . .|.        longest first, as best-fit decreasing does; the room
               F F F F F F|. . . .|. .        left in rows is divided into blocks of 4, and a rest
    short      A A A A A A A|c c c e|.        longest first, each into the fullest block it fits
               F F F F F F|d d g g|b b

A block is a run of short samples of at most `short_seq_len` tokens, and the samples of a block stay
neighbours. What waits is chosen by rows, as for best-fit decreasing.

Cost: that of best-fit decreasing, and 50 ns a segment.
"""

from __future__ import annotations

import numpy as np

from streampack.pack.best_fit_decreasing import (
    COUNT,
    FREE,
    NUM_PACK_COLUMNS,
    OPENER,
    Placed,
    decreasing,
    no_rooms_left,
    place_segments,
)
from streampack.pack.buffered import Limits
from streampack.types import Int64Array


def place_in_tiers(limits: Limits, lengths: Int64Array, num_held: int) -> Placed:
    """Place longer segments into rows, and those of at most `short_seq_len` into blocks of rows.

    >>> from streampack.config import Packing
    >>> from streampack.pack.buffered import limits_of
    >>> limits = limits_of(Packing(max_seq_len=12, method="two_tiers", short_seq_len=4))
    >>> place_in_tiers(limits, np.array([7, 2, 3, 2, 1, 6, 2]), 0).pack_of.tolist()
    [0, 1, 0, 1, 0, 1, 1]
    """
    order = decreasing(lengths, num_held)
    size, short_seq_len = limits.pack_tokens, limits.short_seq_len
    is_short = lengths <= short_seq_len
    longs, shorts = order[~is_short[order]], order[is_short[order]]
    row_of = np.zeros(len(lengths), np.int64)
    rows = np.zeros((len(lengths), NUM_PACK_COLUMNS), np.int64)
    num_rows = place_segments(limits, no_rooms_left(size), lengths, longs, row_of, rows, 0)
    # Rows of short samples alone: as many as they need if all blocks are full.
    left = int(lengths[shorts].sum() - rows[:num_rows, FREE].sum())
    room = np.append(rows[:num_rows, FREE], np.full(max(-(-left // size), 0), size))
    row_of_block, blocks = _blocks_of(room, short_seq_len, len(shorts))
    num_blocks, own = len(row_of_block), limits._replace(pack_tokens=short_seq_len)
    block_of = np.full(len(lengths), -1, np.int64)
    rooms_left = no_rooms_left(short_seq_len)
    num_all = place_segments(own, rooms_left, lengths, shorts, block_of, blocks, num_blocks)
    # Blocks that were opened since are the first of rows behind all others.
    more = len(room) + np.arange(num_all - num_blocks) // (size // short_seq_len)
    row_of[shorts] = np.append(row_of_block, more)[block_of[shorts]]
    used, row_of = np.unique(row_of, return_inverse=True)
    packs = np.zeros((len(used), NUM_PACK_COLUMNS), np.int64)
    packs[:, FREE] = size - np.bincount(row_of, lengths).astype(np.int64)
    packs[:, COUNT] = np.bincount(row_of)
    # The longest segment of a row, which was placed first.
    packs[row_of[order[::-1]], OPENER] = order[::-1]
    return Placed(row_of, packs, np.argsort(block_of, kind="stable"))


def _blocks_of(room: Int64Array, short_seq_len: int, spare: int) -> tuple[Int64Array, Int64Array]:
    """Return the row of each block that the room of rows has, and the blocks, with spare ones."""
    counts, rest = np.divmod(room, short_seq_len)
    row_of_block = np.repeat(np.arange(len(room)), counts + (rest > 0))
    blocks = np.zeros((len(row_of_block) + spare, NUM_PACK_COLUMNS), np.int64)
    blocks[: len(row_of_block), FREE] = short_seq_len
    has_rest = np.flatnonzero(rest)
    lasts = np.cumsum(counts + (rest > 0))[has_rest] - 1
    blocks[lasts, FREE] = rest[has_rest]
    return row_of_block, blocks
