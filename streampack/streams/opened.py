"""A stream opened for planning and reading: integers first, tokens only where they are asked for.

::

    open_stream(stream) --> index.json, length file's head     (at once)
    shard_lengths(7)    --> length file, else the shard's head  (when the order reaches shard 7)
    open_shard(7)       --> shard 7 mapped, and its places      (when a pack needs it)

The `Stream` is copied, never written to. An `OpenStream` is frozen and can be pickled; what is open
belongs to the process and is found anew after a fork.

Cost: opening parses index.json, some 10 us a shard; places take 16 bytes a sample and column while
a shard is open, and at most 512 shards or 4 million samples are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from streampack.errors import ConfigError, DataError
from streampack.streams.bring import Store
from streampack.streams.cache import ShardCache
from streampack.streams.checked import naming
from streampack.streams.disk import Disk
from streampack.streams.eviction import CacheLimit
from streampack.streams.files import StreamFiles
from streampack.streams.head import check_columns
from streampack.streams.index import Layout, MdsIndex, parse_index
from streampack.streams.lengths import LENGTH_FILE, LengthFile, index_digest, open_length_file
from streampack.streams.mds import Places, find_column, sample_places
from streampack.streams.recent import OpenShard, recent_shards
from streampack.streams.unread import TARGET_COLUMNS, tell_of_unread
from streampack.types import Int64Array

__all__ = ["ColumnChoice", "OpenShard", "OpenStream", "open_stream", "open_streams"]

OTHER_NAMES = {"tokens": ("input_ids",)}
"""Column names that are found too where the default one is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnChoice:
    """Which columns of a stream are read; hashable."""

    tokens: str = "tokens"
    """The tokens; as the default, "input_ids" is found too."""
    tokens_dtype: str | None = None
    """Type of the tokens if stored as `bytes`, and of the others where nothing else is said."""
    labels: str | None = None
    """Labels, as many as tokens."""
    labels_dtype: str | None = None
    """Type of the labels if stored as `bytes`."""
    labels_shifted: bool | None = None
    """Whether labels[i] is the target at token i (True) or is token i (False); None: look."""
    loss_mask: str | None = None
    """Which tokens are targets, 1 or 0 for each token."""
    loss_mask_dtype: str | None = None
    """Type of the loss mask if stored as `bytes`."""

    @classmethod
    def of(cls, stream: Any) -> ColumnChoice:
        """Take the choice from a `Stream`; MosaicML's own has none, and gets the defaults."""
        names = [field.name for field in fields(cls) if hasattr(stream, field.name)]
        return cls(**{name: getattr(stream, name) for name in names})

    @property
    def token_names(self) -> tuple[str, ...]:
        """Names of the token column in order of preference."""
        return (self.tokens, *OTHER_NAMES.get(self.tokens, ()))

    def dtype_of(self, option: str) -> str | None:
        """Return the type of "tokens", "labels" or "loss_mask" if stored as `bytes`."""
        own: str | None = getattr(self, f"{option}_dtype")
        return own or self.tokens_dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenStream:
    """A stream, its index checked; lengths and tokens come when they are asked for."""

    name: str
    """What messages and reports call it."""
    number: int
    """Its place among the streams."""
    proportion: float | None
    """The weight as asked for; None: unset."""
    repeat: float | None
    """The weight as asked for; None: unset."""
    choose: int | None
    """The weight as asked for; None: unset."""
    digest: str
    """Stands for the contents: index.json, and which columns are read."""
    index: MdsIndex
    """What index.json says."""
    columns: ColumnChoice
    """Which columns are read."""
    cache: ShardCache
    """Where the shards come from."""
    length_file: LengthFile | None
    """The lengths at rest, if there are any."""

    @property
    def num_samples(self) -> int:
        """Samples of the stream."""
        return self.index.num_samples

    @property
    def num_shards(self) -> int:
        """Shards of the stream."""
        return len(self.index.shards)

    @property
    def first_sample(self) -> Int64Array:
        """The first sample of each shard, and one past the last; shape (num_shards + 1,)."""
        return self.index.first_sample

    @property
    def raw_bytes(self) -> Int64Array:
        """Bytes of each shard once decompressed, shape (num_shards,)."""
        return self.index.raw_bytes

    @property
    def has_length_file(self) -> bool:
        """Whether lengths are known without the shards."""
        return self.length_file is not None

    @property
    def is_remote(self) -> bool:
        """Whether shards may have to be fetched."""
        return self.cache.is_remote

    @property
    def token_dtypes(self) -> set[str | None]:
        """What index.json says of the type of token ids; None: each value says its own."""
        choice = self.columns
        return {
            find_column(layout, choice.token_names, choice.tokens_dtype, self.name, "tokens").dtype
            for layout in {shard.layout for shard in self.index.shards}
        }

    @property
    def labels_shifted(self) -> bool | None:
        """Whether labels[i] is the target at token i; None: nobody said."""
        return self.columns.labels_shifted

    def total_tokens(self) -> tuple[int, str]:
        """Return the stream's tokens, and how they are known.

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
        # Sizes of columns, the token column's own head, and the config that MDS repeats.
        head_bytes = 8 + len(json.dumps(info.layout.names + info.layout.encodings)) + 120
        sample_bytes = 4 + info.layout.fixed_bytes + 3 * column.has_shape
        itemsize = np.dtype(column.dtype or "int32").itemsize
        value_bytes = info.raw.num_bytes - head_bytes - sample_bytes * info.num_samples
        return max(value_bytes, 0) // itemsize

    def shard_lengths(self, shard: int) -> Int64Array:
        """Return the tokens of each sample of a shard, shape (num_samples_of_shard,).

        Raises:
            DataError: If the shard is damaged, or holds a sample without tokens.
        """
        if self.length_file is None:
            return self.open_shard(shard).tokens.counts
        lengths = self._stated(self.length_file.shard_lengths, *self._samples_of(shard), shard)
        # Each token takes a byte or more; a plan of lengths that cannot be would fill the memory.
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
        """Map a shard, fetched and decompressed if need be, and find its values.

        Raises:
            DataError: If it cannot be had, is damaged, holds a sample without tokens, or one
                whose labels or loss mask are not as many as its tokens.
        """
        # Not the digest alone: of two copies of one stream, one may be damaged.
        key = (self.cache.folder, self.digest, shard)
        recent = recent_shards()
        opened = recent.get(key)
        if opened is None:
            raw = self.index.shards[shard].raw
            with naming(self.cache.uri(raw.basename), raw.basename):
                opened = self._open_shard(shard)
            recent.put(key, opened)
        return opened

    @property
    def needs_fetch(self) -> bool:
        """Whether shards may have to be brought first: fetched, or decompressed."""
        return self.cache.needs_fetch

    def is_here(self, shard: int) -> bool:
        """Return whether a shard's raw file is here, of the right size; one `stat`."""
        return self.cache.is_here(self.index.shards[shard])

    def bring(self, shard: int, *, is_waiting: bool = True) -> bool:
        """Fetch, check and decompress a shard, if need be, without mapping it.

        Args:
            shard: Which one.
            is_waiting: Whether to wait for another process that brings it just now.

        Returns:
            Whether it is here; always, when waiting.

        Raises:
            DataError: If it cannot be had, or is not what index.json says.
        """
        info = self.index.shards[shard]
        if not is_waiting and not self.cache.is_free(info):
            return False
        self.cache.path(info)
        return True

    def planned(self, shards: Int64Array) -> None:
        """Note that these shards will be read soon, for the cache limit; cheap.

        Args:
            shards: Their numbers, shape (n,).
        """
        self.cache.planned(self.index.shards[shard] for shard in shards.tolist())

    def finished(self, shards: Int64Array) -> None:
        """Note that these shards were read and may go first, for the cache limit; cheap.

        Args:
            shards: Their numbers, shape (n,).
        """
        self.cache.finished(self.index.shards[shard] for shard in shards.tolist())

    def _stated(self, read: Callable[..., Int64Array], *place: int) -> Int64Array:
        """Read from the length file; fetch it again if the cache was deleted meanwhile."""
        path = self.cache.folder / LENGTH_FILE
        with naming(path):
            try:
                return read(*place)
            except FileNotFoundError:
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
        data, is_gone = self.cache.map(info)
        where = f"stream {self.name!r}, shard {shard} ({self.cache.uri(info.raw.basename)})"
        check_columns(data, info, where)
        choice = self.columns

        def places(names: tuple[str, ...], option: str) -> Places:
            dtype = choice.dtype_of(option)
            column = find_column(info.layout, names, dtype, f"stream {self.name!r}", option)
            return sample_places(data, info.num_samples, info.layout, column, where)

        opened = OpenShard(
            data=data,
            tokens=places(choice.token_names, "tokens"),
            labels=places((choice.labels,), "labels") if choice.labels else None,
            loss_mask=places((choice.loss_mask,), "loss_mask") if choice.loss_mask else None,
            is_gone=is_gone,
        )
        self._check_counts(opened, shard)
        return opened

    def _check_counts(self, opened: OpenShard, shard: int) -> None:
        counts = opened.tokens.counts
        first, _ = self._samples_of(shard)
        if len(counts) and counts.min() == 0:
            _refuse_empty(self.name, first + int(counts.argmin()))
        for name, places in (("labels", opened.labels), ("loss_mask", opened.loss_mask)):
            if places is not None and not np.array_equal(places.counts, counts):
                sample = int((places.counts != counts).argmax())
                raise DataError(
                    f"stream {self.name!r}, sample {first + sample}: {counts[sample]} tokens, but "
                    f"{places.counts[sample]} values in its {name} column; write one for each token"
                )
        if self.length_file is not None:
            stated = self.shard_lengths(shard)
            if not np.array_equal(stated, counts):
                sample = int((stated != counts).argmax())
                raise DataError(
                    f"stream {self.name!r}, sample {first + sample}: {counts[sample]} tokens, but "
                    f"{self.length_file.path} says {stated[sample]}; write it anew: "
                    f"streampack index {self.length_file.path.parent}"
                )


