"""Gather the tokens of planned packs from mapped shards.

::

    packs (integers) --> shard and offset ---> one kernel --> rows of int32 or uint16
                         table of open shards  no GIL         (num_rows, max_seq_len)

A batch costs two kernel calls. Open shards are stored as rows of addresses. Each batch keeps a
reference to the shards that were open when it began, so that none is unmapped while it is read.

Cost: about 0.7 ns per token from the page cache, plus 10 us per batch. Memory: the rows returned,
and the mappings of at most 256 shards.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from streampack.config import MAX_ID, Packing
from streampack.errors import DataError
from streampack.gather import kernels, lookup_kernels
from streampack.mds.columns import ByteArray, Places
from streampack.storage.filesystem import is_cut
from streampack.streams.label_shift import detect_shift
from streampack.streams.mds_stream import MdsStream
from streampack.streams.shard_pool import OpenShard
from streampack.types import (
    LENGTH,
    SAMPLE,
    START,
    STREAM,
    TOTAL,
    BoolArray,
    Int64Array,
    IntArray,
    Packs,
)

MAX_OPEN_SHARDS = 256
MAX_OPEN_SAMPLES = 2_000_000  # 16 bytes each in the sample tables
CHECK_NS = (
    5_000_000  # least interval between size checks of a file: in a tight loop, they would take 3 %
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The tokens of some packs, one pack per row."""

    tokens: IntArray
    """Token ids, then padding; int32, or uint16 if all ids fit; (num_rows, max_seq_len)."""
    next_tokens: Int64Array
    """The sample's token after each segment, -100 where its sample ends; shape (num_segments,)."""
    labels: IntArray | None
    """Shifted labels, shape (num_rows, max_seq_len), if a stream here has labels or a loss mask."""
    multiple: int = 1
    """Each segment takes a multiple of this many slots, with padding at its end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """An open shard and the arrays that its addresses point into."""

    arrays: tuple[OpenShard | Int64Array, ...]
    data: ByteArray
    uri: str
    place: Int64Array
    is_gone: Callable[[], bool] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Opened:
    """The shards that are open; they stay mapped while this object is referenced."""

    place_of: Int64Array
    """Index of each shard of all streams in the arrays below, or -1; shape (num_shards,)."""
    places: Int64Array
    """Their place rows, shape (m, PLACE_COLUMNS)."""
    used: Int64Array
    """Batch number of each shard's last read, written by the kernel; shape (m,)."""
    checked_ns: Int64Array
    """Monotonic time of the last size check of each shard's file; shape (m,)."""
    has_labels: BoolArray
    """Whether each shard has a labels or loss mask column, shape (m,)."""
    held: tuple[_Held, ...]

    @classmethod
    def of(cls, num_shards: int, held: dict[int, _Held], used: dict[int, int]) -> _Opened:
        """Build the table from open shards by number, and the batch of each one's last read."""
        numbers = np.array(sorted(held), np.int64)
        place_of = np.full(num_shards, -1, np.int64)
        place_of[numbers] = np.arange(len(numbers))
        ordered = tuple(held[number] for number in numbers.tolist())
        places = np.array([each.place for each in ordered], np.int64)
        places = places.reshape(-1, kernels.PLACE_COLUMNS)
        codes = places[:, [kernels.LABELS + kernels.CODE, kernels.LOSS_MASK + kernels.CODE]]
        return cls(
            place_of=place_of,
            places=places,
            used=np.array([used[number] for number in numbers.tolist()], np.int64),
            checked_ns=np.zeros(len(ordered), np.int64),
            has_labels=(codes != kernels.NO_COLUMN).any(axis=1),
            held=ordered,
        )

    @property
    def numbers(self) -> list[int]:
        """Shard numbers, in the order of the arrays."""
        numbers: list[int] = np.flatnonzero(self.place_of >= 0).tolist()
        return numbers


