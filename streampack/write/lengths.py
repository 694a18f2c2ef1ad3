"""Length files for existing streams: the implementation of `streampack index PATH`.

::

    PATH/index.json, shards  -->  PATH/lengths.bin
    PATH/train/index.json    ...

Shards are read one at a time. Compressed ones are decompressed in memory and leave no files. The
length and the first and last token of each sample are stored. If index.json has no hashes, the
length file gets one for each shard, and later starts verify it. remote.py handles object stores.

Cost: one read of the stream, and its xxh64, 0.3 s per GB; 12 bytes of memory a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from streampack._paths import local_path
from streampack.errors import DataError
from streampack.mds.columns import Spans, find_column, sample_spans
from streampack.mds.index import INDEX_FILE, MdsIndex, Shard, ShardFile, parse_index
from streampack.mds.length_file import LENGTH_FILE, NO_TOKEN, write_length_file
from streampack.mds.regular_files import open_file
from streampack.storage.checksum import expected_hash, file_digest
from streampack.storage.decompress import decompress_shard
from streampack.storage.filesystem import LocalFilesystem, map_file
from streampack.storage.verify import as_data_error
from streampack.streams.column_selection import ColumnSelection, check_columns
from streampack.streams.shard_checks import ShardChecker
from streampack.streams.shard_pool import OpenShard
from streampack.types import ByteArray, UInt32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed:
    """One length file that was written."""

    path: Path | str
    """The length file; in a store, its URL."""
    column: str
    """The column whose values were counted."""
    num_samples: int
    num_shards: int
    num_tokens: int


def write_lengths(
    path: Path,
    tokens: str | None = None,
    tokens_dtype: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
    *,
    check_dtypes: bool = True,
) -> list[Indexed]:
    """Write a length file next to each index.json in a folder and its subfolders.

    Args:
        path: A stream's folder, or one that contains such folders.
        tokens: The token column; None: "tokens" or "input_ids".
        tokens_dtype: Type of the values if the column is stored as `bytes`.
        progress: Called with 1 after each shard.
        check_dtypes: Whether to refuse a type that the values contradict, as `Stream` does.

    Returns:
        The length files, in the order of their paths.

    Raises:
        DataError: If index.json is missing, a stream does not match its index.json, or its values
            contradict their type.
    """
    index_files = sorted(local_path(path, "path", "use write_remote_lengths").rglob(INDEX_FILE))
    if not index_files:
        raise DataError(
            f"{path}: holds no {INDEX_FILE}, nor does a subfolder; give an MDS stream: "
            "`streampack write` makes one of text, rows or token ids"
        )
    columns = ColumnSelection(tokens=tokens or "tokens", tokens_dtype=tokens_dtype)
    indexed = []
    for file in index_files:
        with as_data_error(file), open_file(file) as opened:
            text = opened.read()
        index = parse_index(text, str(file))
        shards = map(partial(_read_shard, file.parent, index.uri), index.shards)
        to = file.with_name(LENGTH_FILE)
        indexed.append(count_stream(text, index, columns, shards, to, progress, check_dtypes))
    return indexed


def count_stream(
    text: bytes,
    index: MdsIndex,
    columns: ColumnSelection,
    shards: Iterable[ByteArray],
    path: Path,
    progress: Callable[[int], None],
    checks_dtypes: bool,
) -> Indexed:
    """Write the length file of one stream, whose index.json is `text`, to `path`.

    `shards` yields its raw shards in stored order, shape (num_bytes,) each.
    """
    where = index.uri.removesuffix(f"/{INDEX_FILE}")
    lengths: list[UInt32Array] = []
    edges: list[UInt32Array] = []
    hashes: list[int] = []
    is_hashed = all(shard.raw.hashes for shard in index.shards)
    names, dtype = columns.token_names, columns.tokens_dtype
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
        lengths.append(spans.counts.astype(np.uint32))
        edges.append(edges_of(data, spans, f"{where}, shard {number}"))
        hashes += [] if is_hashed else [xxhash.xxh64_intdigest(data.data)]
        progress(1)
    name = check_columns(index, columns, where)
    counts = np.concatenate(lengths)
    write_length_file(path, text, index, name, counts, np.concatenate(edges), hashes)
    return Indexed(
        path=path,
        column=name,
        num_samples=index.num_samples,
        num_shards=len(index.shards),
        num_tokens=int(counts.sum(dtype=np.int64)),
    )


def _read_shard(folder: Path, uri: str, shard: Shard) -> ByteArray:
    path = folder / shard.raw.basename
    if path.is_file():
        if path.stat().st_size != shard.raw.num_bytes:
            raise DataError(
                f"{path}: has {path.stat().st_size} bytes, but index.json says "
                f"{shard.raw.num_bytes}; the shard was cut short or changed: write it again"
            )
        _check_hash(path, shard.raw, uri)
        return map_file(path)
    file = shard.stored
    packed = folder / file.basename
    if not packed.is_file():
        raise DataError(f"{packed}: does not exist, but index.json names it; copy the shard to it")
    _check_hash(packed, file, uri)
    return np.frombuffer(decompress_shard(packed, shard), np.uint8)


def _check_hash(path: Path, file: ShardFile, uri: str) -> None:
    """Refuse a damaged shard: hashing its bytes now would make it look undamaged later."""
    wanted = expected_hash(file, None, uri)
    found = file_digest(LocalFilesystem(), path, wanted) if wanted else ""
    if found != wanted:
        raise DataError(
            f"{path}: its hash is {found}, but index.json says {wanted}; the shard is damaged or "
            "was changed: copy or write it again"
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
