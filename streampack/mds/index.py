"""Parser and validator of an MDS stream's index.json.

::

    {"version": 2, "shards": [{"format": "mds", "samples": 812, "compression": "zstd",
      "column_names": ["tokens"], "column_encodings": ["ndarray:int32"], "column_sizes": [null],
      "raw_data": {"basename": "shard.00000.mds", "bytes": 67108001, "hashes": {}},
      "zip_data": {"basename": "shard.00000.mds.zstd", ...}}, ...]}

Names must stay inside the stream's folder, and counts must fit the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from streampack.errors import DataError
from streampack.mds.codecs import CODECS, COMPRESSIONS, HASHES
from streampack.mds.litdata import LITDATA, LITDATA_BARE, entries_of
from streampack.types import Int64Array

INDEX_FILE = "index.json"
LAYOUT_FIELDS = ("version", "format", "column_names", "column_encodings", "column_sizes")
NO_HASHES: Mapping[str, str] = {}
MAX_SHARD_BYTES = 2**32 - 1  # offsets in a shard are uint32
ALLOWED: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("version", (2,)),
    ("format", ("mds", LITDATA, LITDATA_BARE)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """One file of a shard: the raw one, or its compressed form."""

    basename: str
    """Its path under the stream's folder, with `/`, never outside of it."""
    num_bytes: int
    hashes: Mapping[str, str]
    hashes_from: str = "index.json"
    """The file that states the hashes, for messages."""
    make: Callable[[Path], None] | None = None
    """Makes the file at a path, if it is made here of other data. It may state its own hash then,
    `num_bytes` is what is reserved for it, and `basename` says all that its bytes depend on."""

    def has_size(self, num_bytes: int) -> bool:
        """Return whether the file may have this size."""
        return self.make is not None or num_bytes == self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The columns of a shard, in stored order."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    """MDS encodings, e.g. "ndarray:int32"."""
    sizes: tuple[int | None, ...]
    """Bytes of one value; None if each value states its own size."""
    format: str = "mds"
    """"mds", or one of litData's."""

    fixed_bytes: int = field(init=False)
    """Bytes that every sample has: the sizes and the columns of fixed size."""

    def __post_init__(self) -> None:
        fixed_bytes = 4 * self.num_variable + sum(size or 0 for size in self.sizes)
        object.__setattr__(self, "fixed_bytes", fixed_bytes)

    @property
    def num_variable(self) -> int:
        """Number of columns that state the size of each value, in 4 bytes at the sample's start."""
        return self.sizes.count(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One shard's entry in index.json."""

    num_samples: int
    raw: ShardFile
    packed: ShardFile | None = None
    compression: str | None = None
    layout: Layout = Layout(names=(), encodings=(), sizes=())
    stored: ShardFile = field(init=False)
    """The file that a store contains: the compressed one, else the raw one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stored", self.packed or self.raw)

    @property
    def files(self) -> tuple[ShardFile, ...]:
        return (self.raw,) if self.packed is None else (self.raw, self.packed)

    @property
    def is_hashed(self) -> bool:
        """Whether a known hash verifies the stored file, or the file unpacked from it."""
        return not HASHES.keys().isdisjoint((*self.stored.hashes, *self.raw.hashes))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MdsIndex:
    """A stream's validated index.json."""

    uri: str
    shards: tuple[Shard, ...]
    first_sample: Int64Array = field(init=False)
    """The first sample of each shard, and one past the last; shape (num_shards + 1,)."""
    raw_bytes: Int64Array = field(init=False)
    """Decompressed bytes of each shard, shape (num_shards,)."""
    stored_bytes: Int64Array = field(init=False)
    """Bytes of each shard's compressed file, 0 without one; shape (num_shards,)."""

    def __post_init__(self) -> None:
        counts = [0, *(shard.num_samples for shard in self.shards)]
        sizes = [shard.raw.num_bytes for shard in self.shards]
        packed = [shard.packed.num_bytes if shard.packed else 0 for shard in self.shards]
        object.__setattr__(self, "first_sample", np.cumsum(counts, dtype=np.int64))
        object.__setattr__(self, "raw_bytes", np.array(sizes, np.int64))
        object.__setattr__(self, "stored_bytes", np.array(packed, np.int64))

    @property
    def num_samples(self) -> int:
        return int(self.first_sample[-1])

    def take(self, numbers: Int64Array) -> MdsIndex:
        """Return the index of these shards alone, shape (n,); at least one."""
        return replace(self, shards=tuple(self.shards[n] for n in numbers.tolist()))

    def with_hashes(self, algorithm: str, hashes: Sequence[str], source: str) -> MdsIndex:
        """Return a copy with a hash, in hex, for each raw shard that has none.

        `source` is the file that states them, for messages.
        """
        shards = list(self.shards)
        for number, digest in enumerate(hashes):
            raw = shards[number].raw
            if not raw.hashes:
                raw = replace(raw, hashes={algorithm: digest}, hashes_from=source)
                shards[number] = replace(shards[number], raw=raw)
        return replace(self, shards=tuple(shards))


def parse_index(text: bytes, uri: str) -> MdsIndex:
    """Parse and validate an index.json.

    A DataError names `uri` and the field: it is not JSON, has another version or format, or has
    invalid names, counts or sizes.
    """
    known: dict[str, Layout] = {}

    def converted(value: dict[str, Any]) -> Any:
        # The dicts of all entries would take a kilobyte each, and Python's garbage collector more
        # time than parsing them.
        if "raw_data" in value:
            with suppress(DataError):  # index_of raises it, with the number of the entry
                return _parse_shard(value, "", known)
        return value

    return index_of(parse_entries(text, uri, converted), uri)


def parse_entries(
    text: bytes, uri: str, converted: Callable[[dict[str, Any]], Any] | None = None
) -> list[Any]:
    """Return the entries of shards in an index.json, as they are written; errors as above.

    `converted` returns what takes the place of each JSON object.
    """
    try:
        document = json.loads(text, object_hook=converted)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{uri}: {len(text)} bytes that are not JSON ({error}); "
            "if it is a cached copy, delete it, else rewrite the stream"
        ) from error
    is_object = isinstance(document, dict)
    _check(is_object, f"{uri}: holds", document, "an index.json is an object; rewrite it")
    if {"chunks", "config"} <= document.keys():
        return entries_of(document, uri)
    version, entries = document.get("version"), document.get("shards")
    way_out = "only MDS version 2 is known; rewrite the stream"
    _check(version == 2, f"{uri}: version is", version, way_out)
    way_out = "a stream needs 1 or more; finish writing it, or remove it from the mix"
    _check(isinstance(entries, list) and entries, f"{uri}: shards is", entries, way_out)
    return list(entries)


