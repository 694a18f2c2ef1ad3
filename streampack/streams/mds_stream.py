"""An opened MDS stream: integers for planning first, tokens on demand.

::

    open_stream(stream) --> index.json, length file's header      (immediately)
    shard_lengths(7)    --> length file, else the shard's header  (when the order reaches shard 7)
    open_shard(7)       --> shard 7 mapped, and its spans         (when a pack needs it)

The `Stream` is copied and never modified. An `MdsStream` is frozen and can be pickled. Open shards
belong to the process and are reopened after a fork; shard_pool.py limits them and says their cost.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from streampack.errors import DataError
from streampack.mds.columns import Column, check_layout, sample_spans
from streampack.mds.index import Layout, MdsIndex
from streampack.mds.length_file import LengthFile
from streampack.storage.cache import CachedFile, MappedShard, ShardCache
from streampack.storage.eviction import CacheLimit
from streampack.storage.verify import attach_uri
from streampack.streams.column_selection import ColumnSelection
from streampack.streams.ends import StreamEnds
from streampack.streams.parts import SamplePart
from streampack.streams.shard_checks import ShardChecker
from streampack.streams.shard_pool import OpenShard, shard_pool
from streampack.streams.split_rows import split_spans
from streampack.types import Int64Array

logger = logging.getLogger(__name__)

_files_of_checked_values: dict[tuple[Path, str], CachedFile] = {}
"""The shard that this process checked, by its stream's folder and digest."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MdsStream:
    """A stream with a validated index; lengths and tokens are read on demand."""

    name: str
    """The stream's name in messages and reports."""
    number: int
    """Its index among the streams."""
    proportion: float | None
    repeat: float | None
    choose: int | None
    """At most one of the three weights is set, as given."""
    digest: str
    """Identifies the contents: index.json and the selected columns. For a part of a stream, it is
    `entries_digest`."""
    entries_digest: str
    """Identifies the contents by the shards' entries in index.json. If a stream grew, the part with
    its former shards thus has the former digest."""
    is_part: bool
    """Whether the stream has only some of the shards or samples in index.json."""
    part: SamplePart | None = None
    """Its samples, or None for all of its shards."""
    index: MdsIndex
    rows: MdsIndex | None = None
    """The index of the shards as they are stored, if samples are documents in their rows."""
    columns: ColumnSelection
    cache: ShardCache
    length_file: LengthFile | None
    max_seq_len: int | None = None
    """Tokens per pack of this stream, or None for those of the packing."""
    max_passes: float | None = None
    """Passes that a run of chapters may use in a lane, or None for any number."""
    on_exhausted: str = "substitute"
    """What happens after `max_passes`."""
    checks_dtypes: bool = True
    """Whether to check that `bytes` columns are read with the right type."""
    ends: StreamEnds
    num_samples: int = field(init=False)
    num_shards: int = field(init=False)
    first_sample: Int64Array = field(init=False)
    """The first sample of each shard, and one past the last; shape (num_shards + 1,)."""
    raw_bytes: Int64Array = field(init=False)
    """Decompressed bytes of each shard, shape (num_shards,)."""
    stored_bytes: Int64Array = field(init=False)
    """Bytes of each shard's compressed file, 0 without one; shape (num_shards,)."""

    def __post_init__(self) -> None:
        # Fields of this class, because planning and gathering ask for them at every turn.
        first_sample = (self.part or self.index).first_sample
        object.__setattr__(self, "first_sample", first_sample)
        object.__setattr__(self, "num_samples", int(first_sample[-1]))
        object.__setattr__(self, "num_shards", len(self.index.shards))
        object.__setattr__(self, "raw_bytes", self.index.raw_bytes)
        packed = [shard.packed.num_bytes if shard.packed else 0 for shard in self.index.shards]
        object.__setattr__(self, "stored_bytes", np.array(packed, np.int64))

    @property
    def has_length_file(self) -> bool:
        return self.length_file is not None

    @property
    def may_be_empty(self) -> bool:
        return self.length_file is not None and not self.length_file.min_tokens

    @property
    def full_digest(self) -> str:
        """`digest`, followed by a colon and the length file's digest if there is one.

        Without a length file, lengths are not covered: reading them would fetch all shards.
        """
        return self._with_lengths(self.digest)

    @property
    def growing_digest(self) -> str:
        """`entries_digest`, followed as in `full_digest`."""
        return self._with_lengths(self.entries_digest)

    def with_ends(self, ends: StreamEnds) -> MdsStream:
        return replace(self, ends=ends)

    def _with_lengths(self, digest: str) -> str:
        digest = self.ends.digest_of(digest)
        if self.length_file is None or self.is_part:
            return digest
        return f"{digest}:{self.length_file.digest()}"

    @property
    def token_dtypes(self) -> set[str | None]:
        layouts = {shard.layout for shard in self.index.shards}
        return {self._columns_of(layout)["tokens"].dtype for layout in layouts}

    def _columns_of(self, layout: Layout) -> dict[str, Column]:
        return self.columns.find(layout, f"stream {self.name!r}")

    def total_tokens(self) -> tuple[int, str]:
        """Return the stream's number of tokens, and its source.

        It is "lengths" (exact, from the length file) or "bytes" (an estimate from the shards'
        sizes, as if other columns of variable size were empty).
        """
        if self.part is not None and self.part.tokens is not None:
            return int(self.part.tokens.sum()), "lengths"
        if self.length_file is not None:
            return self.length_file.num_tokens, "lengths"
        total = sum(self._estimate_tokens(shard) for shard in range(self.num_shards))
        total = total * self.num_samples // self.index.num_samples
        return max(total, self.num_samples), "bytes"

    def shard_tokens(self) -> Int64Array | None:
        if self.length_file is None:
            return None
        if self.part is not None:
            return self.part.tokens
        return self._read_lengths(self.length_file.shard_tokens)

    def _estimate_tokens(self, shard: int) -> int:
        info = self.index.shards[shard]
        column = self._columns_of(info.layout)["tokens"]
        if column.num_values is not None:
            return column.num_values * info.num_samples
        # Sizes of columns, the token column's own header, and the config that MDS repeats.
        head_bytes = 8 + len(json.dumps(info.layout.names + info.layout.encodings)) + 120
        sample_bytes = 4 + info.layout.fixed_bytes + 3 * column.has_shape
        itemsize = np.dtype(column.dtype or "int32").itemsize
        value_bytes = info.raw.num_bytes - head_bytes - sample_bytes * info.num_samples
        return max(value_bytes, 0) // itemsize

    def shard_lengths(self, shard: int) -> Int64Array:
        if self.length_file is None:
            return self.open_shard(shard).tokens.counts
        lengths = self.stored_lengths(self.length_file, shard)
        return lengths if self.part is None else self._own(lengths, shard)

    def _own(self, values: Int64Array, shard: int) -> Int64Array:
        return values if self.part is None else values[self.part.rows(shard)]

    def stored_lengths(self, file: LengthFile, shard: int) -> Int64Array:
        """Return the tokens of all samples that a shard stores, from its length file."""
        lengths = self._read_lengths(file.shard_lengths, shard)
        # A token takes at least one byte; planning with impossible lengths would exhaust memory.
        if lengths.sum() > self.raw_bytes[shard]:
            raise DataError(
                f"{file.path}: shard {shard} has {lengths.sum()} tokens there, but "
                f"only {self.raw_bytes[shard]} bytes; rewrite it: streampack index "
                f"{file.origin}",
                uri=str(file.path),
            )
        return lengths

    def knows_edges(self, bos_id: int | None, eos_id: int | None) -> bool:  # noqa: ARG002
        return True

    def shard_edges(
        self,
        shard: int,
        bos_id: int | None = None,  # noqa: ARG002
        eos_id: int | None = None,  # noqa: ARG002
    ) -> Int64Array:
        if self.length_file is not None:
            return self._own(self._read_lengths(self.length_file.shard_edges, shard), shard)
        opened = self.open_shard(shard)
        return opened.tokens.edges(opened.data)

    def open_shard(self, shard: int) -> OpenShard:
        """Map a shard and locate its values; fetch and decompress it first if necessary.

        A DataError says that it cannot be fetched or is damaged, or that a sample's labels or loss
        mask differ in length from its tokens.
        """
        info, pool = self.index.shards[shard], shard_pool()
        uri = self.cache.location.uri(info.raw.basename)
        try:
            # Neither the path nor index.json distinguishes two versions of a file.
            opened = pool.get((self.cache.file(info), self.digest))
            if opened is None:
                opened = self._open_shard(shard, uri)
                pool.put(opened)
        except (DataError, OSError, RuntimeError):
            with attach_uri(uri, info.raw.basename):
                raise
        return opened

    def file_of(self, shard: int) -> tuple[str, str]:
        basename = self.index.shards[shard].raw.basename
        return self.cache.location.uri(basename), basename

    def check_files(self) -> None:
        self.cache.check(self.index)

    def cache_folders(self) -> tuple[Path, ...]:
        return self.cache.cache_folders(self.index)

    def under(self, limit: CacheLimit) -> MdsStream:
        return replace(self, cache=self.cache.under(limit))

    def is_here(self, shard: int) -> bool:
        return self.cache.is_here(self.index.shards[shard])

    def fetch(self, shard: int, *, is_waiting: bool = True) -> int | None:
        """Fetch, verify and decompress a shard if necessary; return the bytes of the fetched file.

        They are 0 if the shard was already here. None: another thread or process is fetching it,
        and `is_waiting` is False.
        """
        info = self.index.shards[shard]
        if not is_waiting and not self.cache.is_free(info):
            return None
        return info.stored.num_bytes if self.cache.fetch(info) else 0

    def mark_planned(self, shards: Int64Array) -> None:
        self.cache.mark_planned(self.index.shards[shard] for shard in shards.tolist())

    def mark_finished(self, shards: Int64Array) -> None:
        self.cache.mark_finished(self.index.shards[shard] for shard in shards.tolist())

    def _read_lengths(self, read: Callable[..., Int64Array], *numbers: int) -> Int64Array:
        lengths = self.cache.metadata.read_lengths(partial(read, *numbers))
        if lengths is None:
            raise DataError(
                f"stream {self.name!r}: its length file is gone from {self.cache.folder}, and the "
                "remote has none; recreate it with `streampack index`, and start again",
                uri=str(self.cache.metadata.length_path),
            )
        return lengths

    def _open_shard(self, shard: int, uri: str) -> OpenShard:
        info = self.index.shards[shard]
        columns = self._columns_of(info.layout)
        mapped = self.cache.map(info)
        try:
            opened = self._parse(shard, mapped, uri, columns)
        except DataError as error:
            # Our copy may have been damaged on disk or in transit: fetch it once more.
            if not self.cache.remove_damaged(info, mapped.file):
                raise
            logger.warning("%s; the copy in %s is refetched", error, self.cache.folder)
            mapped = self.cache.map(info)
            try:
                opened = self._parse(shard, mapped, uri, columns)
            except DataError as second:
                raise DataError(
                    f"{second}; {uri} was refetched with the "
                    "same fault, so it is damaged at its origin: rewrite it there, and start "
                    "again"
                ) from second
        self._check(opened, shard, mapped.file, columns)
        return opened if self.part is None else opened.take(self.part.rows(shard))

    def _parse(
        self, shard: int, mapped: MappedShard, uri: str, columns: Mapping[str, Column]
    ) -> OpenShard:
        info, data = (self.rows or self.index).shards[shard], mapped.data
        where = f"stream {self.name!r}, shard {shard} ({uri})"
        check_layout(data, info, where)
        spans = {}
        for option, column in columns.items():
            spans[option] = sample_spans(data, info.num_samples, info.layout, column, where)
        if self.rows is not None and self.length_file is not None:
            lengths = self.stored_lengths(self.length_file, shard)
            spans["tokens"] = split_spans(spans["tokens"], lengths, where)
        return OpenShard(
            key=(mapped.file, self.digest),
            uri=uri,
            data=data,
            tokens=spans["tokens"],
            labels=spans.get("labels"),
            loss_mask=spans.get("loss_mask"),
            is_gone=mapped.is_gone,
        )

    def _check(
        self, opened: OpenShard, shard: int, file: CachedFile, columns: Mapping[str, Column]
    ) -> None:
        lengths = self.length_file
        checker = ShardChecker(
            stream_name=self.name,
            columns=columns,
            first_sample=int(self.index.first_sample[shard]),
            stated=None if lengths is None else self.stored_lengths(lengths, shard),
            length_file=None if lengths is None else lengths.path,
        )
        # Once per process, unless the shard has been rewritten. One that is gone was evicted.
        known = _files_of_checked_values.get((self.cache.folder, self.digest))
        if known is None or self.cache.file_state(Path(known.path)) not in (known.state, None):
            if self.checks_dtypes:
                checker.check_dtypes(opened)
            checker.check_padding(opened, (self.rows or self.index).shards[shard])
            _files_of_checked_values[self.cache.folder, self.digest] = file
        checker.check_counts(opened)
        checker.check_stated_lengths(opened)
