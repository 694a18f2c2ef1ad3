"""Decompression of shards, bounded by the size in index.json.

::

    packed file --> zstd | gz | bz2 | br, through a bounded window --> pieces of 2 MiB or less
                --> snappy, whole, if its head states the size of index.json

A small file that would unpack to gigabytes is stopped at the first piece beyond the stated size.

Cost: a few MiB of memory plus the codec's window, at most 128 MiB (zstd); for snappy, one shard in
memory both compressed and raw. zstd reuses one buffer for all its pieces, because touching fresh
memory costs more than writing to it.
"""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from streampack.errors import ConfigError, DataError
from streampack.mds.codecs import COMPRESSIONS, codec
from streampack.mds.index import Shard
from streampack.storage.filesystem import WRITE_BYTES, Piece

PIECE_BYTES = WRITE_BYTES
MAX_SNAPPY_RATIO = 24  # the longest copy turns 3 bytes into 64


def decompress_shard(path: Path, shard: Shard) -> bytes:
    """Decompress a shard's file into memory; raise as `decompress_pieces`."""
    raw = BytesIO()
    with path.open("rb") as file:
        raw.writelines(decompress_pieces(file, str(path), shard))
    return raw.getvalue()


def decompress_pieces(file: BinaryIO, where: str, shard: Shard) -> Iterator[Piece]:
    """Decompress a shard's file piece by piece, up to the size in index.json.

    A piece is valid until the next one is requested. `where` names the file in messages. A
    DataError says that it cannot be decompressed, or has another decompressed size.
    """
    algorithm = shard.compression or "none"
    if algorithm not in COMPRESSIONS:
        raise DataError(
            f"{where}: compression {algorithm!r} is not known; write it with one of "
            f"{', '.join(sorted(CODECS))}"
        )
    num_bytes, filled = shard.raw.num_bytes, 0
    try:
        for piece in CODECS[algorithm.partition(":")[0]](file, num_bytes):
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
            f"{error}); the bytes are damaged: copy or write the shard again"
        ) from error
    if filled != num_bytes:
        raise DataError(
            f"{where}: does not decompress to the {num_bytes} bytes that index.json says "
            f"({filled}{' or more' if filled > num_bytes else ''}); write the stream again"
        )


def _zstd(file: BinaryIO, num_bytes: int) -> Iterator[Piece]:
    reader = zstandard.ZstdDecompressor().stream_reader(
        file, read_size=PIECE_BYTES, read_across_frames=True
    )
    # One byte more than stated, so that a small shard that is too long is detected in one read.
    buffer = memoryview(bytearray(min(num_bytes + 1, PIECE_BYTES)))
    while filled := reader.readinto(buffer):
        yield buffer[:filled]


def _opened(unpacked: Callable[..., Any], file: BinaryIO, _: int) -> Iterator[Piece]:
    with unpacked(file) as reader:
        yield from iter(partial(reader.read, PIECE_BYTES), b"")


def _brotli(file: BinaryIO, num_bytes: int) -> Iterator[Piece]:  # noqa: ARG001 - read in bounds
    reader = codec("brotli", "br").Decompressor()
    while not reader.is_finished():
        packed = file.read(PIECE_BYTES) if reader.can_accept_more_data() else b""
        piece = reader.process(packed, output_buffer_limit=PIECE_BYTES)
        if piece:
            yield piece
        elif not packed and reader.can_accept_more_data():
            raise EOFError(f"the file ends after {file.tell()} bytes, before its data do")


def _snappy(file: BinaryIO, num_bytes: int) -> Iterator[Piece]:
    packed = file.read(num_bytes + num_bytes // 6 + 64)  # the worst-case compressed size
    stated = 0
    for position, byte in enumerate(packed[:5]):
        stated |= (byte & 127) << 7 * position
        if byte < 128:
            break
    # Snappy decompresses the whole input in one call, so an impossible size is refused first.
    if stated != num_bytes or stated > MAX_SNAPPY_RATIO * len(packed):
        raise ValueError(f"{len(packed)} bytes that state {stated}, but index.json {num_bytes}")
    yield codec("snappy", "snappy").decompress(packed)


CODECS: dict[str, Callable[[BinaryIO, int], Iterator[Piece]]] = {
    "br": _brotli,
    "bz2": partial(_opened, bz2.open),
    "gz": partial(_opened, gzip.open),
    "snappy": _snappy,
    "zstd": _zstd,
}