def index_of(entries: list[Any], uri: str) -> MdsIndex:
    """Validate the entries of shards, of which some may be shards already; errors as above."""
    known: dict[str, Layout] = {}
    shards = tuple(
        entry if isinstance(entry, Shard) else _parse_shard(entry, f"{uri}: shards.{i}", known)
        for i, entry in enumerate(entries)
    )
    _refuse_shared_files(shards, uri)
    if not any(shard.num_samples for shard in shards):
        raise DataError(
            f"{uri}: the stream is empty: its {len(shards)} shards hold 0 samples; "
            "write samples to it, or remove it from the mix"
        )
    return MdsIndex(uri=uri, shards=shards)


def _check(is_right: object, where: str, value: object, must: str) -> None:
    if not is_right:
        raise _refusal(where, value, must)


def _refusal(where: str, value: object, must: str) -> DataError:
    text = repr(value)
    return DataError(f"{where} {text if len(text) <= 60 else f'{text[:57]}...'}, but {must}")


def _parse_shard(entry: Any, where: str, known: dict[str, Layout]) -> Shard:
    # Messages are built if they are raised: an index may have hundreds of thousands of shards.
    if not isinstance(entry, dict):
        raise _refusal(f"{where} is", entry, "must be an object")
    described = repr([*map(entry.get, LAYOUT_FIELDS)])
    if described not in known:  # shards of a stream have the same columns
        known[described] = _parse_layout(entry, where)
    layout = known[described]
    raw = _parse_file(entry, "raw_data", where)
    packed = compression = None
    if entry.get("zip_data") is not None:
        packed = _parse_file(entry, "zip_data", where)
        compression = entry.get("compression")
        is_known = isinstance(compression, str) and compression in COMPRESSIONS
        must = (
            f"a shard with zip_data is compressed with one of {', '.join(CODECS)}; write the "
            "stream again"
        )
        _check(is_known, f"{where}.compression is", compression, must)
    num_samples = _parse_size(entry, "samples", where)
    # A shard contains its sample count, its offsets, and the fixed bytes of each sample.
    least = 8 + num_samples * (4 + layout.fixed_bytes * (layout.format != LITDATA_BARE))
    if raw.num_bytes < least:
        raise DataError(
            f"{where}.samples is {num_samples}, which takes {least} bytes or more, but "
            f"raw_data.bytes is {raw.num_bytes}; write index.json again"
        )
    return Shard(
        num_samples=num_samples,
        raw=raw,
        packed=packed,
        compression=compression,
        layout=layout,
    )


