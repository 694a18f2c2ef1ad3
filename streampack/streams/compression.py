"""Decompression of shards, never into more than index.json states.

::

    packed file --> zstd | gz | bz2 | br, through a bounded window --> pieces of 1 MiB or less
                --> snappy, whole, if its head states the size of index.json

A small file that would unpack to gigabytes stops with the piece that passes the stated size.

Cost: a few MiB of memory and the codec's window, at most 128 MiB (zstd); for snappy one shard
in memory, compressed and raw.
"""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import brotli
import zstandard

from streampack.errors import DataError
from streampack.streams import mosaic
from streampack.streams.index import Shard

__all__ = ["decompress_pieces", "decompress_shard"]

PIECE_BYTES = 2**20
MAX_SNAPPY_RATIO = 24  # its longest copy makes 64 bytes of 3


def decompress_shard(path: Path, shard: Shard) -> bytes:
    """Decompress a shard's file into memory, never into more than index.json states.

    Args:
        path: The compressed file.
        shard: What index.json says of it.

    Raises:
        DataError: If it cannot be decompressed, or not into that many bytes.
    """
    with path.open("rb") as file:
        return b"".join(decompress_pieces(file, str(path), shard))


def decompress_pieces(file: BinaryIO, where: str, shard: Shard) -> Iterator[bytes]:
    """Decompress a shard's file piece by piece, up to what index.json states.

    Args:
        file: The compressed file, opened for reading.
        where: Its name, for messages.
        shard: What index.json says of it.

    Raises:
        DataError: If it cannot be decompressed, or not into that many bytes.
    """
    algorithm = shard.compression or "none"
    family = algorithm.split(":")[0]
    if algorithm not in mosaic.get_compressions() or family not in CODECS:
        raise DataError(
            f"{where}: compression {algorithm!r} is not known; write it with one of "
            f"{', '.join(sorted(CODECS))}"
        )
    num_bytes, filled = shard.raw.num_bytes, 0
    pieces = CODECS[family](file, num_bytes)
    while filled <= num_bytes:
        piece = _next_piece(pieces, where, algorithm)
        if not piece:
            break
        filled += len(piece)
        if filled <= num_bytes:
            yield piece
    if filled != num_bytes:
        raise DataError(
            f"{where}: does not decompress to the {num_bytes} bytes that index.json says "
            f"({filled}{' or more' if filled > num_bytes else ''}); write the stream anew"
        )


def _next_piece(pieces: Iterator[bytes], where: str, algorithm: str) -> bytes:
    try:
        return next(pieces, b"")
    except OSError as error:
        # gzip and bz2 raise OSError for bad bytes, which carries no number of the system's.
        if error.errno is not None:
            raise
        raise _damaged(where, algorithm, error) from error
    except Exception as error:  # every codec has errors of its own
        raise _damaged(where, algorithm, error) from error


def _damaged(where: str, algorithm: str, error: Exception) -> DataError:
    return DataError(
        f"{where}: cannot be decompressed with {algorithm!r} ({type(error).__name__}: {error}); "
        "the bytes are damaged: copy or write the shard anew"
    )


def _zstd(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:  # noqa: ARG001 - read in bounds
    reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    while piece := reader.read(PIECE_BYTES):
        yield piece


def _gzip(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:  # noqa: ARG001 - read in bounds
    with gzip.GzipFile(fileobj=file, mode="rb") as reader:
        while piece := reader.read(PIECE_BYTES):
            yield piece


def _bzip2(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:  # noqa: ARG001 - read in bounds
    with bz2.BZ2File(file, mode="rb") as reader:
        while piece := reader.read(PIECE_BYTES):
            yield piece


def _brotli(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:  # noqa: ARG001 - read in bounds
    reader = brotli.Decompressor()
    while not reader.is_finished():
        packed = file.read(PIECE_BYTES) if reader.can_accept_more_data() else b""
        piece = reader.process(packed, output_buffer_limit=PIECE_BYTES)
        if piece:
            yield piece
        elif not packed and reader.can_accept_more_data():
            raise EOFError("the file ends before its data do")


def _snappy(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    packed = file.read(num_bytes + num_bytes // 6 + 64)  # as much as it can grow
    stated, shift = 0, 0
    for byte in packed[:5]:
        stated |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    # The whole of it is made at once, so a size that cannot be is refused before.
    if stated != num_bytes or stated > MAX_SNAPPY_RATIO * len(packed):
        raise ValueError(f"{len(packed)} bytes that state {stated}, but index.json {num_bytes}")
    yield mosaic.decompress("snappy", packed)


CODECS: dict[str, Callable[[BinaryIO, int], Iterator[bytes]]] = {
    "br": _brotli,
    "bz2": _bzip2,
    "gz": _gzip,
    "snappy": _snappy,
    "zstd": _zstd,
}
