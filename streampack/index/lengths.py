"""Length files for existing streams: the implementation of `streampack index`.

::

    PATH/index.json, shards            -->  PATH/lengths.bin
    PATH/train/index.json    ...
    s3://bucket/stream, shard by shard -->  local folder/lengths.bin -->  s3://bucket/stream

Shards are read one at a time. Compressed ones are decompressed in memory and leave no files. The
length and the first and last token of each sample are stored. If index.json has no hashes, the
length file gets one for each shard, and later starts verify it.

Cost: one read of the stream, and its xxh64, 0.3 s per GB; 12 bytes of memory a sample.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from streampack._paths import folder_of, local_path, shown_path
from streampack.errors import ConfigError, DataError
from streampack.mds.columns import Spans, find_column, sample_spans, token_names
from streampack.mds.index import INDEX_FILE, MdsIndex, Shard, parse_index
from streampack.mds.length_file import LENGTH_FILE, NO_TOKEN, length_file_pieces, write_length_file
from streampack.mds.regular_files import open_file
from streampack.storage.cache import ShardCache
from streampack.storage.decompress import decompress_shard
from streampack.storage.download import SLOWEST_BYTES_PER_S
from streampack.storage.filesystem import LocalFilesystem, map_file
from streampack.storage.location import StreamLocation
from streampack.storage.verify import FileVerifier, as_data_error
from streampack.stores.retries import ATTEMPT_S, request
from streampack.streams import Stream
from streampack.streams.column_selection import ColumnSelection, check_columns
from streampack.streams.shard_checks import ShardChecker
from streampack.streams.shard_pool import OpenShard
from streampack.streams.split_rows import (
    SPLIT_FILE,
    document_lengths,
    split_spans,
    with_counts,
)
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
    tokens_dtype: str | None = None,
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
        tokens: The token column; for the default, "input_ids" is accepted too.
        tokens_dtype: Type of the values if the column is stored as `bytes`.
        progress: Called with 1 after each shard.
        local: Folder that keeps the shards and the length file of a URL; temporary if None.
        check_dtypes: Whether to refuse a type that the values contradict, as `Stream` does.
        documents: A folder, anywhere, and the token that ends a document: write the lengths of the
            documents in the rows of one stream there, for `Stream(split_at=...)`.

    Returns:
        The length files, in the order of their paths.

    Raises:
        ConfigError: If `local` is set for a folder, or `documents` for several streams.
        DataError: If index.json is missing, a stream does not match its index.json, its values
            contradict their type, or the store cannot be written. A finished length file is then
            kept, and the error names it.
    """
    out, eos_id = documents or (None, None)
    count = partial(
        _count,
        columns=ColumnSelection(tokens=tokens, tokens_dtype=tokens_dtype),
        checks_dtypes=check_dtypes,
        eos_id=eos_id,
    )
    split_file = None
    if out is not None:
        split_file = local_path(out, "out") / SPLIT_FILE.format(eos_id=eos_id)
    if split_file is not None:
        split_file.parent.mkdir(parents=True, exist_ok=True)
    found = folder_of(shown_path(path))
    if found is None:
        return [_index_remote(str(path), local, count, split_file, progress)]
    if local is not None:
        raise ConfigError(
            f"local={local} is for streams in a store, and {path} is a folder; omit it",
            option="local",
        )
    return _index_folder(local_path(found, "path"), path, count, split_file, progress)


def _index_folder(
    folder: Path,
    path: str | os.PathLike[str],
    count: Callable[..., Indexed],
    documents: Path | None,
    progress: Callable[[int], None],
) -> list[Indexed]:
    index_files = sorted(folder.rglob(INDEX_FILE))
    if not index_files:
        raise DataError(
            f"{path}: holds no {INDEX_FILE}, nor does a subfolder; give an MDS stream: "
            "`streampack write` makes one of text, rows or token ids"
        )
    if documents is not None and len(index_files) > 1:
        raise ConfigError(f"{path}: has {len(index_files)} streams, but out= is for one; name it")
    indexed = []
    for file in index_files:
        with as_data_error(file), open_file(file) as opened:
            text = opened.read()
        index = parse_index(text, str(file))
        location = StreamLocation.of(Stream(local=str(file.parent)))
        verifier = FileVerifier(location, LocalFilesystem())
        shards = _each(index, partial(_read_shard, verifier, file.parent), progress)
        indexed.append(count(text, index, shards, documents or file.with_name(LENGTH_FILE)))
    return indexed


