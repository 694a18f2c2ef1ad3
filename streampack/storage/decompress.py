"""Decompression of shards, bounded by the size in index.json.

A small file that would unpack to gigabytes is stopped at the first piece beyond the stated size.

Cost: a few MiB of memory plus the codec's history, at most 128 MiB (zstd); for snappy, one shard in
memory both compressed and raw.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from streampack.errors import ConfigError, DataError
from streampack.mds.codecs import CODECS
from streampack.mds.index import Shard
from streampack.storage.filesystem import Piece


def decompress_pieces(file: BinaryIO, where: str, shard: Shard) -> Iterator[Piece]:
    """Decompress a shard's file piece by piece, up to the size in index.json.

    A piece is valid until the next one is requested. `where` names the file in messages. A
    DataError says that it cannot be decompressed, or has another decompressed size.
    """
    algorithm, num_bytes, filled = shard.compression or "", shard.raw.num_bytes, 0
    try:
        for piece in CODECS[algorithm.partition(":")[0]].pieces(file, num_bytes):
            filled += len(piece)
            if filled > num_bytes:
                break
            yield piece
    except ConfigError as error:  # a library that is not installed
        raise DataError(f"{where}: {error}") from error
    except Exception as error:  # each codec raises its own exceptions
        # gzip and bz2 raise OSError for corrupt data, but without an errno.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            f"{where}: cannot be decompressed with {algorithm!r} ({type(error).__name__}: "
            f"{error}); the bytes are damaged: make a new copy of the shard, or rewrite it"
        ) from error
    if filled != num_bytes:
        raise DataError(
            f"{where}: does not decompress to the {num_bytes} bytes that index.json says "
            f"({filled}{' or more' if filled > num_bytes else ''}); rewrite the stream"
        )
