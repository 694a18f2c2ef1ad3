"""An opened MDS stream: integers for planning first, tokens on demand.

::

    open_stream(stream) --> index.json, length file's header      (immediately)
    shard_lengths(7)    --> length file, else the shard's header  (when the order reaches shard 7)
    open_shard(7)       --> shard 7 mapped, and its places        (when a pack needs it)

The `Stream` is copied and never modified. An `MdsStream` is frozen and can be pickled. Open shards
belong to the process and are reopened after a fork.

Cost: opening parses index.json, about 10 us a shard. Places take 16 bytes per sample and column of
an open shard; at most 512 shards or 4 million samples are open.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from streampack.errors import ConfigError, DataError
from streampack.mds.columns import Places, find_column, sample_places
from streampack.mds.dtype_check import check_labels_dtype, check_tokens_dtype
from streampack.mds.header import check_columns
from streampack.mds.index import Layout, MdsIndex, parse_index
from streampack.mds.length_file import LENGTH_FILE, LengthFile, index_digest, open_length_file
from streampack.storage.cache import MappedShard, ShardCache
from streampack.storage.eviction import CacheLimit
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.materialize import Downloader
from streampack.storage.verify import attach_uri
from streampack.streams.label_columns import TARGET_COLUMNS, warn_unused_label_column
from streampack.streams.shard_pool import OpenShard, shard_pool
from streampack.types import Int64Array

_looked_at: set[tuple[Path, str]] = set()
"""Streams whose dtypes this process has checked, by folder and digest."""

logger = logging.getLogger(__name__)

OTHER_NAMES = {"tokens": ("input_ids",)}
"""Alternatives for the default column names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSelection:
    """The columns of a stream that are read; hashable."""

    tokens: str = "tokens"
    """Column of the tokens; for the default, "input_ids" is accepted too."""
    tokens_dtype: str | None = None
    """Type of the tokens if stored as `bytes`; also the default for the other columns."""
    labels: str | None = None
    """Column of labels, one per token."""
    labels_dtype: str | None = None
    """Type of the labels if stored as `bytes`."""
    labels_shifted: bool | None = None
    """Whether labels[i] is the target at token i (True) or is token i (False); None: detect."""
    loss_mask: str | None = None
    """Column that marks the targets, 1 or 0 for each token."""
    loss_mask_dtype: str | None = None
    """Type of the loss mask if stored as `bytes`."""

    @classmethod
    def of(cls, stream: Any) -> ColumnSelection:
        """Read the selection from a `Stream`; MosaicML's has none and gets the defaults."""
        names = [field.name for field in fields(cls) if hasattr(stream, field.name)]
        return cls(**{name: getattr(stream, name) for name in names})

    @property
    def token_names(self) -> tuple[str, ...]:
        """Names of the token column, in order of preference."""
        return (self.tokens, *OTHER_NAMES.get(self.tokens, ()))

    def dtype_of(self, option: str) -> str | None:
        """Return the type of "tokens", "labels" or "loss_mask" if stored as `bytes`."""
        own: str | None = getattr(self, f"{option}_dtype")
        return own or self.tokens_dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MdsStream:
    """A stream with a validated index; lengths and tokens are read on demand."""

    name: str
    """The stream's name in messages and reports."""
    number: int
    """Its index among the streams."""
    proportion: float | None
    """The weight as given; None: unset."""
    repeat: float | None
    """The weight as given; None: unset."""
    choose: int | None
    """The weight as given; None: unset."""
    digest: str
    """Identifies the contents: index.json and the selected columns."""
    index: MdsIndex
    """The parsed index.json."""
    columns: ColumnSelection
    """The selected columns."""
    cache: ShardCache
    """Provides the shards."""
    length_file: LengthFile | None
    """The stream's length file, if there is one."""
    checks_dtypes: bool = True
    """Whether to check that `bytes` columns are read with the right type."""

    @property
    def num_samples(self) -> int:
        """Number of samples in the stream."""
        return self.index.num_samples

    @property
    def num_shards(self) -> int:
        """Number of shards in the stream."""
        return len(self.index.shards)

    @property
    def first_sample(self) -> Int64Array:
        """The first sample of each shard, and one past the last; shape (num_shards + 1,)."""
        return self.index.first_sample

    @property
    def raw_bytes(self) -> Int64Array:
        """Decompressed bytes of each shard, shape (num_shards,)."""
        return self.index.raw_bytes

    @property
    def has_length_file(self) -> bool:
        """Whether lengths are known without opening the shards."""
        return self.length_file is not None

    @property
    def full_digest(self) -> str:
        """`digest`, followed by a colon and the length file's digest if there is one.

        Without a length file, lengths are not covered: reading them would fetch all shards.
        """
        if self.length_file is None:
            return self.digest
        return f"{self.digest}:{self.length_file.digest()}"

    @property
    def is_remote(self) -> bool:
        """Whether shards may have to be fetched."""
        return self.cache.is_remote

    @property
    def token_dtypes(self) -> set[str | None]:
        """Types of the token ids according to index.json; None: each value states its own."""
        choice = self.columns
        return {
            find_column(layout, choice.token_names, choice.tokens_dtype, self.name, "tokens").dtype
            for layout in {shard.layout for shard in self.index.shards}
        }

    @property
    def labels_shifted(self) -> bool | None:
        """Whether labels[i] is the target at token i; None: not specified."""
        return self.columns.labels_shifted

    def total_tokens(self) -> tuple[int, str]:
        """Return the stream's number of tokens, and its source.

        Returns:
            The number, and "lengths" (exact, from the length file) or "bytes" (an estimate from
            the shards' sizes, as if the other columns of variable size were empty).
        """
        if self.length_file is not None:
            return self.length_file.num_tokens, "lengths"
        total = sum(self._estimate_tokens(shard) for shard in range(self.num_shards))
        return max(total, self.num_samples), "bytes"

    def shard_tokens(self) -> Int64Array | None:
        """Return the tokens of each shard, shape (num_shards,); None without a length file."""
        if self.length_file is None:
            return None
        return self._stated(self.length_file.shard_tokens)

    def _estimate_tokens(self, shard: int) -> int:
        info = self.index.shards[shard]
        column = find_column(
            info.layout, self.columns.token_names, self.columns.tokens_dtype, self.name, "tokens"
        )
        if column.num_values is not None:
            return column.num_values * info.num_samples
        # Sizes of columns, the token column's own header, and the config that MDS repeats.
        head_bytes = 8 + len(json.dumps(info.layout.names + info.layout.encodings)) + 120
        sample_bytes = 4 + info.layout.fixed_bytes + 3 * column.has_shape
        itemsize = np.dtype(column.dtype or "int32").itemsize
        value_bytes = info.raw.num_bytes - head_bytes - sample_bytes * info.num_samples
        return max(value_bytes, 0) // itemsize

    def shard_lengths(self, shard: int) -> Int64Array:
        """Return the number of tokens of each sample of a shard, shape (num_samples_of_shard,).

        Raises:
            DataError: If the shard is damaged, or holds a sample without tokens.
        """
        if self.length_file is None:
            return self.open_shard(shard).tokens.counts
        lengths = self._stated(self.length_file.shard_lengths, *self._samples_of(shard), shard)
        # A token takes a byte or more; planning with impossible lengths would exhaust the memory.
        if lengths.sum() > self.raw_bytes[shard]:
            raise DataError(
                f"{self.length_file.path}: shard {shard} has {lengths.sum()} tokens there, but "
                f"only {self.raw_bytes[shard]} bytes; write it anew: streampack index "
                f"{self.length_file.path.parent}",
                uri=str(self.length_file.path),
            )
        return lengths

    def shard_edges(self, shard: int) -> Int64Array:
        """Return the first and last token of each sample of a shard, shape (n, 2).

        Raises:
            DataError: If the shard is damaged, or holds a sample without tokens.
        """
        if self.length_file is not None:
            return self._stated(self.length_file.shard_edges, *self._samples_of(shard))
        opened = self.open_shard(shard)
        tokens = opened.tokens
        first = tokens.at(opened.data, np.zeros_like(tokens.counts))
        return np.stack([first, tokens.at(opened.data, tokens.counts - 1)], axis=1)

    def open_shard(self, shard: int) -> OpenShard:
        """Map a shard and locate its values; fetch and decompress it first if necessary.

        Raises:
            DataError: If the shard cannot be fetched or is damaged, a sample has no tokens, or its
                labels or loss mask differ in length from its tokens.
        """
        info = self.index.shards[shard]
        recent = shard_pool()
        with attach_uri(self.cache.uri(info.raw.basename), info.raw.basename):
            # Neither path nor index.json distinguish two versions of a file.
            opened = recent.get((self.cache.file(info).key, self.digest))
            if opened is None:
                opened = self._open_shard(shard)
        return opened

    @property
    def needs_fetch(self) -> bool:
        """Whether shards may have to be fetched or decompressed before use."""
        return self.cache.needs_fetch

    def is_here(self, shard: int) -> bool:
        """Return whether a shard's raw file exists with the right size; one `stat`."""
        return self.cache.is_here(self.index.shards[shard])

    def bring(self, shard: int, *, is_waiting: bool = True) -> int | None:
        """Fetch, verify and decompress a shard if necessary, without mapping it.

        Args:
            shard: The shard's number.
            is_waiting: Whether to wait for another process that is fetching it.

        Returns:
            Bytes of the file that this call fetched or decompressed; 0 if the shard was here
            already; None if another thread or process is fetching it and `is_waiting` is False.

        Raises:
            DataError: If it cannot be fetched, or does not match index.json.
        """
        info = self.index.shards[shard]
        if not is_waiting and not self.cache.is_free(info):
            return None
        return (info.packed or info.raw).num_bytes if self.cache.bring(info) else 0

    def planned(self, shards: Int64Array) -> None:
        """Record that these shards will be read soon, for the cache limit; cheap.

        Args:
            shards: Their numbers, shape (n,).
        """
        self.cache.planned(self.index.shards[shard] for shard in shards.tolist())

    def finished(self, shards: Int64Array) -> None:
        """Record that these shards were read and may be evicted first; cheap.

        Args:
            shards: Their numbers, shape (n,).
        """
        self.cache.finished(self.index.shards[shard] for shard in shards.tolist())

    def _stated(self, read: Callable[..., Int64Array], *place: int) -> Int64Array:
        """Read from the length file; fetch it again if it was deleted or is damaged."""
        path = self.cache.folder / LENGTH_FILE
        with attach_uri(path):
            state = self.cache.seen(path)
            try:
                return read(*place)
            except FileNotFoundError:
                if self.cache.length_file_path() is not None:
                    return read(*place)
            except DataError:
                if not self.cache.throw_away_lengths(state):
                    raise
                if self.cache.length_file_path() is not None:
                    return read(*place)
        raise DataError(
            f"stream {self.name!r}: its length file is gone from {self.cache.folder}, and the "
            "remote has none; make it anew with `streampack index`, and start again",
            uri=str(path),
        )

    def _samples_of(self, shard: int) -> tuple[int, int]:
        return int(self.first_sample[shard]), int(self.first_sample[shard + 1])

    def _open_shard(self, shard: int) -> OpenShard:
        info = self.index.shards[shard]
        mapped = self.cache.map(info)
        try:
            opened = self._parse(shard, mapped)
        except DataError as error:
            # Our copy may have been damaged on disk or in transit: fetch it once more.
            if not self.cache.throw_away(info, mapped.file):
                raise
            logger.warning("%s; the copy in %s is fetched again", error, self.cache.folder)
            mapped = self.cache.map(info)
            opened = self._parse_again(shard, mapped)
        self._check_dtypes(opened, info.layout)
        self._check_counts(opened, shard)
        shard_pool().put((mapped.file.key, self.digest), opened)
        return opened

    def _parse_again(self, shard: int, mapped: MappedShard) -> OpenShard:
        try:
            return self._parse(shard, mapped)
        except DataError as error:
            uri = self.cache.uri(self.index.shards[shard].raw.basename)
            raise DataError(
                f"{error}; {uri} was fetched again and is no better, so it is damaged at its "
                "origin: write it again there, and start again"
            ) from error

    def _parse(self, shard: int, mapped: MappedShard) -> OpenShard:
        info, data = self.index.shards[shard], mapped.data
        where = f"stream {self.name!r}, shard {shard} ({self.cache.uri(info.raw.basename)})"
        check_columns(data, info, where)
        choice = self.columns

        def places(names: tuple[str, ...], option: str) -> Places:
            dtype = choice.dtype_of(option)
            column = find_column(info.layout, names, dtype, f"stream {self.name!r}", option)
            return sample_places(data, info.num_samples, info.layout, column, where)

        return OpenShard(
            data=data,
            tokens=places(choice.token_names, "tokens"),
            labels=places((choice.labels,), "labels") if choice.labels else None,
            loss_mask=places((choice.loss_mask,), "loss_mask") if choice.loss_mask else None,
            is_gone=mapped.is_gone,
        )

    def _check_dtypes(self, opened: OpenShard, layout: Layout) -> None:
        """Check once per process that untyped columns hold the types that the options state."""
        key, choice = (self.cache.folder, self.digest), self.columns
        if not self.checks_dtypes or key in _looked_at:
            return
        if self._is_bare(layout, "tokens"):
            place = f"stream {self.name!r}, column of the tokens"
            spans = _spans(opened.tokens)
            check_tokens_dtype(opened.data, *spans, opened.tokens.dtype, place)
        if opened.labels is not None and self._is_bare(layout, "labels"):
            place = f"stream {self.name!r}, column {choice.labels!r}"
            check_labels_dtype(opened.data, *_spans(opened.labels), opened.labels.dtype, place)
        _looked_at.add(key)

    def _is_bare(self, layout: Layout, option: str) -> bool:
        """Return whether a column states no type, so that an option must."""
        names = {"tokens": self.columns.token_names, "labels": (self.columns.labels,)}.get(
            option, (self.columns.loss_mask,)
        )
        name = next((name for name in names if name in layout.names), None)
        return name is not None and layout.encodings[layout.names.index(name)] == "bytes"

    def _check_counts(self, opened: OpenShard, shard: int) -> None:
        counts = opened.tokens.counts
        first, _ = self._samples_of(shard)
        if len(counts) and counts.min() == 0:
            _refuse_empty(self.name, first + int(counts.argmin()))
        for name, places in (("labels", opened.labels), ("loss_mask", opened.loss_mask)):
            if places is not None and not np.array_equal(places.counts, counts):
                sample = int((places.counts != counts).argmax())
                hint = ""
                if self._is_bare(self.index.shards[shard].layout, name):
                    hint = _dtype_hint(places, counts, f"{name}_dtype")
                raise DataError(
                    f"stream {self.name!r}, sample {first + sample}: {counts[sample]} tokens, but "
                    f"{places.counts[sample]} values in its {name} column; write one for each "
                    f"token{hint}"
                )
        if self.length_file is not None:
            stated = self.shard_lengths(shard)
            if not np.array_equal(stated, counts):
                sample = int((stated != counts).argmax())
                hint = ""
                if self._is_bare(self.index.shards[shard].layout, "tokens"):
                    hint = _dtype_hint(opened.tokens, stated, "tokens_dtype")
                raise DataError(
                    f"stream {self.name!r}, sample {first + sample}: {counts[sample]} tokens, but "
                    f"{self.length_file.path} says {stated[sample]}; write it anew: "
                    f"streampack index {self.length_file.path.parent}{hint}"
                )


