"""Compressions and hashes of MDS shards, by MosaicML's names.

::

    "zstd:7"  -->  family "zstd", level 7  -->  compress(b"...")
    "xxh64"   -->  xxhash.xxh64(b"...")    -->  "26c7827d889f6da3"

Compressed bytes are a function of the data, the name and the codec's version: zstd runs in one
thread, and gzip's time stamp is 0. zstd frames carry their size and a checksum.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import xxhash
import zstandard

from streampack._extras import import_extra

PIECE_BYTES = 2**21
MAX_SNAPPY_RATIO = 24  # the longest copy turns 3 bytes into 64
GZIP_WBITS = 31  # a gzip header, and the largest history
MAX_ZSTD_BYTES = 2**31  # of `zstd --long=31`, the most that zstd writes


def _zstd(data: bytes, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(data)


def _gzip(data: bytes, level: int) -> bytes:
    # With mtime=0, the byte for the system depends on Python's version.
    packed = gzip.compress(data, level, mtime=1)
    return packed[:4] + bytes(4) + packed[8:]


def _brotli(data: bytes, level: int) -> bytes:
    packed: bytes = _library("brotli", "br").compress(data, quality=level)
    return packed


def _snappy(data: bytes, _: int) -> bytes:
    packed: bytes = _library("snappy", "snappy").compress(data)
    return packed


def _unpack_zstd(file: BinaryIO, num_bytes: int) -> Iterator[bytes | memoryview]:
    reader = zstandard.ZstdDecompressor().stream_reader(
        file, read_size=PIECE_BYTES, read_across_frames=True
    )
    # One byte more than stated, so that a small shard that is too long is detected in one read. The
    # buffer is reused, because touching fresh memory costs more than writing to it.
    buffer = memoryview(bytearray(min(num_bytes + 1, PIECE_BYTES)))
    while filled := reader.readinto(buffer):
        yield buffer[:filled]


def _zstd_member() -> Any:
    return zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_BYTES).decompressobj()


def _unpack(opened: Callable[..., Any], file: BinaryIO, _: int) -> Iterator[bytes | memoryview]:
    with opened(file) as reader:
        yield from iter(partial(reader.read, PIECE_BYTES), b"")


def _unpack_brotli(file: BinaryIO, num_bytes: int) -> Iterator[bytes | memoryview]:  # noqa: ARG001 - read in bounds
    reader = _library("brotli", "br").Decompressor()
    while not reader.is_finished():
        packed = file.read(PIECE_BYTES) if reader.can_accept_more_data() else b""
        piece = reader.process(packed, output_buffer_limit=PIECE_BYTES)
        if piece:
            yield piece
        elif not packed and reader.can_accept_more_data():
            raise EOFError(f"the file ends after {file.tell()} bytes, before its data do")


def _unpack_snappy(file: BinaryIO, num_bytes: int) -> Iterator[bytes | memoryview]:
    packed = file.read(num_bytes + num_bytes // 6 + 64)  # the worst-case compressed size
    stated = 0
    for position, byte in enumerate(packed[:5]):
        stated |= (byte & 127) << 7 * position
        if byte < 128:
            break
    # Snappy decompresses the whole input in one call, so an impossible size is refused first.
    if stated != num_bytes or stated > MAX_SNAPPY_RATIO * len(packed):
        raise ValueError(f"{len(packed)} bytes that state {stated}, but index.json {num_bytes}")
    yield _library("snappy", "snappy").decompress(packed)


class Codec(NamedTuple):
    """A compression, with the libraries' functions for it."""

    levels: range
    default_level: int
    compress: Callable[[bytes, int], bytes]
    pieces: Callable[[BinaryIO, int], Iterator[bytes | memoryview]]
    """Decompresses a shard's file in pieces of 2 MiB or less, given its stated size.

    A piece is valid until the next one is requested. Snappy returns the shard whole, if the head of
    the file states that size.
    """
    new_member: Any = None
    """Makes a decompressor of one member or frame of an input, with `eof` and `unused_data`."""


CODECS: dict[str, Codec] = {
    "br": Codec(range(12), 11, _brotli, _unpack_brotli),
    "bz2": Codec(range(1, 10), 9, bz2.compress, partial(_unpack, bz2.open)),
    "gz": Codec(
        range(10),
        9,
        _gzip,
        partial(_unpack, gzip.open),
        partial(zlib.decompressobj, GZIP_WBITS),
    ),
    "snappy": Codec(range(0), 0, _snappy, _unpack_snappy),
    "zstd": Codec(range(1, 23), 3, _zstd, _unpack_zstd, _zstd_member),
}
"""Every family of compressions, sorted; its name is also the extension of a shard's file."""

COMPRESSIONS = frozenset(CODECS) | {
    f"{family}:{level}" for family, codec in CODECS.items() for level in codec.levels
}
"""Every compression that MosaicML Streaming can read."""

HASHES: dict[str, Callable[..., Any]] = {
    name: getattr(xxhash, name) for name in sorted(xxhash.algorithms_available)
} | {
    name: getattr(hashlib, name)
    for name in sorted(hashlib.algorithms_available)
    if hasattr(hashlib, name) and not name.startswith("shake_")
}
"""Every hash algorithm that MosaicML Streaming can verify, as a constructor like hashlib's.

>>> HASHES["xxh64"](b"abc").hexdigest(), HASHES["md5"](b"abc").hexdigest()
('44bc2cf5ad770999', '900150983cd24fb0d6963f7d28e17f72')
"""


def compress(compression: str, data: bytes) -> bytes:
    """Return compressed data; raise a ConfigError if the compression's library is not installed.

    >>> len(compress("zstd:7", bytes(1000))) < 100
    True
    """
    family, _, level = compression.partition(":")
    codec = CODECS[family]
    return codec.compress(data, int(level or codec.default_level))


def _library(module: str, family: str) -> Any:
    return import_extra(module, "codecs", f"compression={family!r}", "write with zstd")
