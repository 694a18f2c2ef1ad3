"""Megatron's index: pointers and lengths say which tokens are a document's."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import Stream, TokenFiles
from streampack.errors import DataError
from streampack.flat import token_file
from streampack.flat.megatron import HEAD
from streampack.streams import open_stream
from tests.helpers.flat import Documents, read_documents

RNG = np.random.default_rng(0)
SEQUENCES: Documents = [RNG.integers(0, 1000, n).astype("uint16") for n in RNG.integers(3, 20, 30)]
LENGTHS = np.array(list(map(len, SEQUENCES)))
POINTERS = 2 * (np.cumsum(LENGTHS) - LENGTHS)


def write(folder: Path, kept: Any, first: Any, modes: bytes = b"") -> Path:
    """Write all sequences, and an index of those that are kept, in documents."""
    kept, first = np.array(kept), np.array(first)
    (folder / "web.bin").write_bytes(b"".join(each.tobytes() for each in SEQUENCES))
    (folder / "web.idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, len(kept), len(first))
        + LENGTHS[kept].astype("<i4").tobytes()
        + POINTERS[kept].astype("<i8").tobytes()
        + first.astype("<i8").tobytes()
        + modes
    )
    return folder


@pytest.mark.parametrize("unit", ["document", "sequence"])
def test_an_index_that_leaves_documents_out_gives_those_it_has(unit, tmp_path):
    kept = [n for n in range(30) if n % 3]
    write(tmp_path, kept, range(21))
    found = read_documents(Stream(TokenFiles(tmp_path, unit=unit)))
    assert [each.tolist() for each in found] == [SEQUENCES[n].tolist() for n in kept]


@pytest.mark.parametrize("number", range(0, 29, 2))
def test_a_document_that_reaches_into_the_next_one_is_refused(number, tmp_path, monkeypatch):
    monkeypatch.setattr(token_file, "CELL_BYTES", 64)  # so that many begin a virtual shard
    write(tmp_path, range(30), range(31))
    index = np.fromfile(tmp_path / "web.idx", "u1")
    index[HEAD.size + 4 * number] += 1  # the lowest byte of its length
    index.tofile(tmp_path / "web.idx")
    with pytest.raises(
        DataError, match=rf"document {number + 1} has .* begin where the one before"
    ):
        read_documents(Stream(TokenFiles(tmp_path)))


def test_documents_of_several_sequences_and_empty_ones_are_read_whole(tmp_path):
    first = [0, 4, 4, 5, 27, 30, 30]
    write(tmp_path, range(30), first)
    found = read_documents(Stream(TokenFiles(tmp_path)))
    whole = [
        [token for each in SEQUENCES[begin:end] for token in each.tolist()]
        for begin, end in itertools.pairwise(first)
    ]
    assert [each.tolist() for each in found] == whole


@pytest.mark.parametrize(
    ("kept", "first", "message"),
    [
        ([0, 1, 3, 4, *range(5, 30)], [0, 3, 29], "document 0 has sequences that do not follow"),
        ([0, 1, *range(5, 30)], [0, 1, 4, 27], "document 1 has sequences that do not follow"),
        (range(30), [0, 9, 3, 30], "document 1 has sequences of another one"),
        (range(30), [0], "30 sequences.* of its 0 documents .* not closed"),
        (
            range(30),
            [0, 12],
            "30 sequences.* of its 1 documents .* not closed",
        ),
    ],
)
def test_documents_that_are_not_runs_of_tokens_are_read_by_sequence(kept, first, message, tmp_path):
    write(tmp_path, kept, first)
    with pytest.raises(DataError, match=f"{message}.*unit='sequence'"):
        read_documents(Stream(TokenFiles(tmp_path)))
    found = read_documents(Stream(TokenFiles(tmp_path, unit="sequence")))
    assert [each.tolist() for each in found] == [SEQUENCES[n].tolist() for n in kept]


def test_a_repeating_index_is_refused(tmp_path):
    write(tmp_path, np.repeat(np.arange(30), 2), range(61))
    for unit in ("document", "sequence"):
        with pytest.raises(DataError, match="must begin where the one before ends, or later"):
            read_documents(Stream(TokenFiles(tmp_path, unit=unit)))


@pytest.mark.parametrize("unit", ["document", "sequence"])
def test_an_index_that_ends_before_its_tokens_needs_trailing(unit, tmp_path):
    write(tmp_path, range(20), range(21))
    with pytest.raises(DataError, match=r"end at byte \d+, but web.bin has .*trailing='ignore'"):
        open_stream(Stream(TokenFiles(tmp_path, unit=unit)), 0)
    found = read_documents(Stream(TokenFiles(tmp_path, unit=unit, trailing="ignore")))
    assert [each.tolist() for each in found] == [each.tolist() for each in SEQUENCES[:20]]


@pytest.mark.parametrize("unit", ["document", "sequence"])
def test_images_are_refused_and_text_with_modes_is_read(unit, tmp_path):
    write(tmp_path, range(30), range(31), modes=b"\0" * 29 + b"\1")
    with pytest.raises(DataError, match="sequences of mode 1, which are images"):
        open_stream(Stream(TokenFiles(tmp_path, unit=unit)), 0)
    write(tmp_path, range(30), range(31), modes=b"\0" * 30)
    assert len(read_documents(Stream(TokenFiles(tmp_path, unit=unit)))) == 30