def _spans(places: Places) -> tuple[Int64Array, Int64Array]:
    """Return the byte offset and the number of bytes of each sample's values."""
    return places.begins, places.counts * np.dtype(places.dtype).itemsize


def _dtype_hint(places: Places, counts: Int64Array, option: str) -> str:
    """Return a hint if another type would give the right number of values."""
    _, num_bytes = _spans(places)
    for dtype in ("int32", "int64", "uint16", "uint8"):
        if np.array_equal(counts * np.dtype(dtype).itemsize, num_bytes):
            # -100 does not fit in an unsigned type.
            likely = "int16" if (option, dtype) == ("labels_dtype", "uint16") else dtype
            return f"; as {likely} they are as many as that: if so, set {option}={likely!r}"
    return ""


def _refuse_empty(name: str, sample: int) -> None:
    raise DataError(
        f"stream {name!r}, sample {sample}: 0 tokens, but a sample needs 1 or more; rewrite the "
        "stream without empty samples (`streampack write` skips them)"
    )


def open_stream(
    stream: Any,
    number: int,
    *,
    disk: LocalFilesystem | None = None,
    store: Downloader | None = None,
) -> MdsStream:
    """Open a `Stream`, ours or MosaicML's, without changing it; it can be opened again.

    Args:
        stream: The stream to open.
        number: Its index among the streams, from 0.
        disk: Filesystem of its local folder; None: this machine's.
        store: Downloads its files; None: the stream's own downloader.

    Raises:
        DataError: If its index.json or its length file is invalid, a file of a local stream does
            not match index.json, or a requested column is missing.
    """
    files = StreamLocation.of(stream)
    cache = ShardCache(files, disk, store)
    choice = ColumnSelection.of(stream)
    name = getattr(stream, "name", None) or _default_name(files)
    with attach_uri(cache.index_uri):
        text = cache.index_bytes()
        index = parse_index(text, cache.index_uri)
        column = _check_columns(index, choice, name)
        length_file = _open_lengths(cache, text, index)
        if length_file is not None:
            if length_file.hashes:
                index = index.with_hashes("xxh64", length_file.hashes, LENGTH_FILE)
            length_file = _usable(length_file, column, name)
        cache.check(index)
    _tell_of_unread(index, choice, name, column)
    return MdsStream(
        name=name,
        number=number,
        proportion=stream._proportion,
        repeat=stream._repeat,
        choose=stream._choose,
        digest=_digest(text, choice),
        index=index,
        columns=choice,
        cache=cache,
        length_file=length_file,
        checks_dtypes=getattr(stream, "check_dtypes", True),
    )