def _refuse_empty(name: str, sample: int) -> None:
    raise DataError(
        f"stream {name!r}, sample {sample}: 0 tokens, but a sample needs 1 or more; rewrite the "
        "stream without empty samples (`streampack write` skips them)"
    )


def open_stream(
    stream: Any, number: int, *, disk: Disk | None = None, store: Store | None = None
) -> OpenStream:
    """Open a `Stream`, ours or MosaicML's; it is not changed, and can be opened again.

    Args:
        stream: What to open.
        number: Its place among the streams, from 0.
        disk: What its local folder lies on; None: this machine's.
        store: How its files are fetched; None: by its own downloader.

    Raises:
        DataError: If its index.json or its length file is not what it should be, a file of a
            local stream is not as index.json says, or a column that is asked for is missing.
    """
    files = StreamFiles.of(stream)
    cache = ShardCache(files, disk, store)
    choice = ColumnChoice.of(stream)
    name = getattr(stream, "name", None) or _default_name(files)
    with naming(cache.index_uri):
        text = cache.index_bytes()
        index = parse_index(text, cache.index_uri)
        column = _check_columns(index, choice, name)
        cache.check(index)
        length_file = _open_lengths(cache, text, index, column, name)
    _tell_of_unread(index, choice, name, column)
    return OpenStream(
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
    )


