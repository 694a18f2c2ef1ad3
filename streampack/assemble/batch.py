"""The batch: rows of tokens and the plan they came from, as the tensors that a training step wants.

One row of S = 8 with two segments, of which the first is cut after 3 tokens::

    tokens         a0   a1   a2 | b0   b1 |  0    0    0       a compact batch: the tokens,
    cu_seqlens   0             3         5              8      all rooms' edges, padding's too,
    next_tokens             a3       -100                      and what follows each segment

    labels         a1   a2   a3 | b1 -100 |-100 -100 -100      a native batch has these, too
    input_pos       0    1    2 |  0    1 |  0    1    2
    document_ids    1    1    1 |  2    2 |  0    0    0

A compact batch holds all that a native one is made of, in a seventh of the bytes, or less.

Several batches are made at once of the rows of all of them, in one block of memory that is used
again when the tensors of all are gone.

Cost: compact about 5 us a batch, native besides about 0.6 ns a token and 30 us; 28 bytes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from streampack.assemble.blocks import Blocks, cut
from streampack.assemble.fill import END, NUM_BOUNDS, Int32Array, fill_batches, lay_out
from streampack.read.gather import Rows
from streampack.types import NUM_COLUMNS, Int64Array, Packs

__all__ = [
    "Batch",
    "Step",
    "fill_compact",
    "make_batch",
    "make_batches",
    "make_compacts",
]

Batch: TypeAlias = dict[str, Any]
Step: TypeAlias = tuple[int, int]
"""A batch's epoch, and the packs of it that are delivered over all ranks once it is done."""

NO_LABELS = np.zeros((0, 0), np.int32)


def make_compacts(
    rows: Rows,
    packs: Packs,
    *,
    steps: Sequence[Step],
    positions: str,
    tokens: Sequence[Tensor] | None = None,
) -> list[Batch]:
    """Return the compact batches of some packs, each of as many rows.

    Args:
        rows: The tokens of all, batch after batch; rows after the packs are padding. The batches
            share their memory.
        packs: The plan that the tokens came from; only the last batch may have fewer than rows.
        steps: Of each batch, its epoch and position.
        positions: "restart" or "continue": input_pos of a split sample's later pieces.
        tokens: The tensors that `rows.tokens` consists of, one a batch, if there are any.

    Returns:
        Of each batch of B rows:
        tokens: int32 or uint16, shape (B, S).
        labels: int32, shape (B, S); only if a stream has labels or a loss mask.
        next_tokens: int64, shape (n,); the sample's token after each segment, -100 at its end.
        cu_seqlens: int32, where segments begin and end in the B * S tokens; padding is a segment.
            The padding that rounds a segment's room up belongs to the segment.
        max_seqlen: the longest of those, an int.
        segments: int64, shape (n, 6): row, stream, pass, sample, start, length.
        positions: as given.
        epoch, position: ints, as given.

    >>> segments = np.array([[0, 0, 7, 0, 2, 2]])
    >>> packs = Packs(segments=segments, ends=np.array([1]))
    >>> rows = Rows(tokens=np.array([[5, 6, 0]]), next_tokens=np.array([-100]), labels=None)
    >>> [batch] = make_compacts(rows, packs, steps=[(0, 1)], positions="restart")
    >>> batch["cu_seqlens"].tolist(), batch["next_tokens"].tolist(), "labels" in batch
    ([0, 2, 3], [-100], False)
    """
    laid = _lay_out(rows, packs, len(steps))
    tokens = cut(rows.tokens, len(steps)) if tokens is None else tokens
    labels = None if rows.labels is None else cut(rows.labels, len(steps))
    nexts = laid.of_segments(rows.next_tokens)
    return [
        {
            "tokens": tokens[number],
            **({} if labels is None else {"labels": labels[number]}),
            "next_tokens": nexts[number],
            **edges,
            "positions": positions,
            "epoch": epoch,
            "position": position,
        }
        for number, ((epoch, position), edges) in enumerate(zip(steps, laid.fields(), strict=True))
    ]


@dataclass(slots=True, eq=False)
class _LaidOut:
    """Where the segments of some batches lie."""

    numbered: Int64Array
    """Segments with the row of their batch in front, shape (n, 6)."""
    edges: Int32Array
    """Of all rooms, batch after batch."""
    bounds: Int64Array
    """What of these is whose, shape (batches, NUM_BOUNDS)."""

    def of_segments(self, values: Int64Array) -> list[Tensor]:
        """Return tensors of each batch's part of what all segments have, shape (n, ...)."""
        ends = self.bounds[:, END].tolist()
        return [
            torch.from_numpy(values[begin:end])
            for begin, end in zip([0, *ends[:-1]], ends, strict=True)
        ]

    def fields(self) -> list[Batch]:
        """Return of each batch the fields that say where its segments lie."""
        segments, made, begin = self.of_segments(self.numbered), [], 0
        for number, (_, end, longest) in enumerate(self.bounds.tolist()):
            made.append(
                {
                    "cu_seqlens": torch.from_numpy(self.edges[begin:end]),
                    "max_seqlen": longest,
                    "segments": segments[number],
                }
            )
            begin = end
        return made


