"""Gather the tokens of planned packs from mapped shards.

::

    packs (integers) --> shard and offset ---> one kernel --> rows of int32 or uint16
     |                   mapped_shards.py      no GIL         (num_rows, row_tokens)
     '--> context parallelism: the segments of this rank's chunks only (context_slice.py)

Cost: two kernel calls per batch, about 0.7 ns per token from the page cache, plus 10 us. Memory:
the rows returned, and the mappings of the shard pool.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streampack._checks import MAX_ID
from streampack.config import Packing
from streampack.errors import DataError
from streampack.gather import kernels
from streampack.gather.context_slice import ContextSlice
from streampack.gather.mapped_shards import ShardLookup
from streampack.special_ids import special_ids
from streampack.streams.token_stream import TokenStream
from streampack.types import Int64Array, IntArray, Packs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The tokens of some packs, one pack per row."""

    tokens: IntArray
    """Token ids, then padding; int32, or uint16 if all ids fit; shape (num_rows, S), where S is
    the slots of a pack, or of its slice."""
    next_tokens: Int64Array
    """The sample's token after each segment, -100 where its sample ends; shape (num_segments,). In
    slices, the token after each piece of a segment."""
    labels: IntArray | None
    """Shifted labels, shape (num_rows, S), if a stream here has labels or a loss mask."""
    multiple: int = 1
    """Each segment takes a multiple of this many slots, with padding at its end."""
    context: ContextSlice | None = None
    """The slice of each row that this is, or None for whole rows."""


def _row_dtype(streams: Sequence[TokenStream], packing: Packing) -> type[np.integer[Any]]:
    own = [stream.ends.packing_of(packing) for stream in streams]
    largest = max(packing.padding_id, *(max(special_ids(each)) for each in own))
    stored = {dtype for stream in streams for dtype in stream.shards.token_dtypes}
    is_short = stored <= {"uint8", "uint16"} and largest < 2**16
    return np.uint16 if is_short else np.int32