def open_streams(
    streams: Sequence[Any],
    *,
    cache_limit: int | None = None,
    disk: LocalFilesystem | None = None,
    store: Downloader | None = None,
) -> tuple[MdsStream, ...]:
    """Open the streams of a dataset, numbered from 0.

    Args:
        streams: The streams to open, ours or MosaicML's.
        cache_limit: Limit on the bytes of their fetched and decompressed files on this node;
            None: no limit.
        disk: Filesystem of their local folders; None: this machine's.
        store: Downloads their files; None: their own downloaders.

    Raises:
        DataError: As `open_stream`.
        ConfigError: If two streams of different remotes share a local folder; if there is a limit
            and a stream's files are on a file system that other nodes may use.
    """
    _refuse_shared_folders([StreamLocation.of(stream) for stream in streams])
    opened = tuple(
        open_stream(stream, number, disk=disk, store=store) for number, stream in enumerate(streams)
    )
    homes = [stream.cache.homes(stream.index) for stream in opened]
    if cache_limit is None or not any(homes):
        return opened
    disk = disk or LocalFilesystem()
    for home in chain(*homes):
        if disk.is_network(home.folder):
            raise ConfigError(
                f"cache_limit={cache_limit}: {home.folder} lies on a network file system, where "
                "other nodes may use its files; set local= to a folder of this node's own disk, "
                "or leave cache_limit out"
            )
    limit = CacheLimit(cache_limit, tuple(chain(*homes)), disk)
    return tuple(
        replace(stream, cache=stream.cache.under(limit)) if may_go else stream
        for stream, may_go in zip(opened, homes, strict=True)
    )