class _OpenShards:
    """Table of open shards by number; per process, thread-safe.

    The table is immutable and replaced as a whole: a batch keeps the table that it started with. No
    lock is taken if all shards of a batch are open.
    """

    def __init__(self, streams: Sequence[MdsStream]) -> None:
        self.pid = os.getpid()
        self._streams = streams
        # bases: index of each stream's first shard in first_samples; (num_streams + 1,).
        self.bases = np.cumsum([0] + [len(stream.first_sample) for stream in streams])
        self.first_samples = np.concatenate([stream.first_sample for stream in streams])
        self.opened = _Opened.of(len(self.first_samples), {}, {})
        self.batches = count(1)
        self._shifted: dict[int, bool] = {}
        self._lock = threading.Lock()

    def find(self, segments: Int64Array, rows: Int64Array) -> tuple[_Opened, int]:
        """Open the shards of all segments, and fill `rows` with their place rows.

        Returns:
            The table, and the first segment that does not exist, or -1.
        """
        opened, now = self.opened, next(self.batches)
        bases, firsts = self.bases, self.first_samples
        while True:
            bad, are_open = lookup_kernels.find_places(
                segments, bases, firsts, opened.place_of, opened.used, now, rows
            )
            if bad >= 0 or are_open:
                return opened, bad
            opened = self._with(set(rows.tolist()))

    def _with(self, wanted: set[int]) -> _Opened:
        """Return a table in which all of `wanted` are open."""
        new: dict[int, _Held] = {}
        while True:
            with self._lock:
                missing = wanted.difference(self.opened.numbers, new)
                if not missing:
                    if new:
                        self.opened = self._replaced(new, wanted)
                    return self.opened
            # Not under the lock: opening may fetch a remote shard.
            new |= {shard: self._open(shard) for shard in missing}

    def _replaced(self, new: dict[int, _Held], wanted: set[int]) -> _Opened:
        """Return the table with `new` added, and shards over the limit evicted unless wanted."""
        numbers, now = self.opened.numbers, next(self.batches)
        used = dict.fromkeys(new, now) | dict(zip(numbers, self.opened.used.tolist(), strict=True))
        held = new | dict(zip(numbers, self.opened.held, strict=True))
        num_samples = sum(int(each.place[kernels.COUNT]) for each in held.values())
        for shard in sorted(held.keys() - wanted, key=used.__getitem__):
            # A deleted file takes disk space until it is unmapped.
            is_gone = held[shard].is_gone
            has_room = len(held) <= MAX_OPEN_SHARDS and num_samples <= MAX_OPEN_SAMPLES
            if not has_room or (is_gone is not None and is_gone()):
                num_samples -= int(held.pop(shard).place[kernels.COUNT])
        return _Opened.of(len(self.first_samples), held, used)

    def _open(self, number: int) -> _Held:
        stream_number = int(np.searchsorted(self.bases, number, "right")) - 1
        stream = self._streams[stream_number]
        shard_number = number - int(self.bases[stream_number])
        shard = stream.open_shard(shard_number)
        where = f"stream {stream.name!r}, shard {shard_number}"
        place = np.zeros(kernels.PLACE_COLUMNS, np.int64)
        place[kernels.DATA] = shard.data.ctypes.data
        place[kernels.SIZE] = shard.data.nbytes
        place[kernels.FIRST] = self.first_samples[number]
        place[kernels.COUNT] = self.first_samples[number + 1] - self.first_samples[number]
        arrays: tuple[OpenShard | Int64Array, ...] = (shard,)
        for column, places in (
            (kernels.TOKENS, shard.tokens),
            (kernels.LABELS, shard.labels),
            (kernels.LOSS_MASK, shard.loss_mask),
        ):
            arrays += _put_column(place, column, places, where)
        if shard.labels is not None:
            place[kernels.SHIFTED] = self._is_shifted(stream_number)
        uri = stream.cache.uri(stream.index.shards[shard_number].raw.basename)
        return _Held(arrays=arrays, data=shard.data, uri=uri, place=place, is_gone=shard.is_gone)

    def _is_shifted(self, number: int) -> bool:
        stream = self._streams[number]
        if stream.labels_shifted is not None:
            return stream.labels_shifted
        if number not in self._shifted:
            self._shifted[number] = detect_shift(stream)
        return self._shifted[number]


def _put_column(
    place: Int64Array, column: int, places: Places | None, where: str
) -> tuple[Int64Array, ...]:
    """Write the addresses of a column into a place row; return the arrays they point into."""
    place[column + kernels.CODE] = kernels.NO_COLUMN
    if places is None:
        return ()
    code = kernels.code_of(places.dtype)
    if code == kernels.NO_COLUMN:
        raise DataError(
            f"{where}: a column of {places.dtype} values cannot be gathered; "
            "rewrite it with an integer type of this machine's byte order"
        )
    num_samples = int(place[kernels.COUNT])
    if not len(places.begins) == len(places.counts) == num_samples:
        raise DataError(
            f"{where}: {len(places.begins)} samples lie in it, but index.json says {num_samples}; "
            "write the stream again"
        )
    samples = np.stack([places.begins, places.counts], axis=1).astype(np.int64, copy=False)
    place[column + kernels.SAMPLES] = samples.ctypes.data
    place[column + kernels.CODE] = code
    return (samples,)


def _check_uncut(opened: _Opened, rows: Int64Array) -> None:
    """Refuse shards whose files were truncated since they were mapped: reading them is SIGBUS.

    Raises:
        DataError: Naming the file.
    """
    places, now_ns = np.flatnonzero(np.bincount(rows)), time.monotonic_ns()
    due = places[opened.checked_ns[places] < now_ns - CHECK_NS]
    for place in due.tolist():
        held = opened.held[place]
        if is_cut(held.data):
            raise DataError(
                f"{held.uri}: was cut short while it was read; put the whole file back or write "
                "the stream again, and start again: write a new version of a stream to another "
                "path, never over one that is being read",
                uri=held.uri,
            )
    # Only once all are intact: a group that failed is read again batch by batch.
    opened.checked_ns[due] = now_ns


