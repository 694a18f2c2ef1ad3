"""Decompression of shards, never into more than index.json states.

zstd is unpacked through a stream, so a small file that would unpack to gigabytes stops one byte
after the stated size; the other codecs are MosaicML's own.

Cost: one shard in memory, compressed (not for zstd) and raw.
"""

from __future__ import annotations

from pathlib import Path

import zstandard

from streampack.errors import DataError
from streampack.streams import mosaic
from streampack.streams.index import Shard

__all__ = ["decompress_shard"]


def decompress_shard(path: Path, shard: Shard) -> bytes | bytearray:
    """Decompress a shard's file, never into more than index.json states.

    Args:
        path: The compressed file.
        shard: What index.json says of it.

    Raises:
        DataError: If it cannot be decompressed, or not into that many bytes.
    """
    algorithm = shard.compression or "none"
    known = mosaic.get_compressions()
    if algorithm not in known:
        families = sorted({name.split(":")[0] for name in known})
        raise DataError(
            f"{path}: compression {algorithm!r} is not known; write it with one of "
            f"{', '.join(families)}"
        )
    try:
        if algorithm.split(":")[0] == "zstd":
            raw = _decompress_zstd(path, shard.raw.num_bytes)
        else:
            raw = mosaic.decompress(algorithm, path.read_bytes())
    except OSError as error:
        # gzip and bz2 raise OSError for bad bytes, which carries no number of the system's.
        if error.errno is not None:
            raise
        raise _damaged(path, algorithm, error) from error
    except Exception as error:  # every codec has errors of its own
        raise _damaged(path, algorithm, error) from error
    if len(raw) != shard.raw.num_bytes:
        raise DataError(
            f"{path}: does not decompress to the {shard.raw.num_bytes} bytes that index.json says "
            f"({len(raw)} or more); write the stream anew"
        )
    return raw


def _damaged(path: Path, algorithm: str, error: Exception) -> DataError:
    return DataError(
        f"{path}: cannot be decompressed with {algorithm!r} ({type(error).__name__}: {error}); "
        "the bytes are damaged: copy or write the shard anew"
    )


def _decompress_zstd(path: Path, num_bytes: int) -> bytearray:
    # One byte more than expected, so that a shard that is too large shows.
    raw = bytearray(num_bytes + 1)
    view = memoryview(raw)
    filled = 0
    with path.open("rb") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        while filled <= num_bytes:
            count = reader.readinto(view[filled:])
            if not count:
                break
            filled += count
    view.release()
    del raw[filled:]
    return raw