def _refuse_shared_folders(streams: Sequence[StreamLocation]) -> None:
    """Refuse two streams whose files would collide."""
    first: dict[str, int] = {}
    for number, files in enumerate(streams):
        other = first.setdefault(os.path.realpath(files.folder), number)
        if streams[other].owner != files.owner:
            remotes = [f"remote={streams[each].remote!r}" for each in (other, number)]
            raise ConfigError(
                f"streams {other} and {number} have one local folder, {streams[other].folder}, but "
                f"{remotes[0]} and {remotes[1]}; set another local= for one of them"
            )


def _default_name(files: StreamLocation) -> str:
    folder = str(files.folder.absolute()) if files.remote is None else files.remote
    return PurePosixPath(Path(folder).as_posix()).name or folder


def _check_columns(index: MdsIndex, choice: ColumnSelection, name: str) -> str:
    """Check columns and types before any shard is opened; return the token column's name."""
    first: dict[Layout, int] = {}
    for number, shard in enumerate(index.shards):
        first.setdefault(shard.layout, number)
    found = set()
    for layout, number in first.items():
        where = f"stream {name!r} ({index.uri}: shards.{number})"
        dtype = choice.tokens_dtype
        found.add(find_column(layout, choice.token_names, dtype, where, "tokens").name)
        for option in ("labels", "loss_mask"):
            wanted = getattr(choice, option)
            if wanted is not None:
                find_column(layout, (wanted,), choice.dtype_of(option), where, option)
    if len(found) > 1:
        raise DataError(
            f"stream {name!r}: its shards hold tokens in columns "
            f"{' and '.join(map(repr, sorted(found)))}; write the stream anew with one of them"
        )
    return found.pop()


