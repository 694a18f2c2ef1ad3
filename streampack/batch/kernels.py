"""Kernels that lay out batches and fill all of their tensors in one pass over the packs.

A row of 8 with a later piece of A (cut before it, after 3 tokens, and cut again) and all of B::

    source          a3   a4 | b0   b1   b2 | pad  pad  pad
    tokens          a3   a4 | b0   b1   b2 | pad  pad  pad
    labels          a4   a5 | b1   b2 -100 |-100 -100 -100     the next token of the same sample
    input_pos        0    1 |  0    1    2 |  0    1    2      restarts in each segment
      "continue"     3    4 |  0    1    2 |  0    1    2      A continues from its cut
    document_ids     1    1 |  2    2    2 |  0    0    0
    cu_seqlens     0           2              5             8

With `pad_to_multiple`, the padding after a segment belongs to it: it has the same document,
continues its positions, and is included in cu_seqlens. See docs/adr/0012.

Cost: about 0.6 ns per token, mostly for writing 28 bytes; the source is read from the cache.
"""

from __future__ import annotations

from typing import TypeAlias

from streampack._numba import compiled, compiled_inline, kernel_holding_gil
from streampack.gather.slice_kernels import (
    AT,
    DOCUMENT,
    NO_SEGMENT,
    SEGMENT,
    SKIPPED,
    SLOTS,
    TOKENS,
)
from streampack.types import IGNORED, LENGTH, NUM_COLUMNS, START, Int32Array, Int64Array, IntArray

BatchLayout: TypeAlias = tuple[Int64Array, Int32Array, Int64Array]
Tensors: TypeAlias = tuple[Int64Array, Int64Array, Int64Array, Int32Array]

# Columns of a batch's `segments`: the row first, and no totals.
ROW, ROW_START, ROW_LENGTH = 0, 4, 5

# Columns of `bounds`, one row per batch where several are made together.
END, EDGES, LONGEST = range(3)
NUM_BOUNDS = 3


@compiled_inline
def _copy(source: IntArray, tokens: Int64Array, labels: Int64Array) -> None:
    """Widen a row into `tokens`, and into `labels` shifted left by one; all shape (S,)."""
    last = len(source) - 1
    for i in range(last):
        tokens[i] = source[i]
        labels[i] = source[i + 1]
    tokens[last] = source[last]
    labels[last] = IGNORED


@compiled_inline
def _widen(source: IntArray, out: Int64Array) -> None:
    for i in range(len(source)):
        out[i] = source[i]


@compiled_inline
def _place(first: int, document: int, input_pos: Int64Array, document_ids: Int32Array) -> None:
    """Fill one segment's slots, shape (length,), with positions from `first` and its document."""
    for i in range(len(input_pos)):
        input_pos[i] = first + i
    for i in range(len(document_ids)):
        document_ids[i] = document


@kernel_holding_gil
def lay_out(
    segments: Int64Array,
    ends: Int64Array,
    row_tokens: int,
    multiple: int,
    numbered: Int64Array,
    cu_seqlens: Int32Array,
    bounds: Int64Array,
) -> None:
    """Lay out the segments of packs in the rows of batches, each with the same number of rows.

    Args:
        segments: Segment rows, shape (n, 6).
        ends: One past the last segment of each pack, shape (num_packs,). Further rows, and the rest
            of each row, are padding.
        row_tokens: S, slots of a row.
        multiple: Each segment takes a multiple of this many slots.
        numbered: Filled: row in its batch, stream, pass, sample, start, length; shape (n, 6).
        cu_seqlens: Filled from the front, one batch after another, with all edges, including those
            of padding; shape (n + batches * (B + 1),), from which B follows.
        bounds: Filled, one row per batch: one past its last segment, one past its last edge, its
            longest segment; shape (batches, 3).
    """
    num_rows = (len(cu_seqlens) - len(segments)) // len(bounds) - 1
    filled, k = 0, 0
    for batch in range(len(bounds)):
        cu_seqlens[filled] = 0
        filled += 1
        longest = 0
        for row in range(num_rows):
            at, pack = 0, batch * num_rows + row
            end = ends[pack] if pack < len(ends) else k
            while at < row_tokens:
                if k == end:
                    length = row_tokens - at
                else:
                    length = segments[k, LENGTH] + -segments[k, LENGTH] % multiple
                    numbered[k, ROW] = row
                    for column in range(1, NUM_COLUMNS):
                        numbered[k, column] = segments[k, column - 1]
                    k += 1
                at += length
                cu_seqlens[filled] = row * row_tokens + at
                longest = max(longest, length)
                filled += 1
        bounds[batch, END], bounds[batch, EDGES], bounds[batch, LONGEST] = k, filled, longest


