"""Make the tensors of a training step from rows of tokens and their plan.

One row of S = 8 with two segments, of which the first is cut after 3 tokens::

    tokens         a0   a1   a2 | b0   b1 |  0    0    0       a compact batch: the tokens,
    cu_seqlens   0             3         5              8      all edges, including padding's,
    next_tokens             a3       -100                      and the token after each segment

A native batch adds labels, input_pos and document_ids: see `kernels.py`. Several batches are made
together from all of their rows, in one block of memory.

Cost: compact about 5 us per batch; native another 0.6 ns per token and 30 us, 28 bytes per token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from streampack.batch.buffer_pool import BufferPool, split_rows
from streampack.batch.kernels import END, NUM_BOUNDS, ROW, fill_batches, fill_slices, lay_out
from streampack.gather.gather import Rows
from streampack.types import IGNORED, NO_PACKS, NUM_COLUMNS, Int32Array, Int64Array, Packs

logger = logging.getLogger(__name__)

Batch: TypeAlias = dict[str, Any]
Step: TypeAlias = tuple[int, int]
"""A batch's epoch, and its position: packs delivered over all ranks, including this step."""

FILLED = ("tokens", "labels", "input_pos", "document_ids")
NO_LABELS = np.zeros((0, 0), np.int32)


def make_compacts(
    rows: Rows,
    packs: Packs,
    *,
    steps: Sequence[Step],
    positions: str,
    tokens: Sequence[Tensor] | None = None,
) -> list[Batch]:
    """Return compact batches, each with the same number of rows.

    Args:
        rows: The tokens of all batches, one batch after another; rows after the packs are padding.
            The batches share their memory.
        packs: The plan of these rows; only the last batch may have fewer packs than rows.
        steps: Epoch and position of each batch.
        positions: "restart" or "continue": input_pos of a split sample's later pieces.
        tokens: The tensors that `rows.tokens` consists of, one per batch, if there are any.

    Returns:
        For each batch of B rows:
        tokens: int32 or uint16, shape (B, S).
        labels: int32, shape (B, S); only if a stream has labels or a loss mask.
        next_tokens: int64, shape (n,); the sample's token after each segment, -100 at its end.
        cu_seqlens: int32, segment edges in the B * S tokens; padding counts as a segment. The
            padding that rounds a segment up to a multiple belongs to the segment.
        max_seqlen: the longest of those, an int.
        chunks: in slices only, as in `make_batches`; next_tokens are then those after each piece of
            a segment, and the edges those of whole rows.
        segments: int64, shape (n, 6): row, stream, pass, sample, start, length.
        positions, epoch, position: as given.
    """
    layout = _Layout.of(rows, packs, len(steps))
    tokens = split_rows(rows.tokens, len(steps)) if tokens is None else tokens
    labels = None if rows.labels is None else split_rows(rows.labels, len(steps))
    if rows.context is None:
        next_tokens = layout.split(rows.next_tokens)
    else:
        # One next token for each piece of a segment in the slice, batch by batch.
        read, _ = rows.context.pieces(packs, rows.tokens.shape, rows.multiple).to_read(packs)
        ends = read.ends.reshape(len(steps), -1)[:-1, -1]
        next_tokens = [torch.from_numpy(own) for own in np.split(rows.next_tokens, ends)]
    batches = []
    for number, fields in enumerate(_fields(rows, layout, steps, positions=positions)):
        batch: Batch = {"tokens": tokens[number]}
        if labels is not None:
            batch["labels"] = labels[number]
        batches.append(batch | {"next_tokens": next_tokens[number]} | fields)
    return batches


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    numbered: Int64Array
    """Segments with the row of their batch in front, shape (n, 6)."""
    edges: Int32Array
    bounds: Int64Array
    """End of each batch's part of these arrays, shape (batches, NUM_BOUNDS)."""

    @staticmethod
    def of(rows: Rows, packs: Packs, num_batches: int) -> _Layout:
        """Return the layout of packs in the rows of batches."""
        num_rows, row_tokens = rows.tokens.shape
        if rows.context is not None:
            row_tokens *= rows.context.num_ranks  # edges are those of whole rows
        segments, ends = np.ascontiguousarray(packs.segments), np.ascontiguousarray(packs.ends)
        numbered = np.empty((len(segments), NUM_COLUMNS), np.int64)
        edges = np.empty(len(segments) + num_rows + num_batches, np.int32)
        bounds = np.empty((num_batches, NUM_BOUNDS), np.int64)
        lay_out(segments, ends, row_tokens, rows.multiple, numbered, edges, bounds)
        layout = _Layout(numbered, edges, bounds)
        if rows.labels is not None and rows.context is None:
            labels = rows.labels.reshape(num_batches, -1)
            for each, own in zip(labels, layout.split(numbered), strict=True):
                if len(own) and each.max() == IGNORED:  # not padding alone
                    _warn_of_no_target(int(own[0, ROW + 1]))
        return layout

    def split(self, values: Int64Array) -> list[Tensor]:
        """Return each batch's part of a per-segment array of shape (n, ...), as tensors."""
        ends = self.bounds[:, END].tolist()
        return [
            torch.from_numpy(values[begin:end])
            for begin, end in zip([0, *ends[:-1]], ends, strict=True)
        ]


