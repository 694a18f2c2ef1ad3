"""Shards are verified no matter where they come from: correct bytes or a clear error."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from streampack.config import Download
from streampack.errors import DataError
from streampack.mds.index import Shard, ShardFile
from streampack.storage import materialize
from streampack.storage import verify as checked_module
from streampack.storage.cache import ShardCache
from streampack.storage.download import budget_s
from streampack.storage.eviction import CacheLimit
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.materialize import LEAST_LOCK_S, lock_s
from streampack.stores.failures import DamagedError
from streampack.streams import Stream, open_stream
from tests.helpers import builders
from tests.helpers.caches import NOTES, Buckets, cached, cached_shards
from tests.helpers.locations import location_of

LENGTHS = [1 + (i * 37) % 300 for i in range(30)]


def written(tmp_path, **options):
    options = {"hashes": ["sha1", "xxh64"], "lengths_file": False, **options}
    return builders.write_stream_files(tmp_path / "r", LENGTHS, **options)


def remote(tmp_path, **options) -> Stream:
    return Stream(remote="s3://bucket/r", local=str(tmp_path / "l"), **options)


def assert_reads(opened, samples) -> None:
    """Read every sample of a stream, without reusing what this process has open."""
    for shard in range(opened.num_shards):
        data = opened.shards.read(shard, opened.shards.version(shard))
        first = int(opened.first_sample[shard])
        for i in range(len(data.tokens.counts)):
            np.testing.assert_array_equal(data.tokens.read(data.data, i), samples[first + i])


def note_of(file: Path) -> dict:
    return json.loads((file.parent / NOTES / f"{file.name}.json").read_text())


def test_what_unpacks_to_other_bytes_than_the_raw_hash_says_is_refused(tmp_path):
    path, _ = written(tmp_path, compression="zstd")
    index = json.loads((path / "index.json").read_text())
    index["shards"][0]["raw_data"]["hashes"] = {"md5": "0" * 32}
    (path / "index.json").write_text(json.dumps(index))
    opened = open_stream(remote(tmp_path), 0, store=Buckets(bucket=path).store)
    message = r"unpacked, its md5 is \w+, but index\.json says 0{32}"
    with pytest.raises(DamagedError, match=message):
        opened.fetch(0)
    assert not cached_shards(tmp_path / "l")


def test_a_file_s_lock_is_waited_for_while_its_holder_downloads_and_unpacks(tmp_path):
    location = location_of(remote(tmp_path, download=Download(timeout=5, retry=1)))
    for num_bytes in (None, 10**9):
        assert lock_s(location, num_bytes) == budget_s(location, num_bytes) + LEAST_LOCK_S


@pytest.fixture
def hashed(monkeypatch):
    """The files that were hashed, in order."""
    done: list[str] = []
    digest = checked_module.file_digest

    def file_digest(disk, path, wanted, *begin):
        done.append(path.name)
        return digest(disk, path, wanted, *begin)

    monkeypatch.setattr(checked_module, "file_digest", file_digest)
    return done


def test_a_cached_file_is_hashed_once_for_each_version_of_it(tmp_path, hashed):
    path, _ = written(tmp_path)

    def use() -> list[str]:
        """The files that a new process would hash."""
        hashed.clear()
        opened = open_stream(remote(tmp_path), 0, store=Buckets(bucket=path).store)
        for _ in range(3):
            opened.fetch(0)
        return list(hashed)

    assert len(use()) == 1
    assert use() == []
    file = cached(tmp_path / "l", "shard.00000.mds")
    os.utime(file)
    assert use() == [file.name]
    assert use() == []


def test_what_is_unpacked_is_hashed_on_its_way_and_not_read_again(tmp_path, hashed):
    path, samples = written(tmp_path, compression="zstd")
    opened = open_stream(remote(tmp_path), 0, store=Buckets(bucket=path).store)
    assert_reads(opened, samples)
    assert len(hashed) == opened.num_shards  # of the fetched files, before they are decompressed
    record = note_of(cached(tmp_path / "l", "shard.00000.mds"))
    assert record["hash"] == f"xxh64:{opened.shards.index.shards[0].raw.hashes['xxh64']}"


def test_the_users_own_files_are_hashed_once_a_process_and_nothing_is_written(tmp_path, hashed):
    path, samples = written(tmp_path)
    before = sorted(path.rglob("*"))
    opened = open_stream(Stream(local=str(path)), 0)
    for _ in range(2):
        assert_reads(opened, samples)
    assert len(hashed) == opened.num_shards
    assert sorted(path.rglob("*")) == before


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("fault", ["missing", "cut"])
def test_local_files_are_compared_with_the_index_at_construction(tmp_path, compression, fault):
    path, _ = written(tmp_path, compression=compression)
    (file,) = path.glob("shard.00002.mds*")
    if fault == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    field = "raw_data" if compression is None else "zip_data"
    problem = "does not exist" if fault == "missing" else "has \\d+ bytes, but index"
    message = rf"{file}: {problem}.*\({path}/index\.json: shards\.2\.{field}\)"
    with pytest.raises(DataError, match=message):
        open_stream(Stream(local=str(path)), 0)


def made_here(folder: Path) -> ShardCache:
    return ShardCache(StreamLocation(folder=folder, remote="rows", root=folder))


def entry_of(name: str, num_bytes: int, make: Callable[[Path], object]) -> Shard:
    file = ShardFile(basename=f"{name}.00000000", num_bytes=num_bytes, hashes={}, make=make)
    return Shard(num_samples=0, raw=file)


def test_a_file_that_is_made_here_is_made_once_and_whole_however_long_it_takes(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(materialize, "lock_s", lambda *_: 0.05)
    notes, made = tmp_path / "aa" / NOTES, []
    notes.mkdir(parents=True)
    left = [notes / f"{name}.00000000.{'0' * 32}.tmp" for name in ("aa", "ab")]
    for path in left:  # of processes that died
        path.touch()

    def make(to: Path) -> None:
        made.append(to)
        to.write_bytes(b"half")
        time.sleep(0.3)
        assert not list(tmp_path.glob("aa/aa*"))
        assert not any(path.exists() for path in left)
        to.write_bytes(b"whole")

    entry = entry_of("aa", 5, make)
    with ThreadPoolExecutor(2) as threads:
        files = list(threads.map(lambda _: made_here(tmp_path).file(entry), range(2)))
    assert len(made) == 1
    assert files[0] == files[1]
    assert Path(files[0].path).read_bytes() == b"whole"
    assert sorted(path.suffix for path in notes.iterdir()) == [".json", ".lock", ".lock"]


def test_room_for_a_file_that_is_made_here_is_reserved_and_corrected(tmp_path):
    cache = made_here(tmp_path)
    folders = [tmp_path / name for name in ("aa", "bb", "cc")]
    cache.keep_within(CacheLimit(1000, folders, LocalFilesystem()))

    def here() -> dict[str, int]:
        return {path.name[:2]: path.stat().st_size for path in tmp_path.glob("??/*.00000000")}

    def make(name: str, reserved: int, size: int, during: set[str]) -> None:
        def write(to: Path) -> None:
            assert here().keys() == during
            to.write_bytes(bytes(size))

        cache.file(entry_of(name, reserved, write))

    make("aa", 300, 400, set())
    cache.mark_finished([entry_of("aa", 300, id)])
    make("bb", 300, 500, {"aa"})
    make("cc", 300, 450, {"bb"})  # the others leave too little room
    assert here() == {"bb": 500, "cc": 450}
    cache.mark_finished([entry_of("bb", 300, id)])
    make("aa", 10, 200, {"bb", "cc"})
    assert here() == {"cc": 450, "aa": 200}