@compiled
def fill_batches(
    layout: BatchLayout,
    source: IntArray,
    next_tokens: Int64Array,
    source_labels: IntArray,
    continues: bool,
    out: Tensors,
) -> None:
    """Fill the rows of batches from their tokens and the plan.

    Args:
        layout: `numbered`, `cu_seqlens` and `bounds` of `lay_out`.
        source: Token ids, then padding; shape (batches * B, S).
        next_tokens: The sample's token after each segment, -100 where it ends; shape (n,).
        source_labels: Labels that are already known, of the same shape; with 0 rows, labels are
            made from the tokens.
        continues: Whether positions of a split sample's later pieces continue from the cut.
        out: Filled: tokens, labels (shifted, -100 for no target), input_pos,
            document_ids; each of shape (batches * B, S).
    """
    segments, cu_seqlens, bounds = layout
    tokens, labels, input_pos, document_ids = out
    row_tokens = source.shape[1]
    num_rows = len(source) // len(bounds)
    edge, k = 0, 0
    for place in range(len(source)):
        batch, row = place // num_rows, place % num_rows
        if row == 0 and batch > 0:
            edge += 1  # skip the edge that begins each batch
        has_labels = place < len(source_labels)
        if has_labels:
            _widen(source[place], tokens[place])
            _widen(source_labels[place], labels[place])
        else:
            _copy(source[place], tokens[place], labels[place])
        at, document = 0, 0
        while at < row_tokens:
            stop = cu_seqlens[edge + 1] - row * row_tokens
            # The rest of the row is one segment of padding, document 0.
            is_padding = k == bounds[batch, END] or segments[k, ROW] != row
            real = 0 if is_padding else segments[k, ROW_LENGTH]
            begin = segments[k, ROW_START] if continues and not is_padding else 0
            document = 0 if is_padding else document + 1
            _place(begin, document, input_pos[place, at:stop], document_ids[place, at:stop])
            if not has_labels:
                labels[place, at + real : stop] = IGNORED
                if not is_padding:
                    labels[place, at + real - 1] = next_tokens[k]
            edge += 1
            k += 0 if is_padding else 1
            at = stop


@compiled
def fill_slices(
    cut: tuple[Int64Array, Int64Array, Int64Array],
    source: IntArray,
    next_tokens: Int64Array,
    source_labels: IntArray,
    continues: bool,
    out: Tensors,
) -> None:
    """Fill slices of rows; as `fill_batches` would fill the whole rows.

    `cut` contains the pieces of the slices, their ends (see slice_kernels.py), and the plan's
    segments. Arrays have a frame of rows in each row, and there is a next token for each piece that
    has tokens.
    """
    pieces, ends, segments = cut
    tokens, labels, input_pos, document_ids = out
    number, k = 0, 0
    for frame in range(len(source)):
        _widen(source[frame], tokens[frame])
        has_labels = frame < len(source_labels)
        if has_labels:
            _widen(source_labels[frame], labels[frame])
        while number < ends[frame]:
            piece = pieces[number]
            at, real, stop = piece[AT], piece[TOKENS], piece[AT] + piece[SLOTS]
            first, segment = piece[SKIPPED], piece[SEGMENT]
            if continues and segment != NO_SEGMENT:
                first += segments[segment, START]
            _place(first, piece[DOCUMENT], input_pos[frame, at:stop], document_ids[frame, at:stop])
            if not has_labels:
                labels[frame, at + real : stop] = IGNORED
                if real > 0:
                    _widen(source[frame, at + 1 : at + real], labels[frame, at : at + real - 1])
                    labels[frame, at + real - 1] = next_tokens[k]
            k += 1 if real > 0 else 0
            number += 1
