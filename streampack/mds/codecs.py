"""Compressions and hashes of MDS shards, by MosaicML's names.

::

    "zstd:7"  -->  family "zstd", level 7  -->  compress(b"...")
    "xxh64"   -->  xxhash.xxh64(b"...")    -->  "26c7827d889f6da3"

Compressed bytes are a function of the data, the name and the codec's version: zstd runs in one
thread, and gzip's time stamp is 0. zstd frames carry their size and a checksum.

Cost: importing takes milliseconds; brotli and snappy are imported at their first use.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
from collections.abc import Callable
from typing import Any

import xxhash
import zstandard

from streampack._extras import import_extra


def _zstd(data: bytes, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(data)


def _gzip(data: bytes, level: int) -> bytes:
    # With mtime=0, the byte for the system depends on Python's version.
    packed = gzip.compress(data, level, mtime=1)
    return packed[:4] + bytes(4) + packed[8:]


def _brotli(data: bytes, level: int) -> bytes:
    packed: bytes = codec("brotli", "br").compress(data, quality=level)
    return packed


def _snappy(data: bytes, _: int) -> bytes:
    packed: bytes = codec("snappy", "snappy").compress(data)
    return packed


FAMILIES: dict[str, tuple[range, int, Callable[[bytes, int], bytes]]] = {
    "br": (range(12), 11, _brotli),
    "bz2": (range(1, 10), 9, bz2.compress),
    "gz": (range(10), 9, _gzip),
    "snappy": (range(0), 0, _snappy),
    "zstd": (range(1, 23), 3, _zstd),
}
"""Levels, default level and function of each family, sorted; its name is also the file's extension.
"""

COMPRESSIONS = frozenset(FAMILIES) | {
    f"{family}:{level}" for family, (levels, _, _) in FAMILIES.items() for level in levels
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
    _, default, function = FAMILIES[family]
    return function(data, int(level or default))


def codec(module: str, family: str) -> Any:
    """Return the library of a compression; raise a ConfigError if it is not installed."""
    return import_extra(module, "codecs", f"compression={family!r}", "write with zstd")
