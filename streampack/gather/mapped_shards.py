"""The shards that a gatherer reads, as rows of addresses for the kernels.

::

    segments --> shards by bisection --> row_of --> rows: data, size, first, count, columns ...
                                          -1: opened through the shard pool, and the table replaced

The shard pool (streams/shard_pool.py) decides which shards stay open. The table of a gatherer is
replaced as a whole: a batch keeps the one that it started with, so that none of its shards is
unmapped while it is read.

Cost: 10 us per batch; a new table takes about 1 us for each shard in it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from streampack.errors import DataError
from streampack.gather import kernels
from streampack.gather.lookup_kernels import CHECK_NS, CHECKED, READ, find_rows
from streampack.mds.columns import Spans
from streampack.storage.filesystem import is_cut
from streampack.streams.label_shift import detect_shift
from streampack.streams.shard_pool import OpenShard, shard_pool
from streampack.streams.token_stream import TokenStream
from streampack.types import BoolArray, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _MappedShard:
    """An open shard, its address row, and the tables of samples that the row points to."""

    shard: OpenShard
    row: Int64Array
    tables: tuple[Int64Array, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MappedShards:
    """Some open shards; they stay mapped while this object is referenced."""

    row_of: Int64Array
    """Row of each shard of all streams in the arrays below, or -1; shape (num_shards,)."""
    rows: Int64Array
    times: Int64Array
    """Monotonic times of each shard's last read, written by the kernel, and of the last size check
    of its file, or its mapping; shape (m, 2), in nanoseconds."""
    has_labels: BoolArray
    """Whether each shard has a labels or loss mask column, shape (m,)."""
    shards: Mapping[int, _MappedShard]
    """The shards by number, in the order of the arrays."""

    @classmethod
    def of(
        cls, num_shards: int, shards: Mapping[int, _MappedShard], times: Mapping[int, list[int]]
    ) -> MappedShards:
        """Build the table from shards and their times, by number."""
        rows = np.array([shard.row for shard in shards.values()], np.int64)
        rows = rows.reshape(-1, kernels.ROW_COLUMNS)
        row_of = np.full(num_shards, -1, np.int64)
        row_of[list(shards)] = np.arange(len(shards))
        codes = rows[:, [kernels.LABELS + kernels.CODE, kernels.LOSS_MASK + kernels.CODE]]
        return cls(
            row_of=row_of,
            rows=rows,
            times=np.array([times[number] for number in shards], np.int64).reshape(-1, 2),
            has_labels=(codes != kernels.NO_COLUMN).any(axis=1),
            shards=shards,
        )

    def check_uncut(self, rows: Int64Array, now_ns: int) -> None:
        """Refuse shards if files were truncated after they were mapped: reading is SIGBUS."""
        mapped, checked_ns = list(self.shards.values()), self.times[:, CHECKED]
        due = [row for row in set(rows.tolist()) if checked_ns[row] < now_ns - CHECK_NS]
        for row in due:
            shard = mapped[row].shard
            if is_cut(shard.data) or (shard.mask_data is not None and is_cut(shard.mask_data)):
                raise DataError(
                    f"{shard.uri}: was cut short while it was read; put the whole file back "
                    "or rewrite the stream, and start again: write a new version of a "
                    "stream to another path, never over one that is being read",
                    uri=shard.uri,
                )
        # Only once all are intact: a group that failed is reread batch by batch.
        checked_ns[due] = now_ns


class ShardLookup:
    """Finds the shards of segments, and opens those that are not; per process, thread-safe."""

    def __init__(self, streams: Sequence[TokenStream]) -> None:
        self.pid = os.getpid()
        self._streams = streams
        # bases: index of each stream's first shard in first_samples; (num_streams + 1,).
        first_samples = [stream.first_sample for stream in streams]
        self._bases = np.cumsum([0, *map(len, first_samples)])
        self._first_samples = np.concatenate(first_samples)
        self._mapped = MappedShards.of(len(self._first_samples), {}, {})
        self._shifted: dict[int, bool] = {}
        self._lock = threading.Lock()

    def find(self, segments: Int64Array, rows: Int64Array) -> tuple[MappedShards, int]:
        """Open the shards of all segments, and fill `rows` with their address rows.

        Returns the table, and the first segment that does not exist, or -1.

        Raises:
            DataError: If a shard's file was truncated after it was mapped.
        """
        mapped, now_ns = self._mapped, time.monotonic_ns()
        while True:
            bad, are_open, is_due = find_rows(
                segments,
                self._bases,
                self._first_samples,
                mapped.row_of,
                mapped.times,
                now_ns,
                rows,
            )
            if is_due:
                mapped.check_uncut(rows, now_ns)
            if bad >= 0 or are_open:
                return mapped, bad
            mapped = self._with(set(rows.tolist()))

    def _with(self, wanted: set[int]) -> MappedShards:
        before = self._mapped
        shards = list(before.shards.values())
        if shards:
            shard_pool().touch(
                shards[row].shard for row in np.argsort(before.times[:, READ]).tolist()
            )
        new: dict[int, _MappedShard] = {}
        while True:
            with self._lock:
                missing = wanted.difference(self._mapped.shards, new)
                if not missing:
                    if new:
                        self._mapped = self._replaced(new, wanted)
                    return self._mapped
            # Not under the lock: opening may fetch a remote shard.
            new |= {number: self._open(number) for number in missing}

    def _replaced(self, new: dict[int, _MappedShard], wanted: set[int]) -> MappedShards:
        before = self._mapped
        times = dict.fromkeys(new, [time.monotonic_ns()] * 2)
        times |= dict(zip(before.shards, before.times.tolist(), strict=True))
        shards = {
            number: mapped
            for number, mapped in {**new, **before.shards}.items()
            if number in wanted or mapped.shard.key in shard_pool()
        }
        return MappedShards.of(len(self._first_samples), shards, times)

    def _open(self, number: int) -> _MappedShard:
        stream_number = int(np.searchsorted(self._bases, number, "right")) - 1
        stream = self._streams[stream_number]
        shard_number = number - int(self._bases[stream_number])
        shard = stream.open_shard(shard_number)
        row = np.zeros(kernels.ROW_COLUMNS, np.int64)
        row[kernels.DATA] = shard.data.ctypes.data
        row[kernels.SIZE] = shard.data.nbytes
        mask_data = shard.data if shard.mask_data is None else shard.mask_data
        row[kernels.MASK_DATA] = mask_data.ctypes.data
        row[kernels.MASK_SIZE] = mask_data.nbytes
        row[kernels.FIRST] = self._first_samples[number]
        row[kernels.COUNT] = self._first_samples[number + 1] - self._first_samples[number]
        if shard.labels is not None:
            row[kernels.SHIFTED] = self._is_shifted(stream_number)
        where = f"stream {stream.name!r}, shard {shard_number}"
        tables: tuple[Int64Array, ...] = ()
        for column, spans in (
            (kernels.TOKENS, shard.tokens),
            (kernels.LABELS, shard.labels),
            (kernels.LOSS_MASK, shard.loss_mask),
        ):
            row[column + kernels.CODE] = kernels.NO_COLUMN
            if spans is not None:
                tables += (_put_column(row, column, spans, where),)
        return _MappedShard(shard=shard, row=row, tables=tables)

    def _is_shifted(self, number: int) -> bool:
        stream = self._streams[number]
        if stream.columns.labels_shifted is not None:
            return stream.columns.labels_shifted
        if number not in self._shifted:
            self._shifted[number] = detect_shift(stream)
        return self._shifted[number]


def _put_column(row: Int64Array, column: int, spans: Spans, where: str) -> Int64Array:
    """Write the addresses of a column into a row; return the table that they point to."""
    code = kernels.code_of(spans.dtype)
    if code == kernels.NO_COLUMN:
        raise DataError(
            f"{where}: a column of {spans.dtype} values cannot be gathered; "
            "rewrite it with an integer type of this machine's byte order"
        )
    num_samples = int(row[kernels.COUNT])
    if not len(spans.begins) == len(spans.counts) == num_samples:
        raise DataError(
            f"{where}: it has {len(spans.begins)} samples, but index.json says {num_samples}; "
            "rewrite the stream"
        )
    samples = np.stack([spans.begins, spans.counts], axis=1).astype(np.int64, copy=False)
    row[column + kernels.SAMPLES] = samples.ctypes.data
    row[column + kernels.CODE] = code
    return samples
