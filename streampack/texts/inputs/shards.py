"""Texts in shards of MDS and litData, which their index.json lists.

::

    folder/index.json --> a slice of each shard, with its hash as the version
    shard             --> fetched whole, verified, unpacked --> rows, by the shard's own header

A slice has all that its reader needs: a chunk of litData states no columns, so the slice's version
does.

Cost: a request for each shard, and the memory of one, unpacked.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from streampack._paths import is_url, real_path
from streampack.errors import ConfigError, DamagedInputError, DataError
from streampack.mds.codecs import CODECS, HASHES
from streampack.mds.columns import plain_value, sample_offsets, sample_values
from streampack.mds.index import INDEX_FILE, Layout, Shard, ShardFile, parse_index
from streampack.mds.length_file import index_digest
from streampack.storage.decompress import decompress_pieces
from streampack.stores.objects import StoredObject
from streampack.stores.retries import request
from streampack.texts.inputs.lines import ALL, MAX_BATCH_BYTES
from streampack.texts.inputs.slices import WHOLE, InputSlice, RowBatch
from streampack.texts.inputs.sources import WAY_OUT, Listing, file_version
from streampack.texts.inputs.tables import columns_to_read, read_arrow
from streampack.texts.inputs.values import BadValueError, RowSelection

ENDINGS = (".mds", ".bin", *(f".{kind}.{family}" for kind in ("mds", "bin") for family in CODECS))
PACKED = re.compile(rf"\.mds\.({'|'.join(CODECS)})$|\.({'|'.join(CODECS)})(?::\d+)?\.bin$")
ARROW_ROWS = b"LDARW01\0"  # ends a chunk of litData that has its rows as Arrow IPC
FILE_VERSION = re.compile(r"size:\d+,mtime_ns:\d+")  # of an index.json of this machine
RAW = "raw:"  # before a hash of the unpacked shard
RAW_BYTES = ",raw_bytes:"


def index_of_shards(listing: Listing) -> StoredObject | None:
    """Return the index.json of a folder of shards; None if a listing is of another kind."""
    path = f"{(listing.folder or '').rstrip('/')}/{INDEX_FILE}"
    has_shards = any(file.url.endswith(ENDINGS) for file in listing.files)
    return next((file for file in listing.files if has_shards and file.url == path), None)


def folder_of_shards(path: str) -> Listing | None:
    """Return the index.json and one shard of a folder of this machine; None of another one.

    A `stat` of each of 200,000 shards would take longer than reading the index that names them.
    """
    names = os.listdir(path) if os.path.isdir(path) else []
    one = next((name for name in names if name.endswith(ENDINGS)), None)
    if one is None or INDEX_FILE not in names:
        return None
    folder = path.rstrip("/")
    index = os.stat(f"{folder}/{INDEX_FILE}")
    found = StoredObject(f"{folder}/{INDEX_FILE}", file_version(index), index.st_size)
    return Listing(path, [found, StoredObject(f"{folder}/{one}", "", 0)])


def shard_slices(found: StoredObject) -> list[InputSlice]:
    """Return the slices of the shards that an index.json lists, in its order.

    Raises:
        DataError: If it cannot be read.
    """
    text = _read(found.url, found.num_bytes)
    index = parse_index(text, found.url)
    # Without hashes, an equal index may replace this one for other shards.
    version = f"{index_digest(text).hex()[:8]} {found.version}"
    folder = found.url.removesuffix(INDEX_FILE)
    folder = folder if is_url(folder) else f"{real_path(folder)}/"
    return [
        InputSlice(
            f"{folder}{shard.stored.basename}",
            f"{_version_of(shard, version)}{RAW_BYTES}{shard.raw.num_bytes}",
            "mds",
            None,
            0,
            shard.num_samples,
            shard.stored.num_bytes,
        )
        for shard in index.shards
    ]


def _version_of(shard: Shard, index: str) -> str:
    for file, mark in ((shard.stored, ""), (shard.raw, RAW)):
        for name in filter(HASHES.__contains__, sorted(file.hashes)):
            return f"{mark}{name}:{file.hashes[name]}"
    if shard.layout.format == "mds":
        return f"index:{index}"
    return json.dumps([shard.layout.names, shard.layout.encodings, shard.layout.format, index])


def raw_bytes_of(slice_: InputSlice) -> int:
    """Return the bytes of a shard, unpacked."""
    return int(slice_.version.rpartition(RAW_BYTES)[2])


def is_compressed_shard(slice_: InputSlice) -> bool:
    """Return whether a shard is unpacked before its rows are read."""
    return PACKED.search(slice_.uri) is not None


def unpacked(slice_: InputSlice, path: Path) -> InputSlice:
    """Return the slice of a shard whose verified and unpacked bytes are in a file."""
    size = path.stat().st_size
    columns = FILE_VERSION.sub("", slice_.version.rpartition(RAW_BYTES)[0])
    version = f"{columns if columns.startswith('[') else ''}{RAW_BYTES}{size}"
    return replace(slice_, uri=str(path), version=version, num_bytes=size)


def shard_contents(slice_: InputSlice) -> bytes:
    """Fetch, verify and unpack a shard.

    Raises:
        DataError: If it cannot be read, or is not the one that index.json lists.
    """
    data, found = _read(slice_.uri, slice_.num_bytes), PACKED.search(slice_.uri)
    _raise_if_rewritten(slice_)
    # Of a compressed chunk, litData states the bytes unpacked.
    if len(data) != slice_.num_bytes and (found is None or found[1]):
        raise DamagedInputError(
            f"{slice_.uri}: has {len(data)} bytes, but index.json says {slice_.num_bytes}; copy "
            "both again",
            uri=slice_.uri,
        )
    _verify(data, slice_, is_raw=False)
    if found is not None:
        raw = ShardFile(basename="", num_bytes=raw_bytes_of(slice_), hashes={})
        shard = Shard(num_samples=slice_.stop, raw=raw, compression=found[1] or found[2])
        try:
            pieces = decompress_pieces(io.BytesIO(data), slice_.uri, shard)
            data = b"".join(map(bytes, pieces))
        except DataError as error:
            if isinstance(error.__cause__, ConfigError):  # a library that is not installed
                raise
            raise DamagedInputError(str(error), uri=slice_.uri) from error
    _verify(data, slice_, is_raw=True)
    return data


def _raise_if_rewritten(slice_: InputSlice) -> None:
    """Refuse a local shard without a hash whose index.json is another one than was listed."""
    if is_url(slice_.uri) or not (stated := FILE_VERSION.search(slice_.version)):
        return
    # A merged index is above the folders of its shards.
    places = (folder / INDEX_FILE for folder in Path(slice_.uri).parents)
    found = filter(Path.exists, places)
    if stated[0] not in (file_version(path.stat()) for path in found):
        raise DataError(
            f"{slice_.uri}: its {INDEX_FILE} has changed since it was listed, and without hashes "
            "other shards cannot be told from those; run the same command again when no process "
            "writes to them",
            uri=slice_.uri,
        )


def _verify(data: bytes, slice_: InputSlice, *, is_raw: bool) -> None:
    version = slice_.version.rpartition(RAW_BYTES)[0]
    name, _, stated = version.removeprefix(RAW).partition(":")
    if name in HASHES and slice_.version.startswith(RAW) == is_raw:
        found = HASHES[name](data).hexdigest()
        if found != stated:
            raise _damaged(slice_, f"its {name} is {found}, but index.json says {stated}")


def _damaged(slice_: InputSlice, problem: str) -> DamagedInputError:
    return DamagedInputError(f"{slice_.uri}: {problem}; make a new copy", uri=slice_.uri)


def read_mds(
    file: BinaryIO,
    slice_: InputSlice,
    wanted: RowSelection,
    batch_rows: int,
    taken: range = ALL,
) -> Iterator[RowBatch]:
    """Yield the rows of a shard, from `shard_contents`; columns of arrays are bytes."""
    contents = file.read()
    if contents.endswith(ARROW_ROWS):
        end = len(contents) - 4 - len(ARROW_ROWS)
        begin = end - int.from_bytes(contents[end : end + 4], "little")
        rows_of_arrow = replace(slice_, start=0, stop=WHOLE)
        arrow = io.BytesIO(contents[begin:end])
        yield from read_arrow(arrow, rows_of_arrow, wanted, batch_rows, taken)
        return
    data = np.frombuffer(contents, np.uint8)
    layout, num_rows = _head_of(data, slice_)
    offsets = sample_offsets(data, num_rows, slice_.uri)
    names = columns_to_read(layout.names, wanted) or ()
    batch, num_bytes = RowBatch.of(wanted), 0
    for number in range(num_rows)[taken.start : taken.stop]:
        size = int(offsets[number + 1] - offsets[number])
        num_bytes += size
        try:
            values = list(sample_values(data, number, layout))
            if 4 * layout.num_variable + sum(len(value) for *_, value in values) != size:
                problem = f"row {number} has {size} bytes, which its columns do not add up to"
                raise _damaged(slice_, problem)
            batch.add(wanted, number, _row_of(values, names))
        except BadValueError as error:
            batch.refuse(slice_.uri, number, error)
        if batch.num_rows >= batch_rows or num_bytes >= MAX_BATCH_BYTES:
            yield batch
            batch, num_bytes = RowBatch.of(wanted), 0
    if batch.num_rows:
        yield batch


def _head_of(data: Any, slice_: InputSlice) -> tuple[Layout, int]:
    """Return the columns and the number of rows of a shard."""
    try:
        num_rows = int(data[:4].view(np.uint32)[0])
        if slice_.version.startswith("["):
            names, encodings, kind, _ = json.loads(slice_.version.rpartition(RAW_BYTES)[0])
            sizes = [None] * len(names)
        else:
            begin = 8 + 4 * num_rows
            end = int(data[4:8].view(np.uint32)[0])
            config, kind = json.loads(data[begin:end].tobytes()), "mds"
            names, encodings, sizes = (
                config[f"column_{field}"] for field in ("names", "encodings", "sizes")
            )
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise _damaged(slice_, f"its head does not state its columns ({error})") from error
    return Layout(
        names=tuple(names), encodings=tuple(encodings), sizes=tuple(sizes), format=kind
    ), num_rows


def _row_of(values: list[tuple[str, str, bytes]], names: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, encoding, value in values:
        try:
            row[name] = plain_value(encoding, value) if name in names else None
        except UnicodeDecodeError as error:
            raise BadValueError(
                f"column {name!r} is not valid UTF-8 at its byte {error.start}"
            ) from error
        except ValueError as error:
            raise BadValueError(f"column {name!r} is not {encoding} ({error})") from error
    return row


def _read(uri: str, num_bytes: int) -> bytes:
    if is_url(uri):
        return request(
            uri, "read", lambda store: store.read(uri), way_out=WAY_OUT, num_bytes=num_bytes
        )
    try:
        return Path(uri).read_bytes()
    except OSError as error:
        raise DataError(
            f"{uri}: cannot be read ({error.strerror}); put it back, or name the inputs again",
            uri=uri,
        ) from error
