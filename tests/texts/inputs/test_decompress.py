"""Compressed files: members and frames are joined; truncation and damage are errors."""

from __future__ import annotations

import gzip
import io
import random

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from streampack.errors import DataError
from streampack.texts.inputs.read import read_pieces
from tests.helpers.inputs import jsonl, packed, rows_of, split

ROWS = jsonl(f"{number} {number**5}" for number in range(1000))
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"  # a zstd frame without data, as pzstd writes


def unpacked(data: bytes, compression: str) -> bytes:
    return b"".join(read_pieces(io.BytesIO(data), "file", compression, len(data)))


@given(parts=st.lists(st.binary(max_size=300), min_size=1, max_size=5))
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_members_and_frames_are_joined(parts, suffix):
    data = b"".join(packed(part, suffix) for part in parts)

    assert unpacked(data, suffix[1:]) == b"".join(parts)


def test_padding_after_gzip_and_skippable_frames_of_zstd_hold_no_data():
    assert unpacked(gzip.compress(b"a") + bytes(10_000) + gzip.compress(b"b"), "gz") == b"ab"
    frame = zstandard.compress(b"a")
    assert unpacked(SKIPPABLE + frame + SKIPPABLE + frame, "zst") == b"aa"


def test_a_frame_with_the_longest_window_of_zstd_is_read():
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    data = zstandard.ZstdCompressor(compression_params=parameters).compressobj()

    packed_data = data.compress(b"x" * 1000) + data.flush()

    assert unpacked(packed_data, "zst") == b"x" * 1000


@given(cut=st.floats(0, 1, exclude_max=True))
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_cut_short_anywhere_is_an_error_that_names_the_byte(tmp_path_factory, suffix, cut):
    path = tmp_path_factory.mktemp("cut") / f"rows.jsonl{suffix}"
    whole = packed(ROWS, suffix)
    size = int(len(whole) * cut)
    path.write_bytes(whole[:size])

    with pytest.raises(DataError, match=rf"{path}: ends at byte {size} within .*make a new copy"):
        rows_of(split(path))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damage_is_an_error_that_names_the_bytes(tmp_path, suffix):
    path = tmp_path / f"rows.jsonl{suffix}"
    dice = random.Random(0)
    data = bytearray(packed(jsonl(dice.randbytes(500).hex() for _ in range(3000)), suffix))
    data[len(data) // 2 :] = dice.randbytes(len(data) - len(data) // 2)
    assert len(data) > 5 << 18
    path.write_bytes(data)

    with pytest.raises(
        DataError, match=r"cannot be decompressed between byte (\d+) and byte (\d+)"
    ) as info:
        rows_of(split(path))
    words = str(info.value).split()
    first, last = (int(words[index + 1]) for index, word in enumerate(words) if word == "byte")
    assert first <= len(data) // 2 + (1 << 18)
    assert last > first


def test_damage_within_a_checksummed_frame_is_noticed():
    data = bytearray(zstandard.ZstdCompressor(write_checksum=True, level=1).compress(b"abc" * 9))
    data[-1] ^= 1

    with pytest.raises(DataError, match="cannot be decompressed"):
        unpacked(bytes(data), "zst")
