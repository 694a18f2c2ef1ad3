"""Shards with an index.json: those of MosaicML Streaming and of litData."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from streampack.errors import DataError
from streampack.mds.columns import Column, check_layout, sample_spans
from streampack.mds.index import Layout, MdsIndex, Shard
from streampack.mds.length_file import LengthFile
from streampack.storage.cache import CachedFile, MappedShard, ShardCache
from streampack.streams.column_selection import ColumnSelection
from streampack.streams.shard_checks import ShardChecker
from streampack.streams.shard_pool import OpenShard
from streampack.streams.split_rows import split_spans
from streampack.types import Int64Array, LengthCost

logger = logging.getLogger(__name__)

_files_of_checked_values: dict[tuple[Path, str], CachedFile] = {}
"""The shard that this process checked, by its stream's folder and digest."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MdsShards:
    """The shards of a `TokenStream` with an index.json."""

    name: str
    digest: str
    """Identifies the shards and the selected columns."""
    index: MdsIndex
    rows: MdsIndex | None = None
    """The index of the shards as they are stored, if samples are documents in their rows."""
    columns: ColumnSelection
    cache: ShardCache
    length_file: LengthFile | None
    checks_dtypes: bool = True
    block_samples: ClassVar[int | None] = None

    @property
    def first_sample(self) -> Int64Array:
        return self.index.first_sample

    @property
    def raw_bytes(self) -> Int64Array:
        return self.index.raw_bytes

    @property
    def stored_bytes(self) -> Int64Array:
        return self.index.stored_bytes

    def entry(self, shard: int) -> Shard:
        """Return the shard as the cache knows it."""
        return self.index.shards[shard]

    @property
    def has_lengths(self) -> bool:
        return self.length_file is not None

    @property
    def may_be_empty(self) -> bool:
        """Whether samples may have no tokens, as far as is known."""
        return self.length_file is None or not self.length_file.min_tokens

    @property
    def length_cost(self) -> LengthCost:
        return "fetch" if self.length_file is None and self.cache.is_remote else "none"

    @property
    def token_dtypes(self) -> set[str | None]:
        """Types of the token ids, or None if each value states its own."""
        layouts = {shard.layout for shard in self.index.shards}
        return {self._columns_of(layout)["tokens"].dtype for layout in layouts}

    def lengths_digest(self) -> str:
        return "" if self.length_file is None else self.length_file.digest()

    def _columns_of(self, layout: Layout) -> dict[str, Column]:
        return self.columns.find(layout, f"stream {self.name!r}")

    def total_tokens(self) -> int:
        """Return the tokens of all shards; estimated as if other columns were empty."""
        if self.length_file is not None:
            return self.length_file.num_tokens
        total = sum(map(self._estimate_tokens, range(len(self.index.shards))))
        return max(total, self.index.num_samples)

    def tokens(self) -> Int64Array | None:
        if self.length_file is None:
            return None
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

    def lengths(self, shard: int) -> Int64Array | None:
        """Return the tokens of each sample of a shard; None if they are in the shard alone."""
        file = self.length_file
        if file is None:
            return None
        lengths = self._read_lengths(file.shard_lengths, shard)
        # A token takes at least one byte; planning with impossible lengths would exhaust memory.
        if lengths.sum() > self.index.raw_bytes[shard]:
            raise DataError(
                f"{file.path}: shard {shard} has {lengths.sum()} tokens there, but "
                f"only {self.index.raw_bytes[shard]} bytes; rewrite it: streampack index "
                f"{file.origin}",
                uri=str(file.path),
            )
        return lengths

    def edges(self, shard: int, *_ids: int | None) -> Int64Array | None:
        if self.length_file is None:
            return None
        return self._read_lengths(self.length_file.shard_edges, shard)

    def _read_lengths(self, read: Callable[..., Int64Array], *numbers: int) -> Int64Array:
        lengths = self.cache.metadata.read_lengths(partial(read, *numbers))
        if lengths is None:
            raise DataError(
                f"stream {self.name!r}: its length file is gone from {self.cache.folder}, and the "
                "remote has none; recreate it with `streampack index`, and start again",
                uri=str(self.cache.metadata.length_path),
            )
        return lengths

    def file_of(self, shard: int) -> tuple[str, str]:
        basename = self.index.shards[shard].raw.basename
        return self.cache.location.uri(basename), basename

    def row_layout(self, shard: int) -> Layout | None:
        """Return the columns of a sample; None if it has only tokens."""
        layout = self.index.shards[shard].layout
        # Columns of a row that is split are of no document.
        return layout if layout.format == "mds" and self.rows is None else None

    def version(self, shard: int) -> CachedFile:
        """Return what identifies a shard's file, which is fetched if necessary."""
        return self.cache.file(self.index.shards[shard])

    def read(self, shard: int) -> OpenShard:
        """Map a shard, with its version as the key, and locate the values of all its samples."""
        info = self.index.shards[shard]
        mapped = self.cache.map(info)
        try:
            opened = self._parse(shard, mapped)
        except DataError as error:
            # Our copy may have been damaged on disk or in transit: fetch it once more.
            if not self.cache.remove_damaged(info, mapped.file):
                raise
            logger.warning("%s; the copy in %s is refetched", error, self.cache.folder)
            mapped = self.cache.map(info)
            try:
                opened = self._parse(shard, mapped)
            except DataError as second:
                raise DataError(
                    f"{second}; {self.file_of(shard)[0]} was refetched with the "
                    "same fault, so it is damaged at its origin: rewrite it there, and start "
                    "again"
                ) from second
        self._check(opened, shard, mapped.file)
        return opened

    def _parse(self, shard: int, mapped: MappedShard) -> OpenShard:
        info, data = (self.rows or self.index).shards[shard], mapped.data
        columns = self._columns_of(self.index.shards[shard].layout)
        where = f"stream {self.name!r}, shard {shard} ({mapped.uri})"
        check_layout(data, info, where)
        spans = {}
        for option, column in columns.items():
            spans[option] = sample_spans(data, info.num_samples, info.layout, column, where)
        if self.rows is not None and (lengths := self.lengths(shard)) is not None:
            spans["tokens"] = split_spans(spans["tokens"], lengths, where)
        return OpenShard(
            key=mapped.file,
            uri=mapped.uri,
            data=data,
            tokens=spans["tokens"],
            labels=spans.get("labels"),
            loss_mask=spans.get("loss_mask"),
            is_gone=mapped.is_gone,
        )

    def _check(self, opened: OpenShard, shard: int, file: CachedFile) -> None:
        # Once per process, unless the shard has been rewritten. One that is gone was evicted.
        checker = self.checker(shard)
        known = _files_of_checked_values.get((self.cache.folder, self.digest))
        if known is None or self.cache.file_state(Path(known.path)) not in (known.state, None):
            self.check_values(opened, shard, checker)
            _files_of_checked_values[self.cache.folder, self.digest] = file
        checker.check_counts(opened)
        checker.check_stated_lengths(opened)

    def check_values(self, opened: OpenShard, shard: int, checker: ShardChecker) -> None:
        """Refuse a shard whose values contradict their type, or are padded."""
        if self.checks_dtypes:
            checker.check_dtypes(opened)
        checker.check_padding(opened, (self.rows or self.index).shards[shard])

    def checker(self, shard: int) -> ShardChecker:
        return ShardChecker(
            stream_name=self.name,
            columns=self._columns_of(self.index.shards[shard].layout),
            first_sample=int(self.index.first_sample[shard]),
            stated=self.lengths(shard),
            length_file=None if self.length_file is None else self.length_file.path,
        )
