"""Shards are decompressed in pieces, and never to more than the size in index.json."""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import io
import itertools
import random
import tracemalloc

import brotli
import numpy as np
import pytest
import zstandard

from streampack.errors import DataError
from streampack.mds import codecs
from streampack.mds.codecs import PIECE_BYTES
from streampack.mds.index import Layout, Shard, ShardFile
from streampack.storage.decompress import decompress_pieces

COMPRESS = {
    "br": lambda data: brotli.compress(data, quality=5),
    "bz2": bz2.compress,
    "gz": gzip.compress,
    "snappy": lambda data: mosaic_compress("snappy", data),
    "zstd": zstandard.compress,
}
every_codec = pytest.mark.parametrize("codec", sorted(COMPRESS))


def mosaic_compress(codec: str, data: bytes) -> bytes:
    from streaming.base.compression import compress

    return compress(codec, data)


def shard_of(codec: str, num_bytes: int) -> Shard:
    return Shard(
        num_samples=1,
        raw=ShardFile(basename="a.mds", num_bytes=num_bytes, hashes={}),
        packed=ShardFile(basename="a.mds.x", num_bytes=1, hashes={}),
        compression=codec,
        layout=Layout(names=("tokens",), encodings=("bytes",), sizes=(None,)),
    )


SMALL_PIECE = 1 << 16


@pytest.mark.parametrize("num_bytes", [1, SMALL_PIECE - 1, SMALL_PIECE, 2 * SMALL_PIECE + 1])
@every_codec
def test_pieces_that_are_used_before_the_next_is_asked_for_make_up_the_file(
    codec, num_bytes, monkeypatch
):
    monkeypatch.setattr(codecs, "PIECE_BYTES", SMALL_PIECE)
    raw = random.Random(num_bytes).randbytes(num_bytes)
    found = bytearray()
    for piece in decompress_pieces(
        io.BytesIO(COMPRESS[codec](raw)), "x", shard_of(codec, len(raw))
    ):
        found += piece
    assert found == raw


def test_zstd_needs_no_more_memory_for_a_longer_shard():
    def most_bytes(num_pieces: int) -> int:
        packed = io.BytesIO(zstandard.compress(bytes(num_pieces * PIECE_BYTES)))
        shard = shard_of("zstd", num_pieces * PIECE_BYTES)
        tracemalloc.start()
        try:
            for _ in decompress_pieces(packed, "x", shard):
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert most_bytes(16) < most_bytes(2) + PIECE_BYTES


@every_codec
@pytest.mark.parametrize("stated", [999, 1001])
def test_another_size_than_stated_is_refused(codec, stated):
    packed = io.BytesIO(COMPRESS[codec](bytes(1000)))
    with pytest.raises(DataError, match=r"does not decompress to|bytes that state 1000, but index"):
        list(decompress_pieces(packed, "x", shard_of(codec, stated)))


@every_codec
@pytest.mark.parametrize("cut", [0, 1, 10, 400])
def test_a_cut_file_is_refused(codec, cut):
    packed = COMPRESS[codec](random.Random(0).randbytes(4000))[:cut]
    with pytest.raises(DataError, match="x: "):
        list(decompress_pieces(io.BytesIO(packed), "x", shard_of(codec, 4000)))


def test_snappy_that_states_more_than_its_bytes_can_hold_is_refused_before_it_is_unpacked():
    bomb = b"\xff\xff\xff\xff\x0f" + b"\x00" * 20  # states 4 GiB
    with pytest.raises(DataError, match="25 bytes that state 4294967295"):
        list(decompress_pieces(io.BytesIO(bomb), "x", shard_of("snappy", 2**32 - 1)))


def test_several_members_in_one_file_are_read_on():
    for codec in ("gz", "bz2", "zstd"):
        packed = io.BytesIO(COMPRESS[codec](b"ab") + COMPRESS[codec](b"cd"))
        pieces = decompress_pieces(packed, "x", shard_of(codec, 4))
        assert b"".join(bytes(piece) for piece in pieces) == b"abcd"


def flips_that_pass(codec: str, packed: bytes, raw: bytes) -> list[tuple[int, int]]:
    """Flip each bit of a compressed file in turn; return those that change bytes undetected."""
    passed = []
    shard = shard_of(codec, len(raw))
    for place, bit in itertools.product(range(len(packed)), range(8)):
        flipped = bytearray(packed)
        flipped[place] ^= 1 << bit
        with contextlib.suppress(DataError):
            found = b"".join(decompress_pieces(io.BytesIO(flipped), "x", shard))
            if found != raw:
                passed.append((place, bit))
    return passed


CHECKED = {
    "bz2": bz2.compress,
    "gz": gzip.compress,
    # With and without the size in the frame header; MosaicML's writer includes it, others do not.
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
    "zstd:19": zstandard.ZstdCompressor(
        level=19, write_checksum=True, write_content_size=False
    ).compress,
}


@pytest.mark.parametrize("name", sorted(CHECKED))
def test_no_flipped_bit_of_a_file_with_a_checksum_is_delivered(name):
    raw = np.random.default_rng(7).integers(0, 900, 150, np.int32).tobytes()
    codec = name.partition(":")[0]
    assert not flips_that_pass(codec, CHECKED[name](raw), raw)


@pytest.mark.parametrize("num_bytes", [PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES])
def test_the_checksum_is_read_where_the_last_piece_is_full(num_bytes):
    raw = random.Random(num_bytes).randbytes(num_bytes)
    packed = bytearray(CHECKED["zstd"](raw))
    packed[-1] ^= 1  # the checksum itself, after all data
    with pytest.raises(DataError, match="checksum"):
        list(decompress_pieces(io.BytesIO(packed), "x", shard_of("zstd", num_bytes)))


def test_errors_of_the_disk_are_not_taken_for_damage():
    class Broken(io.BytesIO):
        def read(self, _=-1):
            raise OSError(errno.EIO, "Input/output error")

        readinto = read

    with pytest.raises(OSError, match="Input/output error"):
        list(decompress_pieces(Broken(), "x", shard_of("gz", 4)))
