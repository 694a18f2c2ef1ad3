"""Hostile streams give a typed error or a good result: no crash, no bomb, no outside access.

Everything is read in a separate process, so that memory can be measured, the audit hook goes away
afterwards, and a crash is noticed. About 15 s; 100,000 streams take 4 minutes on two cores.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from streampack.errors import DataError
from streampack.mds.length_file import HEAD
from streampack.streams import Stream, open_stream
from tests.helpers import builders
from tests.helpers.faults import fuzz

MOST_BYTES = 256 * 2**20


def start(folder: Path, *args: object) -> subprocess.Popen[str]:
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.helpers.faults.fuzz", folder, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], folder: Path, timeout_s: float) -> dict:
    out, err = process.communicate(timeout=timeout_s)
    current = folder / "current"
    at = current.read_text() if current.exists() else "the start"
    assert process.returncode == 0, f"{process.returncode} at {at}: {err[-4000:]}"
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(
    ("num_streams", "num_processes", "timeout_s"),
    [(160, 1, 300), pytest.param(100_000, 2, 3000, marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_hostile_streams_give_typed_errors_or_are_read_within_bounds(
    tmp_path, num_streams, num_processes, timeout_s
):
    size = num_streams // num_processes
    folders = [tmp_path / str(i) for i in range(num_processes)]
    processes = [
        start(folder, num_streams, i * size, (i + 1) * size) for i, folder in enumerate(folders)
    ]
    for process, folder in zip(processes, folders, strict=True):
        found = finish(process, folder, timeout_s)
        assert found["bad"] == []
        assert found["code"] == []
        assert found["outside"] == []
        assert found["extra_bytes"] < MOST_BYTES
        results = found["results"]
        assert set(results) == {"ok", "DataError"}
        assert sum(results.values()) == size
        assert min(results.values()) > size // 50  # some are refused, and others are harmless


# Faults: index_zip_bomb.
def test_no_bomb_of_any_codec_unpacks_past_its_stated_size(tmp_path):
    found = finish(start(tmp_path / "b", "bombs"), tmp_path / "b", 120)
    assert len(found) == 2 * len(fuzz.CODECS)
    for name, (bomb_bytes, result, extra_bytes, disk_bytes) in found.items():
        assert bomb_bytes < fuzz.BOMB_BYTES // 16, name
        assert result == "DataError", name
        assert extra_bytes < MOST_BYTES, name
        assert disk_bytes < 2 * bomb_bytes + 2**20, name


@pytest.mark.parametrize("stated", [2**20, 2**31, 2**32 - 1])
def test_lengths_that_no_shard_can_hold_are_refused_before_memory_is_taken(tmp_path, stated):
    # The length file is consistent in itself; only the shard contradicts it.
    folder, _ = builders.write_stream_files(tmp_path / "s", [5, 7])
    path = folder / "lengths.bin"
    content = bytearray(path.read_bytes())
    head = list(HEAD.unpack(content[: HEAD.size]))
    lengths_begin = len(content) - 12 * 2
    struct.pack_into("<I", content, lengths_begin, stated)
    struct.pack_into("<Q", content, lengths_begin - 8, stated + 7)
    head[4] = stated + 7
    content[: HEAD.size] = HEAD.pack(*head)
    path.write_bytes(content)
    opened = open_stream(Stream(local=str(folder)), 0)
    with pytest.raises(DataError, match="tokens"):
        opened.shard_lengths(0)