class Gatherer:
    """Gathers the tokens of planned packs from all streams of the plan; picklable, thread-safe."""

    def __init__(
        self,
        streams: Sequence[TokenStream],
        packing: Packing,
        context: ContextSlice | None = None,
    ) -> None:
        self._streams = tuple(streams)
        self._multiple = packing.pad_to_multiple or 1
        self._context = context
        self.row_tokens = packing.row_tokens // (context.num_ranks if context else 1)
        """Slots of a row, or of its slice."""
        self._shards: ShardLookup | None = None
        self.dtype = _row_dtype(self._streams, packing)
        choices = [stream.columns for stream in self._streams]
        self.has_labels = any(columns.labels or columns.loss_mask for columns in choices)
        """Whether rows may have labels: a stream has a labels column or a loss mask."""
        self._options = np.array(
            [
                [
                    *special_ids(own),
                    packing.padding_id,
                    own.overflow == "truncate",
                    # The places of a slice's segments are known one by one.
                    self._multiple if context is None else 1,
                ]
                for own in (stream.ends.packing_of(packing) for stream in self._streams)
            ],
            np.int64,
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_shards": None}

    def gather(
        self,
        packs: Packs,
        num_rows: int,
        *,
        out: IntArray | None = None,
        labels_out: IntArray | None = None,
    ) -> Rows:
        """Gather the tokens of `packs`; rows after them, up to `num_rows`, are padding.

        Tokens are written to `out`, of `dtype`, shape (num_rows, S), and labels, if there are any,
        to `labels_out`, of int32. None: new arrays with rows of `row_tokens`.

        Raises:
            DataError: If a segment is not in its stream, its bytes are outside its shard, a value
                does not fit in int32, or it is ambiguous whether labels are shifted.
        """
        shape = (num_rows, self.row_tokens)
        tokens = np.empty(shape, self.dtype) if out is None else out
        slots = None
        if self._context is not None:
            packs, slots = self._context.pieces(packs, tokens.shape, self._multiple).to_read(packs)
        segments = np.ascontiguousarray(packs.segments, np.int64)
        ends = np.ascontiguousarray(packs.ends, np.int64)
        rows = np.empty(len(segments), np.int64)
        mapped, bad = self._lookup().find(segments, rows)
        if bad >= 0:
            raise self._error(segments[bad], kernels.BAD_SAMPLE)
        next_tokens = np.empty(len(segments), np.int64)
        reading = (segments, ends, mapped.rows, rows, self._options)
        found, framed = kernels.room_for(len(segments)), self._framed(tokens)
        bad, problem = kernels.gather_tokens(reading, slots, framed, next_tokens, found)
        labels = None
        if bad < 0 and self.has_labels and mapped.has_labels[rows].any():
            labels = np.empty(tokens.shape, np.int32) if labels_out is None else labels_out
            label_locations = kernels.room_for(len(segments))
            bad, problem = kernels.gather_labels(
                reading, slots, framed, next_tokens, self._framed(labels), found, label_locations
            )
        if bad >= 0:
            raise self._error(segments[bad], problem)
        return self.rows_of(tokens, next_tokens, labels)

    def rows_of(self, tokens: IntArray, next_tokens: Int64Array, labels: IntArray | None) -> Rows:
        """Return rows that were gathered, in this process or another."""
        return Rows(
            tokens=tokens,
            next_tokens=next_tokens,
            labels=labels,
            multiple=self._multiple,
            context=self._context,
        )

    def _framed(self, rows: IntArray) -> IntArray:
        """Return rows that are cut as one as one row."""
        if self._context is None:
            return rows
        return rows.reshape(self._context.framed(rows.shape))

    def _lookup(self) -> ShardLookup:
        lookup = self._shards
        # After a fork, a thread of the parent may hold the old object's lock forever.
        if lookup is None or lookup.pid != os.getpid():
            lookup = self._shards = ShardLookup(self._streams)
        return lookup

    def _error(self, segment: Int64Array, problem: int) -> DataError:
        number, _, sample, start, length, total = segment.tolist()
        if not 0 <= number < len(self._streams):
            return DataError(
                f"stream {number} is planned, but there are {len(self._streams)} streams; "
                "plan with the streams that are read"
            )
        stream = self._streams[number]
        uri, basename = None, None
        if problem != kernels.BAD_SAMPLE:
            shard = int(np.searchsorted(stream.first_sample, sample, "right")) - 1
            uri, basename = stream.shards.file_of(shard)
        what = {
            kernels.BAD_SAMPLE: f"is planned, but the stream has {stream.num_samples} samples",
            kernels.BAD_BYTES: "begins or ends outside its shard's bytes",
            kernels.BAD_LENGTH: f"is planned with {total} tokens, but has another number",
            kernels.BAD_RANGE: f"tokens {start} to {start + length} of {total} are planned",
            kernels.BAD_ROW: f"{length} tokens of it pass the end of a pack",
            kernels.BAD_COLUMN: "its labels or loss mask do not fit its tokens",
            kernels.BAD_MASK: "its loss mask has values other than 0 and 1: token ids and -100 "
            "belong in labels=",
            kernels.BAD_VALUE: "one of its token ids is negative, or an id or a "
            f"label is outside int32, +-{MAX_ID}",
        }[problem]
        other = _other_reason(stream, problem)
        reason = f"{other} ({uri})" * bool(other) or (
            f"{uri or 'the stream'} is damaged, or was changed after it was planned: rewrite the "
            "stream, or run `streampack index` and replan"
        )
        return DataError(
            f"stream {stream.name!r}, sample {sample}: {what}; {reason}", uri=uri, shard=basename
        )


def _other_reason(stream: TokenStream, problem: int) -> str:
    """Return what an option may have to do with a problem, and the way out; or an empty text."""
    said = getattr(stream.shards, "has", None)
    if problem == kernels.BAD_LENGTH and said is not None:
        return (
            f"has={said} does not hold for it, or does not for the bos_id and eos_id of the "
            "packing: correct it, or omit it and learn it from the tokens: `streampack index FILES "
            "--out FOLDER`, and set TokenFiles(files, index=FOLDER)"
        )
    if problem == kernels.BAD_VALUE:
        dtypes = " or ".join(sorted(map(str, stream.shards.token_dtypes)))
        names = ("tokens", "labels")
        stated = [name for name in names if getattr(stream.columns, f"{name}_dtype") is not None]
        correct = f"correct the type in {' or '.join(stated)}, or " if stated else ""
        return f"its tokens are read as {dtypes}: {correct}rewrite them with ids of 0 and more"
    mask = stream.columns.loss_mask
    if problem == kernels.BAD_MASK and mask is not None:
        return f"write {mask!r} again with 0 for context and 1 for targets"
    return ""
