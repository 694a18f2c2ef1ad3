"""The slice of each row that a rank gets under context parallelism, cut from the plan.

A row in 4 chunks for 2 ranks, and one of two documents cut each on its own::

    zigzag                0 1 2 3              rank 0: 0 3     rank 1: 1 2
    contiguous            0 1                  rank 0: 0       rank 1: 1
    zigzag_per_document   0 1 2 3 | 0 1 2 3    rank 0: 0 3 0 3
    contiguous_per_document   0 1 | 0 1        rank 0: 0 0

A token attends to those before it, so later chunks cost more. A head and a tail together cost the
same for every rank.

docs/distributed.md names the trainers that cut alike, by ``_HeadTailLoadBalancer`` (torch),
``get_pretrain_batch_on_this_cp_rank`` (Megatron-LM) and ``thd_partition_indices_kernel``
(TransformerEngine). docs/adr/0032 explains why the plan is cut and not the batch.

Cost: 50 us per gather of 1,400 segments, 0.3 ms if documents are cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from streampack.types import LENGTH, START, Int64Array, IntArray, Packs
from streampack.world import ContextLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSlice:
    """The share of one context-parallel rank in every row.

    >>> ContextSlice(rank=0, num_ranks=2).chunks(np.array([0, 6, 11, 16]), 1).tolist()
    [[0, 4], [12, 16]]
    """

    rank: int
    """Index of the slice."""
    num_ranks: int
    """Number of slices of a row, at least 2."""
    layout: ContextLayout = "zigzag"
    """How rows are cut."""
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
        if not self.is_per_document:
            num_slots = int(cu_seqlens[-1])
            frame_tokens = self.frame_tokens or num_slots // num_rows
            return _chunks_of_frames(self, num_slots // frame_tokens, frame_tokens).copy()
        return self._chunks(cu_seqlens.astype(np.int64))

    def _chunks(self, edges: Int64Array) -> Int64Array:
        sizes = np.diff(edges) // self.num_parts
        # Zigzag pairs a part with the one at the same distance from the other end.
        numbers = [self.rank, self.num_parts - 1 - self.rank][: self.num_chunks]
        begins = edges[:-1, None] + sizes[:, None] * np.array(numbers)
        chunks: Int64Array = np.stack([begins, begins + sizes[:, None]], axis=-1)
        return chunks.reshape(-1, 2)

    def cut(self, packs: Packs, shape: tuple[int, ...], multiple: int) -> tuple[Packs, Int64Array]:
        """Return the segments that this rank reads of the rows of packs, and where they belong.

        Args:
            packs: The plan of the rows; rows after them are padding.
            shape: That of the slices of the rows.
            multiple: Each segment takes a multiple of this many slots.

        Returns:
            For each frame, the parts of segments in it.
            The first slot of each in its frame, shape (n,).
        """
        (num_rows, slots), (num_frames, frame_slots) = shape, self.framed(shape)
        row_tokens, lengths = slots * self.num_ranks, packs.segments[:, LENGTH]
        room = -(-lengths // multiple) * multiple
        sizes = np.diff(packs.ends, prepend=0)
        before = np.cumsum(room) - room
        firsts = np.append(before, 0)[packs.ends - sizes]  # before the first of each row
        begins = before + np.repeat(np.arange(len(sizes)) * row_tokens - firsts, sizes)
        if self.is_per_document:
            rows = np.arange(num_rows + 1) * row_tokens
            chunks = self._chunks(np.unique(np.concatenate([begins, begins + room, rows])))
        else:
            chunks = _chunks_of_frames(self, num_frames, frame_slots * self.num_ranks)
        low, high = chunks.T
        # The segments in each chunk: from the first that ends behind its begin on.
        first = np.searchsorted(begins + lengths, low, "right")
        counts = np.maximum(np.searchsorted(begins, high) - first, 0)
        chunk = np.repeat(np.arange(len(chunks)), counts)
        own = first[chunk] + np.arange(len(chunk)) - (np.cumsum(counts) - counts)[chunk]
        begin = np.maximum(begins[own], low[chunk])
        segments = packs.segments[own]
        segments[:, START] += begin - begins[own]
        segments[:, LENGTH] = np.minimum((begins + lengths)[own], high[chunk]) - begin
        at = (np.cumsum(high - low) - high)[chunk] + begin
        ends = np.searchsorted(at, np.arange(1, num_frames + 1) * frame_slots)
        return Packs(segments=segments, ends=ends), at % frame_slots


@lru_cache(maxsize=16)  # they are the same in every batch
def _chunks_of_frames(context: ContextSlice, num_frames: int, frame_tokens: int) -> Int64Array:
    return context._chunks(np.arange(num_frames + 1) * frame_tokens)
