"""Encoder of MDS shards, in memory: the bytes that MosaicML's MDSWriter would write.

::

    samples --add--> | header | offsets | config | sample 0 | sample 1 | ...   up to size_limit
            <------- EncodedShard: name, bytes (compressed), entry of index.json

A shard is a function of its samples and of the encoder's arguments. The format is that of
`MDSWriter` in mosaicml-streaming 0.13 (streaming/base/format/mds/writer.py); columns are sorted by
name. Three things differ from it: zstd frames carry a checksum, gzip has no time stamp, and a first
sample above the size limit leaves no empty shard before it.

Cost: about 2 us a sample and column, plus compression; the memory of two raw shards.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from streampack._checks import parse_bytes
from streampack.errors import ConfigError, suggest
from streampack.mds.codecs import CODECS, COMPRESSIONS, HASHES, compress
from streampack.mds.columns import DYNAMIC_DTYPES
from streampack.mds.index import MAX_SHARD_BYTES

_T = TypeVar("_T")
Encode = Callable[[Any], bytes]

NUMBERS = tuple(DYNAMIC_DTYPES.values())
ARRAYS = {f"ndarray:{dtype}": dtype for dtype in NUMBERS}
# A shape begins with its number of axes and the code of its integer type, in one byte.
SHAPE_TYPES = ((1 << 8, "B", 0), (1 << 16, "H", 1), (1 << 32, "I", 2), (1 << 64, "Q", 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """Columns and options of shards; a ConfigError refuses unknown and impossible ones.

    >>> ShardLayout(columns={"tokens": "ndarray:uint16"}, size_limit="1mb").max_bytes
    1048576
    """

    columns: Mapping[str, str]
    """MDS encodings by column name: str, bytes, int, json, a numpy type, or ndarray:dtype."""
    compression: str | None = None
    """MosaicML's name of a compression, such as "zstd:7", or None for raw shards."""
    hashes: Sequence[str] = ()
    """Hash algorithms of each file, in index.json."""
    size_limit: int | str | None = 1 << 26
    """Bytes of a raw shard, or None for one shard."""

    def __post_init__(self) -> None:
        if self.compression and self.compression not in COMPRESSIONS:
            raise ConfigError(
                f"compression={self.compression!r} is not one of {'|'.join(CODECS)}, alone or "
                f"with a level that it has, as zstd:7{suggest(self.compression, CODECS)}; None "
                "(on the command line: none) writes raw shards"
            )
        for name in self.hashes:
            if name not in HASHES:
                raise ConfigError(
                    f"hashes: {name!r} is not one of {'|'.join(sorted(HASHES))}"
                    f"{suggest(name, HASHES)}"
                )
        for encoding in self.columns.values():
            encoder_of(encoding)
        head_bytes = 8 + len(self.config)
        if self.max_bytes is not None and self.max_bytes <= head_bytes:
            raise ConfigError(
                f"size_limit={self.size_limit!r} (bytes) leaves no room for a sample after a "
                f"shard's header of {head_bytes} bytes: each would get its own shard; set a size "
                "such as '64mb'"
            )

    @property
    def max_bytes(self) -> int | None:
        max_bytes = parse_bytes("size_limit", self.size_limit or None)
        if max_bytes is not None and max_bytes > MAX_SHARD_BYTES:
            raise ConfigError(
                f"size_limit={self.size_limit!r} must be at most {MAX_SHARD_BYTES} bytes, the "
                "largest offset in a shard; set a size such as '64mb'"
            )
        return max_bytes

    @property
    def fields(self) -> dict[str, Any]:
        """The part of an index.json entry that all shards share."""
        names = sorted(self.columns)
        encodings = [self.columns[name] for name in names]
        return {
            "version": 2,
            "format": "mds",
            "compression": self.compression or None,
            "hashes": sorted(self.hashes),
            "size_limit": self.max_bytes,
            "column_names": names,
            "column_encodings": encodings,
            "column_sizes": [encoder_of(encoding)[1] for encoding in encodings],
        }

    @property
    def config(self) -> bytes:
        return json.dumps(self.fields, sort_keys=True).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedShard:
    """One finished shard."""

    name: str
    """Name of the file, such as "shard.00000.mds.zstd"."""
    data: bytes
    entry: dict[str, Any]