def _lay_out(rows: Rows, packs: Packs, num_batches: int) -> _LaidOut:
    """Return where the segments of some batches lie."""
    num_rows, row_tokens = rows.tokens.shape
    segments, ends = np.ascontiguousarray(packs.segments), np.ascontiguousarray(packs.ends)
    numbered = np.empty((len(segments), NUM_COLUMNS), np.int64)
    edges = np.empty(len(segments) + num_rows + num_batches, np.int32)
    bounds = np.empty((num_batches, NUM_BOUNDS), np.int64)
    lay_out(segments, ends, row_tokens, rows.multiple, numbered, edges, bounds)
    return _LaidOut(numbered, edges, bounds)


def _fill(rows: Rows, laid: _LaidOut, positions: str, blocks: Blocks) -> list[Batch]:
    """Return of each batch the tensors of shape (B, S) that a native one holds."""
    wide, narrow = (np.int64, rows.tokens.shape), (np.int32, rows.tokens.shape)
    arrays, parts = blocks.take(wide, wide, wide, narrow, num_parts=len(laid.bounds))
    labels = NO_LABELS if rows.labels is None else rows.labels
    made: Any = tuple(arrays)
    where = laid.numbered, laid.edges, laid.bounds
    continues = positions == "continue"
    fill_batches(where, rows.tokens, rows.next_tokens, labels, continues, made)
    names = ("tokens", "labels", "input_pos", "document_ids")
    return [dict(zip(names, tensors, strict=True)) for tensors in parts]


def fill_compact(batch: Batch) -> Batch:
    """Return the native batch that a compact one stands for, all of it on the CPU.

    Args:
        batch: One of those that `make_compacts` returns; it is copied.
    """
    rows = Rows(
        tokens=batch["tokens"].numpy(),
        next_tokens=batch["next_tokens"].numpy(),
        labels=batch["labels"].numpy() if "labels" in batch else None,
    )
    edges, numbered = batch["cu_seqlens"].numpy(), batch["segments"].numpy()
    bounds = np.array([[len(numbered), len(edges), batch["max_seqlen"]]], np.int64)
    laid = _LaidOut(numbered, edges, bounds)
    carried = ("cu_seqlens", "max_seqlen", "segments", "epoch", "position")
    [filled] = _fill(rows, laid, batch["positions"], Blocks())
    return filled | {key: batch[key] for key in carried}


def make_batch(
    rows: Rows,
    packs: Packs,
    *,
    epoch: int,
    position: int,
    positions: str,
    blocks: Blocks | None = None,
) -> Batch:
    """Return the native batch of some packs.

    Args:
        rows: Their tokens; rows after the packs are padding. They are copied.
        packs: The plan that the tokens came from.
        epoch: The epoch they belong to.
        position: Packs of the epoch delivered over all ranks once this step is done.
        positions: "restart" or "continue": input_pos of a split sample's later pieces.
        blocks: Where the memory comes from; None: fresh.

    Returns:
        tokens, labels, input_pos: int64, shape (B, S); labels are shifted, -100 is ignored.
        document_ids: int32, shape (B, S); 1..n in a pack, 0 is padding.
        cu_seqlens, max_seqlen, segments, epoch, position: as `make_compacts` says.

    >>> segments = np.array([[0, 0, 7, 0, 2, 2]])
    >>> packs = Packs(segments=segments, ends=np.array([1]))
    >>> rows = Rows(tokens=np.array([[5, 6, 0]]), next_tokens=np.array([-100]), labels=None)
    >>> batch = make_batch(rows, packs, epoch=0, position=1, positions="restart")
    >>> batch["labels"].tolist(), batch["document_ids"].tolist(), batch["cu_seqlens"].tolist()
    ([[6, -100, -100]], [[1, 1, 0]], [0, 2, 3])
    """
    steps = [(epoch, position)]
    return make_batches(rows, packs, steps=steps, positions=positions, blocks=blocks)[0]


def make_batches(
    rows: Rows,
    packs: Packs,
    *,
    steps: Sequence[Step],
    positions: str,
    blocks: Blocks | None = None,
) -> list[Batch]:
    """Return the native batches of some packs, each of as many rows; see `make_batch`.

    Args:
        rows: The tokens of all, batch after batch; they are copied.
        packs: The plan that the tokens came from; only the last batch may have fewer than rows.
        steps: Of each batch, its epoch and position.
        positions: "restart" or "continue".
        blocks: Where the memory comes from, one block for all; None: fresh.
    """
    laid = _lay_out(rows, packs, len(steps))
    filled = _fill(rows, laid, positions, blocks or Blocks())
    return [
        {**tensors, **edges, "epoch": epoch, "position": position}
        for tensors, edges, (epoch, position) in zip(filled, laid.fields(), steps, strict=True)
    ]