@cache
def _warn_of_no_target(stream: int) -> None:
    logger.warning(
        "stream %d: a batch has its samples but no target, so its mean loss is NaN; where prompts "
        "fill a pack, make packs longer or set overflow='drop'; or divide the sum of the "
        "losses by the targets of the global batch",
        stream,
    )


def _fill(
    rows: Rows, layout: _Layout, positions: str, blocks: BufferPool, packs: Packs = NO_PACKS
) -> list[Batch]:
    """Return the native tensors of each batch's rows, or of slices of the rows of `packs`."""
    wide, narrow = (np.int64, rows.tokens.shape), (np.int32, rows.tokens.shape)
    arrays, parts = blocks.take(wide, wide, wide, narrow, num_parts=len(layout.bounds))
    tokens, continues = rows.tokens, positions == "continue"
    labels = NO_LABELS if rows.labels is None else rows.labels
    out: Any = tuple(arrays)
    if rows.context is None:
        places = layout.numbered, layout.edges, layout.bounds
        fill_batches(places, tokens, rows.next_tokens, labels, continues, out)
    else:
        pieces = rows.context.pieces(packs, tokens.shape, rows.multiple)
        framed = rows.context.framed(tokens.shape)
        of_pieces = pieces.rows, pieces.ends, np.ascontiguousarray(packs.segments)
        labels = labels if rows.labels is None else labels.reshape(framed)
        out = tuple(array.reshape(framed) for array in arrays)
        fill_slices(of_pieces, tokens.reshape(framed), rows.next_tokens, labels, continues, out)
    return [dict(zip(FILLED, tensors, strict=True)) for tensors in parts]


def _fields(rows: Rows, layout: _Layout, steps: Sequence[Step], **more: str) -> list[Batch]:
    """Return the layout fields of each batch, the chunks of slices, `more` fields, and its step."""
    fields, begin = [], 0
    num_rows = len(rows.tokens) // len(layout.bounds)
    for segments, (_, end, longest), (epoch, position) in zip(
        layout.split(layout.numbered), layout.bounds.tolist(), steps, strict=True
    ):
        edges = layout.edges[begin:end]
        field: Batch = {
            "cu_seqlens": torch.from_numpy(edges),
            "max_seqlen": longest,
            "segments": segments,
        }
        if rows.context is not None:
            field["chunks"] = torch.from_numpy(rows.context.chunks(edges, num_rows))
        fields.append(field | more | {"epoch": epoch, "position": position})
        begin = end
    return fields


def fill_compact(batch: Batch) -> Batch:
    """Return the native batch of a compact one, on the CPU. All tensors are copied."""
    rows = Rows(
        tokens=batch["tokens"].numpy(),
        next_tokens=batch["next_tokens"].numpy(),
        labels=batch["labels"].numpy() if "labels" in batch else None,
    )
    edges, numbered = batch["cu_seqlens"].numpy(), batch["segments"].numpy()
    bounds = np.array([[len(numbered), len(edges), batch["max_seqlen"]]], np.int64)
    layout = _Layout(numbered, edges, bounds)
    [filled] = _fill(rows, layout, batch["positions"], BufferPool())
    made = (*FILLED, "next_tokens", "positions")
    return filled | {key: value for key, value in batch.items() if key not in made}


def make_batches(
    rows: Rows,
    packs: Packs,
    *,
    steps: Sequence[Step],
    positions: str,
    blocks: BufferPool | None = None,
) -> list[Batch]:
    """Return native batches in one block of memory from `blocks`, or in new memory.

    The other arguments are those of `make_compacts`; tokens are copied.

    Returns:
        For each batch:
        tokens, labels, input_pos: int64, shape (B, S); labels are shifted, -100 is ignored.
        document_ids: int32, shape (B, S); 1..n in a pack, 0 is padding.
        cu_seqlens, max_seqlen, segments, epoch, position: as in `make_compacts`.

        In the slice of a context-parallel rank, the first four have shape (B, S / n) and the values
        that they have in the whole rows; the others are those of the whole rows. It also has
        chunks: int64, shape (c, 2), the begin and end of each of its chunks in the B * S tokens.

    >>> segments = np.array([[0, 0, 7, 0, 2, 2]])
    >>> packs = Packs(segments=segments, ends=np.array([1]))
    >>> rows = Rows(tokens=np.array([[5, 6, 0]]), next_tokens=np.array([-100]), labels=None)
    >>> [batch] = make_batches(rows, packs, steps=[(0, 1)], positions="restart")
    >>> batch["labels"].tolist(), batch["document_ids"].tolist(), batch["cu_seqlens"].tolist()
    ([[6, -100, -100]], [[1, 1, 0]], [0, 2, 3])
    """
    layout = _Layout.of(rows, packs, len(steps))
    filled = _fill(rows, layout, positions, blocks or BufferPool(), packs)
    fields = _fields(rows, layout, steps)
    return [tensors | own for tensors, own in zip(filled, fields, strict=True)]
