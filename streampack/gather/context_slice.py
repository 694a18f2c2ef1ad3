"""The slice of each row that a rank gets under context parallelism, cut from the plan.

A row in 4 chunks for 2 ranks, and one of two documents cut each on its own::

    zigzag                0 1 2 3              rank 0: 0 3     rank 1: 1 2
    contiguous            0 1                  rank 0: 0       rank 1: 1
    zigzag_per_document   0 1 2 3 | 0 1 2 3    rank 0: 0 3 0 3
    contiguous_per_document   0 1 | 0 1        rank 0: 0 0

A head and a tail together cost the same for every rank. docs/distributed.md names the trainers that
cut alike; docs/adr/0032 explains why the plan is cut and not the batch.

Cost: 15 us per gather of 300 segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streampack.gather import slice_kernels as kernels
from streampack.types import LENGTH, START, Int64Array, IntArray, Packs
from streampack.world import ContextLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """What one rank's chunks take of the segments and the padding of some packs."""

    rows: Int64Array
    """Pieces in the order of the slice, shape (p, PIECE_COLUMNS); see slice_kernels.py."""
    ends: Int64Array
    """One past the last piece of each frame, shape (num_frames,)."""

    def to_read(self, packs: Packs) -> tuple[Packs, Int64Array]:
        """Return the segments of the tokens to read, and the first slot of each in its frame."""
        has_tokens = self.rows[:, kernels.TOKENS] > 0
        pieces = self.rows[has_tokens]
        segments = packs.segments[pieces[:, kernels.SEGMENT]]
        segments[:, START] += pieces[:, kernels.SKIPPED]
        segments[:, LENGTH] = pieces[:, kernels.TOKENS]
        # Pieces of padding are omitted, so each end moves forward by those before it.
        before = np.concatenate([[0], np.cumsum(has_tokens)])
        slots = np.ascontiguousarray(pieces[:, kernels.AT])
        return Packs(segments=segments, ends=before[self.ends]), slots


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSlice:
    """The share of one context-parallel rank in every row.

    >>> ContextSlice(rank=0, num_ranks=2).chunks(np.array([0, 6, 11, 16]), 1).tolist()
    [[0, 4], [12, 16]]
    """

    rank: int
    num_ranks: int
    layout: ContextLayout = "zigzag"
    frame_tokens: int | None = None
    """Slots that are cut as one: those of a batch, where its format makes one row of them. None:
    those of a row."""

    def framed(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of slices of rows with a frame in each row.

        >>> ContextSlice(rank=0, num_ranks=2, frame_tokens=24).framed((6, 4))
        (2, 12)
        """
        num_rows, slots = shape
        row_tokens = slots * self.num_ranks
        frame_rows = (self.frame_tokens or row_tokens) // row_tokens
        return num_rows // frame_rows, slots * frame_rows

    @property
    def num_chunks(self) -> int:
        """Chunks of a rank in each row or document: a head and a tail, or one."""
        return 2 if self.layout.startswith("zigzag") else 1

    @property
    def num_parts(self) -> int:
        """Equal parts that each row or document is cut into."""
        return self.num_chunks * self.num_ranks

    @property
    def is_per_document(self) -> bool:
        """Whether each document is cut, not the row."""
        return self.layout.endswith("per_document")

    def chunks(self, cu_seqlens: IntArray, num_rows: int) -> Int64Array:
        """Return begin and end of each chunk in the slots of a batch, shape (c, 2).

        `cu_seqlens` has the segment edges of the whole batch, including those of padding.
        """
        edges = cu_seqlens.astype(np.int64)
        if not self.is_per_document:
            num_slots = int(edges[-1])
            edges = np.arange(0, num_slots + 1, self.frame_tokens or num_slots // num_rows)
        sizes = np.diff(edges) // self.num_parts
        # Zigzag pairs a part with the one at the same distance from the other end.
        numbers = [self.rank, self.num_parts - 1 - self.rank][: self.num_chunks]
        begins = edges[:-1, None] + sizes[:, None] * np.array(numbers)
        chunks: Int64Array = np.stack([begins, begins + sizes[:, None]], axis=-1)
        return chunks.reshape(-1, 2)

    def pieces(self, packs: Packs, shape: tuple[int, ...], multiple: int) -> Pieces:
        """Cut the rows of packs; rows after the packs are padding.

        `shape` is that of their slices; each segment takes a multiple of `multiple` slots.
        """
        num_rows, slots = shape
        num_frames, frame_slots = self.framed(shape)
        # Each segment is a unit, and so is the padding at the end of each row.
        num_units = len(packs.segments) + num_rows
        num_spans = num_units if self.is_per_document else num_frames
        # A chunk begins inside at most one unit, which gives one more piece.
        rows = np.empty((num_units + self.num_chunks * num_spans, kernels.PIECE_COLUMNS), np.int64)
        ends = np.zeros(num_frames, np.int64)
        kernels.cut_rows(
            (np.ascontiguousarray(packs.segments), np.ascontiguousarray(packs.ends)),
            (slots * self.num_ranks, multiple, frame_slots // slots),
            (self.rank, self.num_chunks, self.num_parts, self.is_per_document),
            np.empty((num_units, kernels.UNIT_COLUMNS), np.int64),
            rows,
            ends,
        )
        return Pieces(rows=rows[: ends.max(initial=0)], ends=ends)
