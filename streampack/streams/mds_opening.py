"""Open shards with an index.json: its entries, the length file and the columns."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from streampack._paths import absolute_path
from streampack.mds.index import MdsIndex, index_of, parse_entries
from streampack.mds.length_file import LENGTH_FILE, LengthFile, index_digest, open_length_file
from streampack.mds.litdata import LITDATA, LITDATA_BARE
from streampack.storage.cache import ShardCache
from streampack.storage.location import StreamLocation
from streampack.storage.verify import attach_uri
from streampack.stores.retries import request
from streampack.streams.column_selection import ColumnSelection, find_columns, warn_unused_columns
from streampack.streams.mds_shards import MdsShards
from streampack.streams.parts import Numbering, chosen_shards, digest_text
from streampack.streams.split_rows import open_split
from streampack.streams.token_stream import Opening, TokenStream

STAT_THREADS = 16


def open_mds(source: Any, location: StreamLocation, opening: Opening) -> TokenStream:
    """Open the shards of a `Shards` at a location.

    Raises:
        DataError: If index.json, the length file or a local file is invalid, or a column missing.
    """
    columns = ColumnSelection.of(source)
    cache = ShardCache(location, opening.disk, opening.store)
    name = opening.stream.name or _default_name(location)
    with attach_uri(location.index_uri):
        text = cache.metadata.index_bytes()
        entries = parse_entries(text, location.index_uri)
        _add_stored_sizes(entries, location)
        index = index_of(entries, location.index_uri)
        found, column = find_columns(index, columns, name)
        rows: MdsIndex | None = None
        split_at = source.split_at
        if split_at is None:
            index, length_file = _with_lengths(cache, text, index, column)
        else:
            rows, (index, length_file) = index, open_split(source, text, index)
        cache.check(index.shards)
        numbering = Numbering.of_stream(index.first_sample)
        held = opening.stream.held_out
        numbers, part = chosen_shards(held, numbering, name, source.only)
        if is_part := held is not None or source.only is not None:
            index, entries = index.take(numbers), [entries[n] for n in numbers.tolist()]
            rows = rows and rows.take(numbers)
            length_file = None if length_file is None else length_file.take(numbers)
    if opening.has_targets:
        warn_unused_columns(found, columns, name, column)
    own_digest = _digest(_entries_digest(entries) + digest_text(part), columns, split_at)
    digest = own_digest if is_part else _digest(index_digest(text), columns, split_at)
    shards = MdsShards(
        name=name,
        digest=digest,
        index=index,
        rows=rows,
        columns=found,
        cache=cache,
        length_file=length_file,
        checks_dtypes=source.check_dtypes,
    )
    return TokenStream.of(
        opening,
        name,
        shards,
        part,
        columns=columns,
        split_at=split_at,
        digest=digest,
        entries_digest=own_digest,
        is_part=is_part,
    )


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
    folder = absolute_path(location.folder) if location.remote is None else location.remote
    return Path(folder).name or folder


def _entries_digest(entries: list[Any]) -> bytes:
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _digest(content: bytes, columns: ColumnSelection, split_at: int | None) -> str:
    selected = astuple(columns) if split_at is None else (*astuple(columns), split_at)
    content += json.dumps(selected).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