def _tell_of_unread(index: MdsIndex, choice: ColumnSelection, name: str, tokens: str) -> None:
    if choice.labels or choice.loss_mask:
        return
    layouts = {shard.layout for shard in index.shards}
    columns = dict(chain(*(zip(each.names, each.encodings, strict=True) for each in layouts)))
    for column in TARGET_COLUMNS:
        # With another encoding the column is something else, such as a class label.
        kind = columns.get(column, "").partition(":")[0]
        if column != tokens and kind in ("ndarray", "bytes"):
            warn_unused_label_column("Stream", name, column)


def _open_lengths(cache: ShardCache, text: bytes, index: MdsIndex) -> LengthFile | None:
    path = cache.length_file_path()
    if path is None:
        return None
    with attach_uri(path):
        state = cache.seen(path)
        try:
            return open_length_file(path, text, index)
        except DataError:
            if not cache.throw_away_lengths(state):
                raise
            path = cache.length_file_path()
            return None if path is None else open_length_file(path, text, index)


def _usable(lengths: LengthFile, column: str, name: str) -> LengthFile | None:
    """Return a length file if it counts this column; None otherwise."""
    if lengths.column != column:
        return None
    if lengths.min_tokens == 0:
        with attach_uri(lengths.path):
            _refuse_empty(name, lengths.find_empty())
    return lengths


def _digest(text: bytes, choice: ColumnSelection) -> str:
    columns = [getattr(choice, field.name) for field in fields(choice)]
    content = index_digest(text) + json.dumps(columns).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
