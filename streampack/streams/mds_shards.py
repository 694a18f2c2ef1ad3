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
from streampack.mds.columns import Column, Spans, check_layout, find_column, sample_spans
from streampack.mds.dtype_check import LIKELY, MAX_SAMPLES, check_tokens_dtype, itemsize_of
from streampack.mds.index import Layout, MdsIndex, Shard
from streampack.mds.length_file import LengthFile
from streampack.padding import PADDING_MASK
from streampack.storage.cache import CachedFile, MappedShard, ShardCache
from streampack.streams.column_selection import FoundColumns
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
    columns: FoundColumns
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
        return {columns["tokens"].dtype for columns in self.columns.values()}

    def _columns_of(self, shard: int) -> dict[str, Column]:
        return self.columns[self.index.shards[shard].layout]

    def lengths_digest(self) -> str:
        return "" if self.length_file is None else self.length_file.digest()

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
        column = self._columns_of(shard)["tokens"]
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

    def read(self, shard: int, version: CachedFile) -> OpenShard:
        """Map a shard, with its version as the key, and locate the values of all its samples."""
        info = self.index.shards[shard]
        mapped = self.cache.map(info, version)
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
        where = f"stream {self.name!r}, shard {shard} ({mapped.uri})"
        check_layout(data, info, where)
        spans = {}
        for option, column in self.columns[info.layout].items():
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
        known = _files_of_checked_values.get((self.cache.folder, self.digest))
        if known is None or self.cache.file_state(Path(known.path)) not in (known.state, None):
            self.check_values(opened, shard)
            _files_of_checked_values[self.cache.folder, self.digest] = file
        counts, stated = opened.tokens.counts, self.lengths(shard)
        for option, spans in (("labels", opened.labels), ("loss_mask", opened.loss_mask)):
            if spans is not None and not np.array_equal(spans.counts, counts):
                sample = int((spans.counts != counts).argmax())
                raise DataError(
                    f"{self._sample(shard, sample)}: {counts[sample]} tokens, but "
                    f"{spans.counts[sample]} values in its {option} column; write one for each "
                    f"token{self._dtype_hint(shard, spans, counts, option)}"
                )
        if self.length_file is not None and stated is not None and (stated != counts).any():
            sample, path = int((stated != counts).argmax()), self.length_file.path
            hint = self._dtype_hint(shard, opened.tokens, stated, "tokens")
            if LIKELY[itemsize_of(_num_bytes(opened.tokens))] == opened.tokens.dtype:
                hint = ""  # the file is wrong
            column = self._columns_of(shard)["tokens"]
            typed = f" --tokens {column.name}:{opened.tokens.dtype}" * column.is_untyped
            raise DataError(
                f"{self._sample(shard, sample)}: {counts[sample]} tokens, but {path} says "
                f"{stated[sample]}; rewrite it: streampack index {path.parent}{typed}{hint}"
            )

    def check_values(self, opened: OpenShard, shard: int) -> None:
        """Refuse a shard whose values contradict their type, or are padded."""
        info = (self.rows or self.index).shards[shard]
        if self.checks_dtypes and self.columns[info.layout]["tokens"].is_untyped:
            self._check_dtype(opened, shard)
        if PADDING_MASK in info.layout.names:
            self._check_padding(opened, shard, info)

    def _check_dtype(self, opened: OpenShard, shard: int) -> None:
        tokens, where = opened.tokens, f"stream {self.name!r}, column of the tokens"
        of_tokens = opened.data, tokens.begins, _num_bytes(tokens), tokens.dtype
        try:
            check_tokens_dtype(*of_tokens, where)
        except DataError as error:
            stated = self.lengths(shard)
            if stated is None or not self.length_file or (stated != tokens.counts).any():
                raise
            raise DataError(
                f"{error}. {self.length_file.path} was made with {tokens.dtype} too; then "
                "rewrite it with `streampack index`"
            ) from None

    def _check_padding(self, opened: OpenShard, shard: int, info: Shard) -> None:
        # By a column of attention masks: padding would be packed and learned.
        try:
            column = find_column(info.layout, (PADDING_MASK,), None, "", "loss_mask")
            masks = sample_spans(opened.data, info.num_samples, info.layout, column, "")
        except DataError:  # a column of something else
            return
        for sample in np.flatnonzero(masks.counts == opened.tokens.counts)[:MAX_SAMPLES].tolist():
            if not masks.read(opened.data, sample).all():
                raise DataError(
                    f"{self._sample(shard, sample)}: its {PADDING_MASK!r} has zeros, so it is "
                    "padded, and padding would be packed and learned; rewrite the stream without "
                    "it: write_stream(streaming.StreamingDataset(...), out) leaves padding out"
                )

    def _sample(self, shard: int, index: int) -> str:
        return f"stream {self.name!r}, sample {self.index.first_sample[shard] + index}"

    def _dtype_hint(self, shard: int, spans: Spans, counts: Int64Array, option: str) -> str:
        column, num_bytes = self._columns_of(shard)[option], _num_bytes(spans)
        for dtype in ("int32", "int64", "uint16", "uint8"):
            is_fit = np.array_equal(counts * np.dtype(dtype).itemsize, num_bytes)
            if is_fit and column.is_untyped:
                # -100 does not fit in an unsigned type.
                likely = "int16" if (option, dtype) == ("labels", "uint16") else dtype
                stated = f"{option}='{column.name}:{likely}'"
                return f"; as {likely} the numbers agree: if so, write {stated}"
        return ""


def _num_bytes(spans: Spans) -> Int64Array:
    return spans.counts * np.dtype(spans.dtype).itemsize