def _parse_size(entry: Mapping[str, Any], key: str, where: str) -> int:
    value = entry.get(key)
    if type(value) is not int or not 0 <= value <= MAX_SHARD_BYTES:
        must = f"must be an integer from 0 to {MAX_SHARD_BYTES}, the largest offset in a shard"
        raise _refusal(f"{where}.{key} is", value, must)
    return value


def _parse_file(shard: Mapping[str, Any], key: str, of: str) -> ShardFile:
    entry, where = shard.get(key), f"{of}.{key}"
    if not isinstance(entry, dict):
        raise _refusal(f"{where} is", entry, "must hold basename, bytes and hashes")
    basename, hashes = entry.get("basename"), entry.get("hashes") or NO_HASHES
    if not isinstance(basename, str) or not _stays_inside(basename):
        must = "must name a file inside the folder of the stream"
        raise _refusal(f"{where}.basename is", basename, must)
    if not isinstance(hashes, dict) or not all(isinstance(v, str) for v in hashes.values()):
        raise _refusal(f"{where}.hashes is", hashes, "must map algorithms to hex digests")
    num_bytes = _parse_size(entry, "bytes", where)
    return ShardFile(basename=basename, num_bytes=num_bytes, hashes=hashes)


def _stays_inside(basename: str) -> bool:
    # Subfolders are allowed: MosaicML's merge_index writes "00003/shard.00000.mds".
    if not basename.isprintable() or "\\" in basename or ":" in basename:
        return False
    # No part is empty, or begins with a dot.
    return "//" not in f"/{basename}/".replace("/.", "//")


def _refuse_shared_files(shards: Sequence[Shard], uri: str) -> None:
    names: set[str] = set()
    for number, shard in enumerate(shards):
        for file in shard.files:
            # Case is folded, because some file systems ignore it.
            name = file.basename.casefold()
            if name in names:
                raise DataError(
                    f"{uri}: shards.{number}: basename {file.basename!r} is used twice; "
                    "give every shard a file of its own"
                )
            names.add(name)


def _parse_layout(entry: dict[str, Any], where: str) -> Layout:
    for key, allowed in ALLOWED:
        if (value := entry.get(key)) not in allowed:
            must = f"must be {allowed[0]!r}; only MDS streams can be read"
            raise _refusal(f"{where}.{key} is", value, must)
    fields = [entry.get(f"column_{field}") for field in ("names", "encodings", "sizes")]
    three = f"{where}: column_names, column_encodings and column_sizes are"
    are_lists = all(isinstance(field, list) for field in fields)
    _check(are_lists, three, fields, "must be lists; rewrite the stream")
    names, encodings, sizes = (tuple(field or ()) for field in fields)
    texts = all(isinstance(text, str) for text in names + encodings)
    positive = all(size is None or (type(size) is int and size > 0) for size in sizes)
    are_alike = texts and positive and len(names) == len(encodings) == len(sizes) > 0
    must = "do not match, or hold other values than names and sizes; rewrite the stream"
    _check(are_alike, three, fields, must)
    return Layout(names=names, encodings=encodings, sizes=sizes, format=entry["format"])
