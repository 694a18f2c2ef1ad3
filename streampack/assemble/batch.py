"""The batch: rows of tokens and the plan they came from, as the tensors that a training step wants.

One row of S = 8 with two segments, of which the first is cut after 3 tokens::

    tokens         a0   a1   a2 | b0   b1 |  0    0    0
    labels         a1   a2   a3 | b1 -100 |-100 -100 -100
    input_pos       0    1    2 |  0    1 |  0    1    2
    document_ids    1    1    1 |  2    2 |  0    0    0
    cu_seqlens   0             3         5              8      over all rows; padding counts

Cost: two kernel calls, about 0.8 ns a token; 28 bytes a token, in two blocks of memory. Tensors
share the arrays' memory, nothing is copied.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from streampack.assemble.labels import fill_labels
from streampack.assemble.positions import fill_positions
from streampack.read.gather import Rows
from streampack.types import NUM_COLUMNS, TOTAL, Int64Array, Packs

__all__ = ["Batch", "make_batch"]

Batch: TypeAlias = dict[str, Any]


def make_batch(rows: Rows, packs: Packs, *, epoch: int, position: int, positions: str) -> Batch:
    """Return the native batch of some packs.

    Args:
        rows: Their tokens; rows after the packs are padding.
        packs: The plan that the tokens came from.
        epoch: The epoch they belong to.
        position: Packs of the epoch delivered over all ranks once this step is done.
        positions: "restart" or "continue": input_pos of a split sample's later pieces.

    Returns:
        tokens, labels, input_pos: int64, shape (B, S); labels are shifted, -100 is ignored.
        document_ids: int32, shape (B, S); 1..n in a pack, 0 is padding.
        cu_seqlens: int32, where segments begin and end in the B * S tokens; padding is a segment.
            The padding that rounds a segment's room up belongs to the segment, in both.
        max_seqlen: the longest of those, an int.
        segments: int64, shape (n, 6): row, stream, pass, sample, start, length.
        epoch, position: ints, as given.

    >>> segments = np.array([[0, 0, 7, 0, 2, 2]])
    >>> packs = Packs(segments=segments, ends=np.array([1]))
    >>> rows = Rows(tokens=np.array([[5, 6, 0]]), next_tokens=np.array([-100]), labels=None)
    >>> batch = make_batch(rows, packs, epoch=0, position=1, positions="restart")
    >>> batch["labels"].tolist(), batch["document_ids"].tolist(), batch["cu_seqlens"].tolist()
    ([[6, -100, -100]], [[1, 1, 0]], [0, 2, 3])
    """
    num_rows, row_tokens = rows.tokens.shape
    size = num_rows * row_tokens
    # One block for all, given back to malloc as one: it is used again warm, without page faults.
    block = np.empty(2 * size + (size + 1) // 2, np.int64)
    input_pos = block[:size].reshape(rows.tokens.shape)
    labels = block[size : 2 * size].reshape(rows.tokens.shape)
    document_ids = block[2 * size :].view(np.int32)[:size].reshape(rows.tokens.shape)
    cu_seqlens = np.empty(len(packs.segments) + num_rows + 1, np.int32)
    segments, ends, continues = packs.segments, packs.ends, positions == "continue"
    filled, longest = fill_positions(
        segments, ends, continues, input_pos, document_ids, cu_seqlens, rows.multiple
    )
    if rows.labels is None:
        fill_labels(segments, ends, rows.tokens, rows.next_tokens, labels, rows.multiple)
    else:
        labels = rows.labels
    return {
        "tokens": torch.from_numpy(rows.tokens),
        "labels": torch.from_numpy(labels),
        "input_pos": torch.from_numpy(input_pos),
        "document_ids": torch.from_numpy(document_ids),
        "cu_seqlens": torch.from_numpy(cu_seqlens[:filled]),
        "max_seqlen": longest,
        "segments": torch.from_numpy(_numbered(packs)),
        "epoch": epoch,
        "position": position,
    }


def _numbered(packs: Packs) -> Int64Array:
    """Return segment rows with their row in front instead of totals behind; shape (n, 6)."""
    numbered = np.empty((len(packs.segments), NUM_COLUMNS), np.int64)
    numbered[:, 0] = np.repeat(np.arange(len(packs)), np.diff(packs.ends, prepend=0))
    numbered[:, 1:] = packs.segments[:, :TOTAL]
    return numbered