def open_streams(
    streams: Sequence[Any],
    *,
    cache_limit: int | None = None,
    disk: Disk | None = None,
    store: Store | None = None,
) -> tuple[OpenStream, ...]:
    """Open the streams of a dataset, numbered from 0.

    Args:
        streams: What to open, ours or MosaicML's.
        cache_limit: Bytes of this node that files of theirs which were fetched or decompressed may
            take together; None: no limit.
        disk: What their local folders lie on; None: this machine's.
        store: How their files are fetched; None: by their own downloaders.

    Raises:
        DataError: As `open_stream`.
        ConfigError: If a stream's files lie where other nodes may use them, and there is a limit.
    """
    opened = tuple(
        open_stream(stream, number, disk=disk, store=store) for number, stream in enumerate(streams)
    )
    homes = [stream.cache.homes(stream.index) for stream in opened]
    if cache_limit is None or not any(homes):
        return opened
    disk = disk or Disk()
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


def _default_name(files: StreamFiles) -> str:
    folder = str(files.folder.absolute()) if files.remote is None else files.remote
    return PurePosixPath(Path(folder).as_posix()).name or folder


def _check_columns(index: MdsIndex, choice: ColumnChoice, name: str) -> str:
    """Refuse missing columns and wrong types before any shard is touched; name the token column."""
    where = f"stream {name!r}"
    layouts: dict[Layout, None] = dict.fromkeys(shard.layout for shard in index.shards)
    found = set()
    for layout in layouts:
        dtype = choice.tokens_dtype
        found.add(find_column(layout, choice.token_names, dtype, where, "tokens").name)
        for option in ("labels", "loss_mask"):
            wanted = getattr(choice, option)
            if wanted is not None:
                find_column(layout, (wanted,), choice.dtype_of(option), where, option)
    if len(found) > 1:
        raise DataError(
            f"{where}: its shards hold tokens in columns {' and '.join(map(repr, sorted(found)))}; "
            "write them in one, or make two streams of it"
        )
    return found.pop()


def _tell_of_unread(index: MdsIndex, choice: ColumnChoice, name: str, tokens: str) -> None:
    if choice.labels or choice.loss_mask:
        return
    layouts = {shard.layout for shard in index.shards}
    columns = dict(chain(*(zip(each.names, each.encodings, strict=True) for each in layouts)))
    for column in TARGET_COLUMNS:
        # Of another encoding it is something else, such as the label of a class.
        kind = columns.get(column, "").partition(":")[0]
        if column != tokens and kind in ("ndarray", "bytes"):
            tell_of_unread("Stream", name, column)


def _open_lengths(
    cache: ShardCache, text: bytes, index: MdsIndex, column: str, name: str
) -> LengthFile | None:
    path = cache.length_file_path()
    if path is None:
        return None
    with naming(path):
        lengths = open_length_file(path, text, index)
        # One that counts another column is as good as none.
        if lengths.column != column:
            return None
        if lengths.min_tokens == 0:
            _refuse_empty(name, lengths.find_empty())
    return lengths


def _digest(text: bytes, choice: ColumnChoice) -> str:
    columns = [getattr(choice, field.name) for field in fields(choice)]
    content = index_digest(text) + json.dumps(columns).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
