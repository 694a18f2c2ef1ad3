"""Decompression of shards, never into more than index.json states.

::

    packed file --> zstd | gz | bz2 | br, through a bounded window --> pieces of 2 MiB or less
                --> snappy, whole, if its head states the size of index.json

A small file that would unpack to gigabytes stops with the piece that passes the stated size.

Cost: a few MiB of memory and the codec's window, at most 128 MiB (zstd); for snappy one shard
in memory, compressed and raw. zstd writes all its pieces into one buffer: memory that is touched
first costs more than what is written into it.
"""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import brotli
import zstandard

from streampack.errors import DataError
from streampack.streams import mosaic
from streampack.streams.disk import WRITE_BYTES, Piece
from streampack.streams.index import Shard

__all__ = ["decompress_pieces", "decompress_shard"]

PIECE_BYTES = WRITE_BYTES
MAX_SNAPPY_RATIO = 24  # its longest copy makes 64 bytes of 3


def decompress_shard(path: Path, shard: Shard) -> bytes:
    """Decompress a shard's file into memory, never into more than index.json states.

    Args:
        path: The compressed file.
        shard: What index.json says of it.

    Raises:
        DataError: If it cannot be decompressed, or not into that many bytes.
    """
    raw = BytesIO()
    with path.open("rb") as file:
        raw.writelines(decompress_pieces(file, str(path), shard))
    return raw.getvalue()


def decompress_pieces(file: BinaryIO, where: str, shard: Shard) -> Iterator[Piece]:
    """Decompress a shard's file piece by piece, up to what index.json states.

    A piece holds its bytes until the next one is asked for.

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


def _next_piece(pieces: Iterator[Piece], where: str, algorithm: str) -> Piece:
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


def _zstd(file: BinaryIO, num_bytes: int) -> Iterator[Piece]:
    reader = zstandard.ZstdDecompressor().stream_reader(
        file, read_size=PIECE_BYTES, read_across_frames=True
    )
    # A byte more than stated, so that a small shard that holds more is found out at once.
    buffer = memoryview(bytearray(min(num_bytes + 1, PIECE_BYTES)))
    while filled := reader.readinto(buffer):
        yield buffer[:filled]


def _gzip(file: BinaryIO, num_bytes: int) -> Iterator[Piece]:  # noqa: ARG001 - read in bounds
    with gzip.GzipFile(fileobj=file, mode="rb") as reader:
        while piece := reader.read(PIECE_BYTES):
            yield piece


def _bzip2(file: BinaryIO, num_bytes: int) -> Iterator[Piece]:  # noqa: ARG001 - read in bounds
    with bz2.BZ2File(file, mode="rb") as reader:
        while piece := reader.read(PIECE_BYTES):
            yield piece


def _brotli(file: BinaryIO, num_bytes: int) -> Iterator[Piece]:  # noqa: ARG001 - read in bounds
    reader = brotli.Decompressor()
    while not reader.is_finished():
        packed = file.read(PIECE_BYTES) if reader.can_accept_more_data() else b""
        piece = reader.process(packed, output_buffer_limit=PIECE_BYTES)
        if piece:
            yield piece
        elif not packed and reader.can_accept_more_data():
            raise EOFError("the file ends before its data do")


def _snappy(file: BinaryIO, num_bytes: int) -> Iterator[Piece]:
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


CODECS: dict[str, Callable[[BinaryIO, int], Iterator[Piece]]] = {
    "br": _brotli,
    "bz2": _bzip2,
    "gz": _gzip,
    "snappy": _snappy,
    "zstd": _zstd,
}
