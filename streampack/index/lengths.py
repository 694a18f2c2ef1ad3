"""Length files for existing streams: the implementation of `streampack index`.

::

    PATH/index.json, shards            -->  PATH/lengths.bin
    PATH/train/index.json    ...
    s3://bucket/stream, shard by shard -->  local folder/lengths.bin -->  s3://bucket/stream

Shards are read one at a time, as training reads them, and compressed ones leave no files. The
length and the first and last token of each sample are stored. If index.json has no hashes, the
length file gets one for each shard, and later starts verify it.

Cost: one read of the stream, and its xxh64, 0.3 s per GB; 12 bytes of memory a sample.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import xxhash

from streampack._paths import folder_of, local_path, shown_path
from streampack.errors import ConfigError, DataError
from streampack.mds.columns import Spans
from streampack.mds.index import INDEX_FILE, parse_index
from streampack.mds.length_file import LENGTH_FILE, NO_TOKEN, length_file_pieces, write_length_file
from streampack.storage.cache import ShardCache
from streampack.stores.retries import request
from streampack.streams.column_selection import ColumnSelection, find_columns
from streampack.streams.mds_shards import MdsShards
from streampack.streams.sources.shards import Shards
from streampack.streams.split_rows import SPLIT_FILE, document_lengths, split_spans, with_counts
from streampack.types import ByteArray, UInt32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed:
    """One length file that was written."""

    path: Path | str
    """The length file; in a store, its URL."""
    column: str
    """The column that was counted."""
    num_samples: int
    num_shards: int
    num_tokens: int


def write_lengths(
    path: str | os.PathLike[str],
    tokens: str = "tokens",
    progress: Callable[[int], None] = lambda _: None,
    *,
    local: Path | None = None,
    check_dtypes: bool = True,
    documents: tuple[str | os.PathLike[str], int] | None = None,
) -> list[Indexed]:
    """Write a length file next to each index.json in a folder and its subfolders, or at a URL.

    Args:
        path: A stream's folder, or one that contains such folders; or the URL of one stream, in any
            store that can be read and written.
        tokens: The token column; for the default, "input_ids" is accepted too. The type of values
            that are stored as `bytes` is written with it: "tokens:uint16".
        progress: Called with 1 after each shard.
        local: Folder that keeps the shards and the length file of a URL; temporary if None.
        check_dtypes: Whether to refuse a type that the values contradict, as `Shards` does.
        documents: A folder, anywhere, and the token that ends a document: write the lengths of the
            documents in the rows of one stream there, for `Shards(split_at=...)`.

    Returns:
        The length files, in the order of their paths.

    Raises:
        ConfigError: If `local` is set for a folder, or `documents` for several streams.
        DataError: If index.json is missing, a stream does not match its index.json, its values
            contradict their type, or the store cannot be written. A finished length file is then
            kept, and the error names it.
    """
    given = {"tokens": tokens, "check_dtypes": check_dtypes}
    eos_id = split_file = None
    if documents is not None:
        out, eos_id = documents
        split_file = local_path(out, "out") / SPLIT_FILE.format(eos_id=eos_id)
        split_file.parent.mkdir(parents=True, exist_ok=True)
    index = partial(_index, given, eos_id=eos_id, progress=progress)
    folder = folder_of(shown_path(path))
    if folder is None:
        return [_index_remote(str(path), local, split_file, index)]
    if local is not None:
        raise ConfigError(
            f"local={local} is for streams in a store, and {path} is a folder; omit it",
            option="local",
        )
    index_files = sorted(local_path(folder, "path").rglob(INDEX_FILE))
    if not index_files:
        raise DataError(
            f"{path}: has no {INDEX_FILE}, nor does a subfolder; give an MDS stream: "
            "`streampack write` makes one of text, rows or token ids"
        )
    if split_file is not None and len(index_files) > 1:
        raise ConfigError(f"{path}: has {len(index_files)} streams, but out= is for one; name it")
    files = ((str(file.parent), split_file or file.with_name(LENGTH_FILE)) for file in index_files)
    return [index(source, to) for source, to in files]


def _index_remote(
    remote: str, local: Path | None, documents: Path | None, index: Callable[..., Indexed]
) -> Indexed:
    if documents is not None:
        return index(remote, documents, local)
    # First, so that a missing driver is noticed before anything is read.
    way_out = "use a store and credentials that can write"
    request(remote, "written", lambda _: None, way_out=way_out)
    with TemporaryDirectory(prefix="streampack-") as temporary:
        to = local_path(local or temporary, "local") / LENGTH_FILE
        url = f"{remote.rstrip('/')}/{LENGTH_FILE}"
        indexed = index(remote, to, local)
        _upload(to, url, is_kept=local is not None)
    return replace(indexed, path=url)


def _index(
    given: dict[str, Any],
    source: str,
    path: Path,
    local: Path | None = None,
    *,
    eos_id: int | None,
    progress: Callable[[int], None],
) -> Indexed:
    """Write the length file of one stream to `path`.

    Shards that a folder does not hold as they are read go to `local`, or one at a time to a
    temporary folder. `eos_id` ends a document inside of a row, or is None if rows are documents.
    """
    lengths: list[UInt32Array] = []
    edges: list[UInt32Array] = []
    hashes: list[int] = []
    with TemporaryDirectory(prefix="streampack-") as temporary:
        is_here = folder_of(source) is not None
        fetched = {"remote": source, "local": str(local or temporary)}
        text, shards = elsewhere = _open(**given, **({"local": source} if is_here else fetched))
        if is_here and shards.cache.needs_fetch:
            elsewhere = _open(**given, **fetched)
        index = shards.index
        is_hashed = all(shard.raw.hashes for shard in index.shards)
        for number, info in enumerate(index.shards):
            reader = shards if shards.cache.is_here(info) else elsewhere[1]
            opened = reader.read(number, reader.version(number))
            # Shards 0, 1, 2, 4, 8, ...: readers check the first that each process opens.
            if not number & (number - 1):
                reader.check_values(opened, number)
            place, spans = f"{shards.name}, shard {number}", opened.tokens
            if eos_id is not None:
                spans = split_spans(spans, document_lengths(opened.data, spans, eos_id), place)
            lengths.append(spans.counts.astype(np.uint32))
            edges.append(edges_of(opened.data, spans, place))
            hashes += [] if is_hashed else [xxhash.xxh64_intdigest(opened.data.data)]
            if reader.cache.folder.is_relative_to(temporary):
                Path(reader.version(number).path).unlink()  # the mapping stays
            progress(1)
    [name] = {columns["tokens"].name for columns in shards.columns.values()}
    counts = np.concatenate(lengths)
    index = with_counts(index, list(map(len, lengths)))
    pieces = length_file_pieces(text, index, name, counts, np.concatenate(edges), hashes)
    write_length_file(path, pieces)
    return Indexed(
        path=path,
        column=name,
        num_samples=index.num_samples,
        num_shards=len(index.shards),
        num_tokens=int(counts.sum(dtype=np.int64)),
    )


def _open(**given: Any) -> tuple[bytes, MdsShards]:
    """Return the index.json of a `Shards`, and its shards without their length file."""
    source = Shards(**given)
    cache = ShardCache(source.location())
    text = cache.metadata.index_bytes()
    index = parse_index(text, cache.location.index_uri)
    if not cache.is_remote:
        cache.check(index.shards)
    name = index.uri.removesuffix(f"/{INDEX_FILE}")
    return text, MdsShards(
        name=name,
        digest=repr(given),
        index=index,
        columns=find_columns(index, ColumnSelection.of(source), name)[0],
        cache=cache,
        length_file=None,
        checks_dtypes=source.check_dtypes,
    )


def edges_of(data: ByteArray, spans: Spans, where: str) -> UInt32Array:
    """Return the first and last token of each sample, shape (num_samples, 2)."""
    edges = spans.edges(data)
    ids = edges[spans.counts > 0]
    bad = (ids < 0) | (ids >= NO_TOKEN)
    if bad.any():
        raise DataError(
            f"{where}: token id {ids[bad][0]}, but ids must be 0 to {NO_TOKEN - 1}; "
            "name the column of the tokens"
        )
    edges[spans.counts == 0] = NO_TOKEN
    return edges.astype(np.uint32)


def _upload(file: Path, url: str, *, is_kept: bool) -> None:
    """Upload a length file; on failure keep it, so that the stream need not be reread."""
    data = file.read_bytes()
    try:
        request(url, "written", lambda store: store.write(url, data), num_bytes=len(data))
    except DataError as error:
        if not is_kept:
            file = Path(shutil.move(file, tempfile.mkdtemp(prefix="streampack-lengths-")))
        raise DataError(
            f"{error}; the length file is in {file}: copy it next to index.json, or into the "
            "folder that a Stream has as local=",
            uri=url,
        ) from error
