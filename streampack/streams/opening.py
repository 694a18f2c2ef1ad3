"""Open the streams of a dataset: index.json, length files, columns and the cache limit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from streampack.errors import ConfigError
from streampack.mds.index import MdsIndex, index_of, parse_entries
from streampack.mds.length_file import (
    LENGTH_FILE,
    LengthFile,
    index_digest,
    open_length_file,
)
from streampack.mds.litdata import LITDATA, LITDATA_BARE
from streampack.storage.cache import ShardCache
from streampack.storage.eviction import CacheLimit
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.materialize import Downloader
from streampack.storage.verify import attach_uri
from streampack.stores.retries import request
from streampack.streams.column_selection import (
    ColumnSelection,
    check_columns,
    warn_unused_columns,
)
from streampack.streams.flat_opening import is_flat, open_flat
from streampack.streams.mds_shards import MdsShards
from streampack.streams.parts import Numbering, chosen_shards, digest_text
from streampack.streams.split_rows import open_split
from streampack.streams.token_stream import TokenStream

STAT_THREADS = 16
OF_TOKEN_FILES = ("samples", "begins_with_bos", "ends_with_eos", "trailing")


def open_stream(stream: Any, number: int, **options: Any) -> TokenStream:
    """Open a `Stream` of any format; options and errors as of `open_mds` and `open_flat`."""
    if is_flat(stream):
        return open_flat(stream, number, options.get("disk"))
    return open_mds(stream, number, **options)


def open_mds(
    stream: Any,
    number: int,
    *,
    disk: LocalFilesystem | None = None,
    store: Downloader | None = None,
    has_targets: bool = True,
) -> TokenStream:
    """Open a `Stream` of shards, ours or MosaicML's; the options are those of `open_streams`.

    Columns that may hold targets, but are not selected, cause a warning if `has_targets`. A
    DataError says that index.json, the length file or a local file is invalid, or a column missing.
    """
    location, columns = StreamLocation.of(stream), ColumnSelection.of(stream)
    _check_options(stream, location.index_uri)
    cache = ShardCache(location, disk, store)
    name = getattr(stream, "name", None) or _default_name(location)
    with attach_uri(location.index_uri):
        text = cache.metadata.index_bytes()
        entries = parse_entries(text, location.index_uri)
        _add_stored_sizes(entries, location)
        index = index_of(entries, location.index_uri)
        column = check_columns(index, columns, name)
        rows: MdsIndex | None = None
        split_at = getattr(stream, "split_at", None)
        if split_at is None:
            index, length_file = _with_lengths(cache, text, index, column)
        else:
            rows, (index, length_file) = index, open_split(stream, text, index)
        cache.check(index)
        numbers, part = chosen_shards(stream, Numbering.of_stream(index.first_sample), name)
        if numbers is not None:
            index, entries = index.take(numbers), [entries[n] for n in numbers.tolist()]
            rows = rows and rows.take(numbers)
            length_file = None if length_file is None else length_file.take(numbers)
    if has_targets:
        warn_unused_columns(index, columns, name, column)
    own_digest = _digest(_entries_digest(entries) + digest_text(part), columns, split_at)
    digest = own_digest if numbers is not None else _digest(index_digest(text), columns, split_at)
    shards = MdsShards(
        name=name,
        digest=digest,
        index=index,
        rows=rows,
        columns=columns,
        cache=cache,
        length_file=length_file,
        checks_dtypes=getattr(stream, "check_dtypes", True),
    )
    return TokenStream.of(
        location.stream,
        number,
        name,
        shards,
        part,
        digest=digest,
        entries_digest=own_digest,
        is_part=numbers is not None,
    )


def _check_options(stream: Any, uri: str) -> None:
    for option in OF_TOKEN_FILES:
        if (value := getattr(stream, option, None)) is not None:
            raise ConfigError(
                f"{option}={value!r}: is for token files, and {uri} has shards; omit it. Parts of "
                "a stream of shards are chosen by shards= or part="
            )


def open_streams(
    streams: Sequence[Any],
    *,
    cache_limit: int | None = None,
    disk: LocalFilesystem | None = None,
    store: Downloader | None = None,
) -> tuple[TokenStream, ...]:
    """Open the streams of a dataset, numbered from 0; raise a DataError as `open_stream`.

    `cache_limit` limits the bytes of their fetched and decompressed files on this node. Without a
    `disk` and a `store`, they use this machine's disk and their own downloaders. A ConfigError says
    that other nodes may use a folder with a limit.
    """
    opened = tuple(
        open_stream(stream, number, disk=disk, store=store) for number, stream in enumerate(streams)
    )
    folders = [stream.cache.cache_folders(stream.shards.index) for stream in opened]
    if cache_limit is None or not any(folders):
        return opened
    shared = tuple(dict.fromkeys(chain.from_iterable(folders)))  # streams may share a folder
    disk = disk or LocalFilesystem()
    for folder in shared:
        if disk.is_network(folder):
            raise ConfigError(
                f"cache_limit={cache_limit}: {folder} is on a network file system, where "
                "other nodes may use its files; set local= to a folder of this node's own disk, "
                "or omit cache_limit"
            )
    limit = CacheLimit(cache_limit, shared, disk)
    for stream, is_evictable in zip(opened, folders, strict=True):
        if is_evictable:
            stream.cache.keep_within(limit)
    return opened


def _with_lengths(
    cache: ShardCache, text: bytes, index: MdsIndex, column: str
) -> tuple[MdsIndex, LengthFile | None]:
    path = cache.metadata.length_file_path()
    if path is None:
        return index, None
    found = cache.metadata.read_lengths(partial(open_length_file, path, text, index))
    if found is not None and found.hashes:
        index = index.with_hashes("xxh64", found.hashes, LENGTH_FILE)
    return index, found if found is not None and found.column == column else None


def _add_stored_sizes(entries: list[Any], location: StreamLocation) -> None:
    """Set the sizes of compressed chunks of litData, of which its index.json has the raw ones."""
    files = [
        entry["zip_data"]
        for entry in entries
        if isinstance(entry, dict)
        and entry.get("format") in (LITDATA, LITDATA_BARE)
        and "zip_data" in entry
    ]
    if not files:
        return
    folder = location.folder if location.remote is None else location.remote_folder

    def size_of(file: Any) -> int:
        name = file["basename"]
        if folder is not None:
            path = folder / name
            return path.stat().st_size if path.exists() else 0  # missing, which is refused later
        url = location.uri(name)
        return request(url, "asked for its size", lambda store: store.stat(url)).num_bytes

    with ThreadPoolExecutor(STAT_THREADS) as threads:
        for file, num_bytes in zip(files, threads.map(size_of, files), strict=True):
            file["bytes"] = num_bytes


def _default_name(location: StreamLocation) -> str:
    folder = str(location.folder.absolute()) if location.remote is None else location.remote
    return Path(folder).name or folder


def _entries_digest(entries: list[Any]) -> bytes:
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _digest(content: bytes, columns: ColumnSelection, split_at: int | None) -> str:
    selected = astuple(columns) if split_at is None else (*astuple(columns), split_at)
    content += json.dumps(selected).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