def _each(
    index: MdsIndex, read: Callable[[Shard], ByteArray], progress: Callable[[int], None]
) -> Iterator[ByteArray]:
    for shard in index.shards:
        yield read(shard)
        progress(1)


def _index_remote(
    remote: str,
    local: Path | None,
    count: Callable[..., Indexed],
    documents: Path | None,
    progress: Callable[[int], None],
) -> Indexed:
    with ExitStack() as stack:
        if documents is None:
            # First, so that a missing driver is noticed before anything is read.
            way_out = "use a store and credentials that can write"
            request(remote, "written", lambda _: None, way_out=way_out)
        folder = local_path(
            local or stack.enter_context(tempfile.TemporaryDirectory(prefix="streampack-")), "local"
        )
        cache = ShardCache(StreamLocation.of(Stream(remote=remote, local=str(folder))))
        text = cache.metadata.index_bytes()
        index = parse_index(text, cache.location.index_uri)
        cache.check(index)

        def fetched(shard: Shard) -> ByteArray:
            path = Path(cache.file(shard).path)
            data = map_file(path)
            if local is None:
                path.unlink()  # the mapping stays
            return data

        shards = _each(index, fetched, progress)
        if documents is not None:
            return count(text, index, shards, documents)
        to, url = folder / LENGTH_FILE, f"{remote.rstrip('/')}/{LENGTH_FILE}"
        indexed = count(text, index, shards, to)
        _upload(to, url, is_kept=local is not None)
    return replace(indexed, path=url)


def _count(
    text: bytes,
    index: MdsIndex,
    shards: Iterable[ByteArray],
    path: Path,
    *,
    columns: ColumnSelection,
    checks_dtypes: bool,
    eos_id: int | None,
) -> Indexed:
    """Write the length file of one stream, with the index.json `text`, to `path`.

    `shards` yields its raw shards in stored order, shape (num_bytes,) each. `eos_id` ends a
    document inside of a row, or is None if rows are documents.
    """
    where = index.uri.removesuffix(f"/{INDEX_FILE}")
    lengths: list[UInt32Array] = []
    edges: list[UInt32Array] = []
    hashes: list[int] = []
    is_hashed = all(shard.raw.hashes for shard in index.shards)
    names, dtype = token_names(columns.tokens), columns.tokens_dtype
    for number, (shard, data) in enumerate(zip(index.shards, shards, strict=True)):
        place = f"{where}, shard {number} ({shard.raw.basename})"
        column = find_column(shard.layout, names, dtype, place, "tokens")
        spans = sample_spans(data, shard.num_samples, shard.layout, column, place)
        # Shards 0, 1, 2, 4, 8, ...: readers check the first that each process opens.
        if checks_dtypes and not number & (number - 1):
            opened = OpenShard(
                key=None, uri=place, data=data, tokens=spans, labels=None, loss_mask=None
            )
            checker = ShardChecker(
                stream_name=where,
                columns={"tokens": column},
                first_sample=int(index.first_sample[number]),
            )
            checker.check_dtypes(opened)
            checker.check_padding(opened, shard)
        if eos_id is not None:
            spans = split_spans(spans, document_lengths(data, spans, eos_id), place)
        lengths.append(spans.counts.astype(np.uint32))
        edges.append(edges_of(data, spans, f"{where}, shard {number}"))
        hashes += [] if is_hashed else [xxhash.xxh64_intdigest(data.data)]
    name = check_columns(index, columns, where)
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


def _read_shard(verifier: FileVerifier, folder: Path, shard: Shard) -> ByteArray:
    # Verified, as hashing damaged bytes now would make them look undamaged later.
    path = folder / shard.raw.basename
    if path.is_file():
        verifier.raise_if_damaged(path, shard.raw)
        return map_file(path)
    packed = folder / shard.stored.basename
    verifier.raise_if_damaged(packed, shard.stored)
    return np.frombuffer(decompress_shard(packed, shard), np.uint8)


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
    limit_s = ATTEMPT_S + len(data) / SLOWEST_BYTES_PER_S
    try:
        request(url, "written", lambda store: store.write(url, data), attempt_s=limit_s)
    except DataError as error:
        if not is_kept:
            file = Path(shutil.move(file, tempfile.mkdtemp(prefix="streampack-lengths-")))
        raise DataError(
            f"{error}; the length file is in {file}: copy it next to index.json, or into the "
            "folder that a Stream has as local=",
            uri=url,
        ) from error