def _row_dtype(streams: Sequence[MdsStream], packing: Packing) -> type[np.integer[Any]]:
    """Return the dtype of rows: uint16 if the ids of all streams fit, else int32."""
    largest = max(packing.bos_id or 0, packing.eos_id or 0, packing.padding_id)
    stored = {dtype for stream in streams for dtype in stream.token_dtypes}
    is_short = stored <= {"uint8", "uint16"} and largest < 2**16
    return np.uint16 if is_short else np.int32


class Gatherer:
    """Gathers the tokens of planned packs; picklable and thread-safe.

    Args:
        streams: All streams of the plan, in its order.
        packing: The packing of the plan.
    """

    def __init__(self, streams: Sequence[MdsStream], packing: Packing) -> None:
        self._streams = tuple(streams)
        self._packing = packing
        self._shards: _OpenShards | None = None
        self.dtype = _row_dtype(self._streams, packing)
        choices = [stream.columns for stream in self._streams]
        self.has_labels = any(columns.labels or columns.loss_mask for columns in choices)
        """Whether rows may have labels: a stream has a labels column or a loss mask."""
        bos, eos = packing.bos_id, packing.eos_id
        self._options = np.array(
            [
                -1 if bos is None else bos,
                -1 if eos is None else eos,
                packing.padding_id,
                packing.overflow == "truncate",
                packing.pad_to_multiple or 1,
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

        Args:
            packs: The plan.
            num_rows: Rows of the result.
            out: Array for tokens, of `dtype`, shape (num_rows, max_seq_len); None: a new array.
            labels_out: Array for labels, if there are any; int32, of the same shape.

        Raises:
            DataError: If a segment is not in its stream, its bytes are outside its shard, a value
                does not fit in int32, or it is ambiguous whether labels are shifted.
        """
        packing = self._packing
        segments = np.ascontiguousarray(packs.segments, np.int64)
        ends = np.ascontiguousarray(packs.ends, np.int64)
        rows = np.empty(len(segments), np.int64)
        opened, bad = self._open_shards().find(segments, rows)
        if bad >= 0:
            raise self._error(segments[bad], kernels.BAD_SAMPLE)
        _check_uncut(opened, rows)
        shape = (num_rows, packing.max_seq_len)
        tokens = np.empty(shape, self.dtype) if out is None else out
        next_tokens = np.empty(len(segments), np.int64)
        reading = (segments, ends, opened.places, rows, self._options)
        found = kernels.room_for(len(segments))
        bad, problem = kernels.gather_tokens(reading, tokens, next_tokens, found)
        labels = None
        if bad < 0 and self.has_labels and opened.has_labels[rows].any():
            labels = np.empty(shape, np.int32) if labels_out is None else labels_out
            beside = kernels.room_for(len(segments))
            bad, problem = kernels.gather_labels(
                reading, tokens, next_tokens, labels, found, beside
            )
        if bad >= 0:
            raise self._error(segments[bad], problem)
        return Rows(
            tokens=tokens,
            next_tokens=next_tokens,
            labels=labels,
            multiple=packing.pad_to_multiple or 1,
        )

    def _open_shards(self) -> _OpenShards:
        shards = self._shards
        # After a fork, a thread of the parent may hold the old object's lock for ever.
        if shards is None or shards.pid != os.getpid():
            shards = self._shards = _OpenShards(self._streams)
        return shards

    def _error(self, segment: Int64Array, problem: int) -> DataError:
        number, sample = int(segment[STREAM]), int(segment[SAMPLE])
        start, length, total = (int(segment[column]) for column in (START, LENGTH, TOTAL))
        if not 0 <= number < len(self._streams):
            return DataError(
                f"stream {number} is planned, but there are {len(self._streams)} streams; "
                "plan with the streams that are read"
            )
        stream = self._streams[number]
        what = {
            kernels.BAD_SAMPLE: f"is planned, but the stream has {stream.num_samples} samples",
            kernels.BAD_BYTES: "begins or ends outside its shard's bytes",
            kernels.BAD_LENGTH: f"is planned with {total} tokens, but has another number",
            kernels.BAD_RANGE: f"tokens {start} to {start + length} of {total} are planned",
            kernels.BAD_ROW: f"{length} tokens of it pass the end of a pack",
            kernels.BAD_COLUMN: "its labels or loss mask do not fit its tokens",
            kernels.BAD_MASK: "its loss mask holds other values than 0 and 1: token ids and -100 "
            "belong into labels=",
            kernels.BAD_VALUE: "a token id of it is negative, or one or a label "
            f"lies outside int32, +-{MAX_ID}",
        }[problem]
        return DataError(
            f"stream {stream.name!r}, sample {sample}: {what}; the stream is damaged, or was "
            "changed after it was planned: write it again, or run `streampack index` and plan anew"
        )
