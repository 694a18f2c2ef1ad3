"""All tensors of some batches in one pass over their packs, and the edges that they share.

A row of 8 with a later piece of A (cut before it, after 3 tokens, and cut again) and a whole B::

    source          a3   a4 | b0   b1   b2 | pad  pad  pad
    tokens          a3   a4 | b0   b1   b2 | pad  pad  pad
    labels          a4   a5 | b1   b2 -100 |-100 -100 -100     the next token of the same sample
    input_pos        0    1 |  0    1    2 |  0    1    2      what a segment sees is what it counts
      "continue"     3    4 |  0    1    2 |  0    1    2      A goes on where its cut was
    document_ids     1    1 |  2    2    2 |  0    0    0
    cu_seqlens     0           2              5             8

With `pad_to_multiple`, the padding behind a segment belongs to it: it bears its document, counts
on, and cu_seqlens includes it, so that all ranks of a context-parallel group take as much of each
segment. No real token sees it, for it comes after all of them.

Cost: about 0.6 ns a token, nearly all of it writing 28 bytes; the source comes from the cache.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from streampack.compiled import compiled, compiled_brief
from streampack.types import IGNORED, LENGTH, NUM_COLUMNS, Int64Array, IntArray

__all__ = [
    "END",
    "NUM_BOUNDS",
    "ROW",
    "ROW_LENGTH",
    "ROW_START",
    "Int32Array",
    "fill_batches",
    "lay_out",
]

Int32Array: TypeAlias = npt.NDArray[np.int32]
Laid: TypeAlias = tuple[Int64Array, Int32Array, Int64Array]
Made: TypeAlias = tuple[Int64Array, Int64Array, Int64Array, Int32Array]

# Columns of a batch's `segments`: the row in front, and no totals.
ROW, ROW_START, ROW_LENGTH = 0, 4, 5

# Columns of what is known of each batch where several are made at once.
END, EDGES, LONGEST = range(3)
NUM_BOUNDS = 3


@compiled
def _copy(source: IntArray, tokens: Int64Array, labels: Int64Array) -> None:
    """Widen a row into `tokens`, and into `labels` one place to the left; all shape (S,)."""
    last = len(source) - 1
    for i in range(last):
        tokens[i] = source[i]
        labels[i] = source[i + 1]
    tokens[last] = source[last]
    labels[last] = IGNORED


@compiled
def _widen(source: IntArray, out: Int64Array) -> None:
    """Widen a row, shape (S,)."""
    for i in range(len(source)):
        out[i] = source[i]


@compiled
def _place(first: int, document: int, input_pos: Int64Array, document_ids: Int32Array) -> None:
    """Count up from `first` in one segment's slots, shape (length,), all of one document."""
    for i in range(len(input_pos)):
        input_pos[i] = first + i
    for i in range(len(document_ids)):
        document_ids[i] = document


@compiled_brief
def lay_out(
    segments: Int64Array,
    ends: Int64Array,
    row_tokens: int,
    multiple: int,
    numbered: Int64Array,
    cu_seqlens: Int32Array,
    bounds: Int64Array,
) -> None:
    """Put the segments of packs into the rows of batches, of as many rows each.

    Args:
        segments: Segment rows, shape (n, 6).
        ends: One past the last segment of each pack, shape (num_packs,); rows after them, and what
            segments leave of a row, are padding.
        row_tokens: S, slots of a row.
        multiple: What the room of each segment is a multiple of.
        numbered: Filled: row of its batch, stream, pass, sample, start, length; shape (n, 6).
        cu_seqlens: Filled from the front, a batch at a time, with the edges of all rooms, padding's
            included; shape (n + batches * (B + 1),), which also says B.
        bounds: Filled, a line for each batch: one past its last segment, one past its last edge,
            its longest room; shape (batches, 3).

    >>> segments = np.array([[7, 0, 4, 2, 3, 9], [7, 0, 5, 0, 8, 8]])
    >>> numbered, edges = np.zeros((2, 6), np.int64), np.zeros(6, np.int32)
    >>> bounds = np.zeros((2, 3), np.int64)
    >>> lay_out(segments, np.array([1, 2]), 8, 1, numbered, edges, bounds)
    >>> numbered.tolist(), edges.tolist()
    ([[0, 7, 0, 4, 2, 3], [0, 7, 0, 5, 0, 8]], [0, 3, 8, 0, 8, 0])
    >>> bounds.tolist()
    [[1, 3, 5], [2, 5, 8]]
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
    laid: Laid,
    source: IntArray,
    next_tokens: Int64Array,
    source_labels: IntArray,
    continues: bool,
    made: Made,
) -> None:
    """Fill the rows of batches with what follows from their tokens and the plan.

    Args:
        laid: What `lay_out` fills: segments with the row of their batch, shape (n, 6); the edges of
            all rooms; what of these is whose, shape (batches, 3).
        source: Token ids, then padding; shape (batches * B, S).
        next_tokens: The sample's token after each segment, -100 where it ends; shape (n,).
        source_labels: Labels that are known already, of the same shape; of 0 rows: made of the
            tokens.
        continues: Whether later pieces of a split sample count on from their cut.
        made: What is filled: tokens, labels (shifted, -100 where there is no target), input_pos,
            document_ids; each of shape (batches * B, S).

    >>> made = (*(np.zeros((1, 4), np.int64) for _ in range(3)), np.zeros((1, 4), np.int32))
    >>> edges = np.array([0, 3, 4], np.int32)
    >>> laid = np.array([[0, 7, 0, 4, 0, 3]]), edges, np.array([[1, 3, 3]])
    >>> source, none = np.array([[5, 6, 7, 0]], np.int32), np.zeros((0, 0), np.int32)
    >>> fill_batches(laid, source, np.array([-100]), none, False, made)
    >>> [row.tolist() for row in made]
    [[[5, 6, 7, 0]], [[6, 7, -100, -100]], [[0, 1, 2, 0]], [[1, 1, 1, 0]]]
    """
    segments, cu_seqlens, bounds = laid
    tokens, labels, input_pos, document_ids = made
    row_tokens = source.shape[1]
    num_rows = len(source) // len(bounds)
    room, k = 0, 0
    for place in range(len(source)):
        batch, row = place // num_rows, place % num_rows
        if row == 0 and batch > 0:
            room += 1  # an edge begins each batch that no room ends at
        has_labels = place < len(source_labels)
        if has_labels:
            _widen(source[place], tokens[place])
            _widen(source_labels[place], labels[place])
        else:
            _copy(source[place], tokens[place], labels[place])
        at, document = 0, 0
        while at < row_tokens:
            stop = cu_seqlens[room + 1] - row * row_tokens
            # What the segments leave is a room of padding, document 0.
            is_padding = k == bounds[batch, END] or segments[k, ROW] != row
            real = 0 if is_padding else segments[k, ROW_LENGTH]
            begin = segments[k, ROW_START] if continues and not is_padding else 0
            document = 0 if is_padding else document + 1
            _place(begin, document, input_pos[place, at:stop], document_ids[place, at:stop])
            if not has_labels:
                labels[place, at + real : stop] = IGNORED
                if not is_padding:
                    labels[place, at + real - 1] = next_tokens[k]
            room += 1
            k += 0 if is_padding else 1
            at = stop