class ShardEncoder:
    """Turns samples into shards.

    >>> encoder = ShardEncoder(ShardLayout(columns={"tokens": "ndarray:uint16", "n": "int"}))
    >>> encoder.add({"tokens": np.array([5, 6, 7], np.uint16), "n": 1}) is None
    True
    >>> shard = encoder.finish()
    >>> shard.name, shard.entry["samples"], shard.data[-8:].hex()
    ('shard.00000.mds', 1, '0403050006000700')
    """

    def __init__(self, layout: ShardLayout) -> None:
        self._fields = layout.fields
        self._config = layout.config
        self._max_bytes = layout.max_bytes or MAX_SHARD_BYTES
        columns = sorted(layout.columns.items())
        self._columns = [(name, *encoder_of(encoding)) for name, encoding in columns]
        self._sizes = struct.Struct(f"<{self._fields['column_sizes'].count(None)}I")
        self._num_shards = 0
        self._samples: list[bytes] = []
        self._num_bytes = 8 + len(self._config)

    def add(self, sample: Mapping[str, Any]) -> EncodedShard | None:
        """Add a sample; return the shard that it did not fit into any more, if any.

        A TypeError or a ValueError says that a value does not fit its column, or the sample a
        shard; a KeyError, that a column is missing.
        """
        sizes = []
        values = [b""]
        for name, encode, size in self._columns:
            value = encode(sample[name])
            if size is None:
                sizes.append(len(value))
            elif len(value) != size:
                raise ValueError(f"column {name!r} has {len(value)} bytes, but must have {size}")
            values.append(value)
        values[0] = self._sizes.pack(*sizes)
        encoded = b"".join(values)
        num_bytes = len(encoded) + 4
        if num_bytes + 8 + len(self._config) > MAX_SHARD_BYTES:
            raise ValueError(
                f"it takes {num_bytes} bytes, but a shard has {MAX_SHARD_BYTES} at most"
            )
        is_full = self._samples and self._num_bytes + num_bytes > self._max_bytes
        shard = self.finish() if is_full else None
        self._samples.append(encoded)
        self._num_bytes += num_bytes
        return shard

    def finish(self) -> EncodedShard | None:
        """Return the shard of the samples since the last one, or None if there are no samples."""
        if not self._samples:
            return None
        samples = self._samples
        begin = 8 + 4 * len(samples) + len(self._config)
        offsets = np.cumsum([begin, *map(len, samples)]).astype("<u4")
        head = struct.pack("<I", len(samples)) + offsets.tobytes() + self._config
        self._samples = []
        self._num_bytes = 8 + len(self._config)
        return self._encoded(b"".join([head, *samples]), len(samples))

    def _encoded(self, data: bytes, num_samples: int) -> EncodedShard:
        name = f"shard.{self._num_shards:05}.mds"
        self._num_shards += 1
        entry = {"samples": num_samples, "raw_data": self._file(name, data), "zip_data": None}
        compression = self._fields["compression"]
        if compression:
            name = f"{name}.{compression.partition(':')[0]}"
            data = compress(compression, data)
            entry["zip_data"] = self._file(name, data)
        return EncodedShard(name=name, data=data, entry=entry | self._fields)

    def _file(self, name: str, data: bytes) -> dict[str, Any]:
        algorithms = self._fields["hashes"]
        hashes = {algorithm: HASHES[algorithm](data).hexdigest() for algorithm in algorithms}
        return {"basename": name, "bytes": len(data), "hashes": hashes}


def index_json(entries: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the bytes of the index.json of shards with these entries, as MDSWriter writes it.

    >>> index_json([{"samples": 1}])
    b'{"shards": [{"samples": 1}], "version": 2}'
    """
    return json.dumps({"version": 2, "shards": list(entries)}, sort_keys=True).encode()


def encoder_of(encoding: str) -> tuple[Encode, int | None]:
    """Return a column's function from value to bytes, and the size of a value if it is fixed.

    The function raises TypeError or ValueError for a value that does not fit. An unknown encoding
    is a ConfigError.

    >>> encode, size = encoder_of("int")
    >>> encode(3), size
    (b'\\x03\\x00\\x00\\x00\\x00\\x00\\x00\\x00', 8)
    """
    if encoding in SIMPLE:
        return SIMPLE[encoding]
    if encoding in NUMBERS:
        dtype = np.dtype(encoding)
        return lambda value: _scalar(value, dtype), dtype.itemsize
    if encoding not in ARRAYS:
        known = (*SCALARS, *ARRAYS)
        raise ConfigError(
            f"encoding {encoding!r} is not one of {'|'.join(known)}{suggest(encoding, known)}"
        )
    return lambda value: _ndarray(value, ARRAYS[encoding]), None


def _int(value: int) -> bytes:
    try:
        return struct.pack("<q", _of_type(value, int))
    except struct.error as error:
        raise ValueError(f"{value} does not fit an int64") from error


def _json(value: Any) -> bytes:
    return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value).encode()


def _scalar(value: Any, dtype: np.dtype[Any]) -> bytes:
    if not isinstance(value, (int, float, np.generic)):
        raise TypeError(f"{value!r} must have type {dtype}, but has {type(value)}")
    given = value.item() if isinstance(value, np.generic) else value
    is_whole = dtype.kind != "f" or isinstance(given, int)
    with suppress(OverflowError):
        stored = np.asarray(value, dtype)
        if not is_whole or stored.item() == given:  # floats lose digits of integers above 2**53
            return stored.tobytes()
    raise ValueError(f"{value} does not fit {dtype}")


def _ndarray(value: Any, dtype: str) -> bytes:
    array = _of_type(value, np.ndarray)
    shape = array.shape
    if array.dtype.name != dtype:
        raise ValueError(f"an array of {array.dtype.name}, but the column has {dtype}")
    if not array.size or not shape:
        raise ValueError(f"an array of shape {shape} has no values, or no axes")
    _, letter, code = next(entry for entry in SHAPE_TYPES if max(shape) < entry[0])
    head = struct.pack(f"<B{len(shape)}{letter}", len(shape) << 2 | code, *shape)
    return head + array.tobytes()


def _of_type(value: Any, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise TypeError(f"must have type {kind}, but has {type(value)}")
    return value


SIMPLE: dict[str, tuple[Encode, int | None]] = {
    "bytes": (lambda value: bytes(_of_type(value, bytes)), None),
    "str": (lambda value: _of_type(value, str).encode(), None),
    "int": (_int, 8),
    "json": (_json, None),
}
SCALARS = (*SIMPLE, *NUMBERS)  # encodings of single values
