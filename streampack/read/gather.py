"""Fetch the tokens of planned packs from mapped shards: the only room that touches tokens.

::

    packs (integers) --> which shard, where in it --> one kernel --> rows of int32 or uint16
                         a table of open shards       no GIL         (num_rows, max_seq_len)

A batch costs two kernel calls and a few look-ups; open shards are remembered as rows of addresses,
and each batch holds on to the shards it reads, so that none is unmapped under it.

Cost: about 0.3 ns a token from the page cache, 15 us a batch beside it. Memory: what it returns,
and the mappings of at most 256 shards.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streampack.config import Packing
from streampack.errors import ConfigError, DataError
from streampack.read import kernels
from streampack.read.targets import detect_shift
from streampack.streams.mds import Places
from streampack.streams.opened import OpenShard, OpenStream
from streampack.types import LENGTH, SAMPLE, START, STREAM, TOTAL, Int64Array, IntArray, Packs

__all__ = ["MAX_ID", "Gatherer", "Rows"]

MAX_OPEN_SHARDS = 256
MAX_OPEN_SAMPLES = 2_000_000  # their places take 16 bytes each
MAX_ID = 2**31 - 1  # ids are handed on as int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The tokens of some packs, one pack a row."""

    tokens: IntArray
    """Token ids, then padding; int32, or uint16 where all ids are; (num_rows, max_seq_len)."""
    next_tokens: Int64Array
    """The sample's token after each segment, -100 where its sample ends; shape (num_segments,)."""
    labels: IntArray | None
    """Shifted labels, shape (num_rows, max_seq_len), if a stream here has labels or a loss mask."""
    multiple: int = 1
    """What the room of each segment is a multiple of: padding lies behind it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """An open shard and what its addresses point into."""

    arrays: tuple[OpenShard | Int64Array, ...]
    has_labels: bool
    place: Int64Array
    is_gone: Callable[[], bool] | None


class _OpenShards:
    """Places of open shards by number, for one process; safe for many threads."""

    def __init__(self, streams: Sequence[OpenStream]) -> None:
        self.pid = os.getpid()
        self._streams = streams
        # bases: where each stream's shards begin in first_samples; (num_streams + 1,).
        self.bases = np.cumsum([0] + [len(stream.first_sample) for stream in streams])
        self.first_samples = np.concatenate([stream.first_sample for stream in streams])
        self._table = np.zeros((len(self.first_samples), kernels.PLACE_COLUMNS), np.int64)
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._num_samples = 0
        self._shifted: dict[int, bool] = {}
        self._lock = threading.Lock()

    def pin(self, shards: Int64Array) -> tuple[Int64Array, list[_Held]]:
        """Return place rows of `shards`, shape (n, PLACE_COLUMNS), and what keeps them mapped."""
        wanted = set(shards.tolist())
        opened: dict[int, _Held] = {}
        while True:
            with self._lock:
                self._hold(opened, wanted)
                missing = wanted - self._held.keys()
                if not missing:
                    for shard in wanted:
                        self._held.move_to_end(shard)
                    return self._table[shards], [self._held[shard] for shard in wanted]
            # Without the lock: opening may fetch a shard from far away.
            opened |= {shard: self._open(shard) for shard in missing}

    def _hold(self, opened: dict[int, _Held], wanted: set[int]) -> None:
        for shard, held in opened.items():
            if shard not in self._held:
                self._held[shard] = held
                self._table[shard] = held.place
                self._num_samples += int(held.place[kernels.COUNT])
        if opened:
            self._let_go_of_removed(wanted)
        for shard in list(self._held):
            if len(self._held) <= MAX_OPEN_SHARDS and self._num_samples <= MAX_OPEN_SAMPLES:
                return
            if shard not in wanted:
                self._num_samples -= int(self._held.pop(shard).place[kernels.COUNT])

    def _let_go_of_removed(self, wanted: set[int]) -> None:
        # A file that was removed to make room takes it until nobody maps it any more.
        for shard, held in list(self._held.items()):
            if shard not in wanted and held.is_gone is not None and held.is_gone():
                self._num_samples -= int(self._held.pop(shard).place[kernels.COUNT])

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
        has_labels = shard.labels is not None or shard.loss_mask is not None
        return _Held(arrays=arrays, has_labels=has_labels, place=place, is_gone=shard.is_gone)

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
    begins = np.ascontiguousarray(places.begins, np.int64)
    counts = np.ascontiguousarray(places.counts, np.int64)
    num_samples = int(place[kernels.COUNT])
    if not len(begins) == len(counts) == num_samples:
        raise DataError(
            f"{where}: {len(begins)} samples lie in it, but index.json says {num_samples}; "
            "write the stream again"
        )
    place[column + kernels.BEGINS] = begins.ctypes.data
    place[column + kernels.COUNTS] = counts.ctypes.data
    place[column + kernels.CODE] = code
    return begins, counts


def _row_dtype(streams: Sequence[OpenStream], packing: Packing) -> type[np.integer[Any]]:
    """Return the type that every token id fits in: uint16 where the streams say so, else int32."""
    ids = {"bos_id": packing.bos_id, "eos_id": packing.eos_id, "padding_id": packing.padding_id}
    largest = 0
    for name, token in ids.items():
        largest = max(largest, token or 0)
        if largest > MAX_ID:
            raise ConfigError(f"{name}={token} is no token id: the largest that fits is {MAX_ID}")
    stored = {dtype for stream in streams for dtype in stream.token_dtypes}
    is_short = stored <= {"uint8", "uint16"} and largest < 2**16
    return np.uint16 if is_short else np.int32


class Gatherer:
    """Reads the tokens of planned packs; can be pickled, and shared by threads.

    Args:
        streams: All streams of the plan, in its order.
        packing: What the packs were planned with.

    Raises:
        ConfigError: If a token id of `packing` does not fit in int32.
    """

    def __init__(self, streams: Sequence[OpenStream], packing: Packing) -> None:
        self._streams = tuple(streams)
        self._packing = packing
        self._shards: _OpenShards | None = None
        self.dtype = _row_dtype(self._streams, packing)
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

    @property
    def has_labels(self) -> bool:
        """Whether rows may come with labels: a stream has a column of them, or a loss mask."""
        choices = [stream.columns for stream in self._streams]
        return any(columns.labels or columns.loss_mask for columns in choices)

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
        """Read the tokens of `packs`; rows after them, up to `num_rows`, hold padding only.

        Args:
            packs: What to read.
            num_rows: Rows of the result.
            out: Where tokens go, of `dtype`, shape (num_rows, max_seq_len); None: new memory.
            labels_out: Where labels go if there are any, int32, of the same shape.

        Raises:
            DataError: If a segment does not lie in its stream, or its bytes not in its shard; if a
                value does not fit in int32; if labels do not tell whether they are shifted.
        """
        packing, shards = self._packing, self._open_shards()
        segments = np.ascontiguousarray(packs.segments, np.int64)
        ends = np.ascontiguousarray(packs.ends, np.int64)
        numbers = np.empty(len(segments), np.int64)
        bad = kernels.find_shards(segments, shards.bases, shards.first_samples, numbers)
        if bad >= 0:
            raise self._error(segments[bad], kernels.BAD_SAMPLE)
        places, held = shards.pin(numbers)
        options = self._options
        shape = (num_rows, packing.max_seq_len)
        tokens = np.empty(shape, self.dtype) if out is None else out
        next_tokens = np.empty(len(segments), np.int64)
        bad, problem = kernels.gather_tokens(segments, ends, places, options, tokens, next_tokens)
        labels = None
        if bad < 0 and any(shard.has_labels for shard in held):
            labels = np.empty(shape, np.int32) if labels_out is None else labels_out
            bad, problem = kernels.gather_labels(
                segments, ends, places, options, tokens, next_tokens, labels
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
        # A forked child must not wait for a lock that a thread of its parent held.
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
            kernels.BAD_VALUE: f"a token id or label of it lies outside int32, +-{MAX_ID}",
        }[problem]
        return DataError(
            f"stream {stream.name!r}, sample {sample}: {what}; the stream is damaged, or was "
            "changed after it was planned: write it again, or run `streampack index` and plan anew"
        )
