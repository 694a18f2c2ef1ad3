"""Shards are verified wherever they come from: right bytes or a clear error."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from streampack.errors import DataError
from streampack.storage import verify as checked_module
from streampack.storage.download import fetch, fetch_if_there
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.materialize import Downloader
from streampack.stores.failures import DamagedError
from streampack.streams import Stream, open_stream, open_streams
from tests.helpers import builders
from tests.helpers.caches import NOTES, cache_of, cached, cached_shards

LENGTHS = [1 + (i * 37) % 300 for i in range(30)]


class Origin:
    """A store in a folder that counts its requests; a test can change its answers."""

    def __init__(self, folder: Path, change=None) -> None:
        self.folder = folder
        self.change = change or (lambda _, content: content)
        self.asked: list[str] = []

    def fetch(self, files, basename, to, *, check=None, **_) -> None:
        for attempt in range(4):
            self.asked.append(basename)
            content = self.change(basename, (self.folder / basename).read_bytes())
            to.write_bytes(content)
            try:
                if check is not None:
                    check(to)
            except DamagedError as error:
                to.unlink()
                if attempt == 3:
                    uri = f"{files.remote}/{basename}"
                    raise DataError(f"{uri}: {error}", uri=uri, attempts=4) from error
            else:
                return

    def fetch_if_there(self, files, basename, to) -> bool:
        if not (self.folder / basename).is_file():
            return False
        self.fetch(files, basename, to)
        return True

    @property
    def store(self) -> Downloader:
        return Downloader(fetch=self.fetch, fetch_if_there=self.fetch_if_there)

    def shards_asked(self) -> list[str]:
        return [name for name in self.asked if name.startswith("shard")]


def written(tmp_path, **options):
    options = {"hashes": ["sha1", "xxh64"], "lengths_file": False, **options}
    return builders.write_stream_files(tmp_path / "r", LENGTHS, **options)


def remote(tmp_path, **options) -> Stream:
    return Stream(remote="s3://bucket/r", local=str(tmp_path / "l"), **options)


def assert_reads(opened, samples) -> None:
    """Read every sample of a stream, past what this process has open."""
    for shard in range(opened.num_shards):
        data = opened._open_shard(shard, "")
        first = int(opened.first_sample[shard])
        for i in range(len(data.tokens.counts)):
            np.testing.assert_array_equal(data.tokens.read(data.data, i), samples[first + i])


def flip(content: bytes, at: int = -1) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


def replaced(path: Path, content: bytes) -> None:
    """Put another file in its place: the old one may be mapped."""
    path.unlink()
    path.write_bytes(content)


def note_of(file: Path) -> dict:
    return json.loads((file.parent / NOTES / f"{file.name}.json").read_text())


def leftovers(folder: Path) -> list[str]:
    return [file.name for file in folder.rglob("*") if ".tmp" in file.name]


# ---------------------------------------------------------------------------- checking


def test_damage_that_only_unpacking_shows_is_fetched_again_too(tmp_path):
    _, samples = written(tmp_path, compression="zstd", hashes=[])
    damaged = []

    def change(basename, content):
        if basename.startswith("shard") and basename not in damaged:
            damaged.append(basename)
            return b"\x07" * len(content)
        return content

    opened = open_stream(remote(tmp_path), 0, store=Origin(tmp_path / "r", change).store)
    assert_reads(opened, samples)
    assert len(damaged) == opened.num_shards


def test_what_unpacks_to_other_bytes_than_the_raw_hash_says_is_refused(tmp_path):
    path, _ = written(tmp_path, compression="zstd")
    index = json.loads((path / "index.json").read_text())
    index["shards"][0]["raw_data"]["hashes"] = {"md5": "0" * 32}
    (path / "index.json").write_text(json.dumps(index))
    opened = open_stream(remote(tmp_path), 0, store=Origin(path).store)
    with pytest.raises(DataError, match=r"unpacked, its md5 is \w+, but index\.json says 0{32}"):
        opened.fetch(0)
    assert not cached_shards(tmp_path / "l")


@pytest.mark.parametrize(
    ("hashes", "validate_hash", "expected"),
    [
        (["sha1", "xxh64", "sha256"], None, "xxh64"),
        (["sha256", "sha1", "md5"], None, "sha1"),
        (["xxh64", "sha256"], "sha256", "sha256"),
    ],
)
def test_the_cheapest_hash_is_used_unless_another_is_asked_for(
    tmp_path, hashes, validate_hash, expected
):
    path, _ = written(tmp_path, hashes=hashes)
    stream = remote(tmp_path, validate_hash=validate_hash)
    opened = open_stream(stream, 0, store=Origin(path).store)
    opened.fetch(0)
    record = note_of(cached(tmp_path / "l", "shard.00000.mds"))
    assert record["hash"].split(":")[0] == expected
    assert record["num_bytes"] == opened.raw_bytes[0]


@pytest.mark.parametrize("with_remote", [False, True])
def test_a_hash_that_the_index_lacks_is_refused_at_construction(tmp_path, with_remote):
    path, _ = written(tmp_path)
    place = {"remote": str(path), "local": str(tmp_path / "l")} if with_remote else {}
    stream = Stream(**({"local": str(path)} | place), validate_hash="md5")
    message = r"index\.json: shard\.00000\.mds has no 'md5' hash, only \['sha1', 'xxh64'\]; set"
    with pytest.raises(DataError, match=message):
        open_stream(stream, 0)


@pytest.fixture
def hashed(monkeypatch):
    """The files that were hashed, in order."""
    done: list[str] = []
    digest = checked_module.file_digest

    def file_digest(disk, path, wanted):
        done.append(path.name)
        return digest(disk, path, wanted)

    monkeypatch.setattr(checked_module, "file_digest", file_digest)
    return done


def test_a_cached_file_is_hashed_once_for_each_version_of_it_and_boot(tmp_path, hashed):
    class Machine(LocalFilesystem):
        boot = "first"

        def boot_id(self):
            return self.boot

    path, _ = written(tmp_path)
    disk = Machine()

    def use() -> list[str]:
        """What a new process would hash."""
        hashed.clear()
        opened = open_stream(remote(tmp_path), 0, disk=disk, store=Origin(path).store)
        for _ in range(3):
            opened.fetch(0)
        return list(hashed)

    assert len(use()) == 1
    assert use() == []
    file = cached(tmp_path / "l", "shard.00000.mds")
    os.utime(file)
    assert use() == [file.name]
    assert use() == []
    disk.boot = "second"
    assert use() == [file.name]
    assert use() == []


def test_what_is_unpacked_is_hashed_on_its_way_and_not_read_again(tmp_path, hashed):
    path, samples = written(tmp_path, compression="zstd")
    opened = open_stream(remote(tmp_path), 0, store=Origin(path).store)
    assert_reads(opened, samples)
    assert len(hashed) == opened.num_shards  # of the fetched files, before they are decompressed
    record = note_of(cached(tmp_path / "l", "shard.00000.mds"))
    assert record["hash"] == f"xxh64:{opened.index.shards[0].raw.hashes['xxh64']}"


def test_the_users_own_files_are_hashed_once_a_process_and_nothing_is_written(tmp_path, hashed):
    path, samples = written(tmp_path)
    before = sorted(path.rglob("*"))
    opened = open_stream(Stream(local=str(path)), 0)
    for _ in range(2):
        assert_reads(opened, samples)
    assert len(hashed) == opened.num_shards
    assert sorted(path.rglob("*")) == before


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("damage", [flip, lambda content: content[:-1], lambda _: b""])
def test_a_cached_file_of_ours_that_was_damaged_is_brought_again(tmp_path, compression, damage):
    path, samples = written(tmp_path, compression=compression)
    origin = Origin(path)
    assert_reads(open_stream(remote(tmp_path), 0, store=origin.store), samples)
    for file in cached_shards(tmp_path / "l"):
        replaced(file, damage(file.read_bytes()))
    opened = open_stream(remote(tmp_path), 0, store=origin.store)
    assert_reads(opened, samples)
    assert len(origin.shards_asked()) == 2 * opened.num_shards


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_flipped_file_of_a_local_stream_is_refused(tmp_path, compression):
    path, _ = written(tmp_path, compression=compression)
    (file,) = path.glob("shard.00001.mds*")
    file.write_bytes(flip(file.read_bytes()))
    opened = open_stream(Stream(local=str(path)), 0)
    opened.open_shard(0)
    with pytest.raises(DataError, match=rf"{file}: its xxh64 is \w+, but index\.json says \w+; th"):
        opened.open_shard(1)


def test_a_remote_without_hashes_is_warned_of_once(tmp_path, caplog):
    path, _ = written(tmp_path, hashes=[])
    with caplog.at_level(logging.WARNING):
        opened = open_stream(remote(tmp_path), 0, store=Origin(path).store)
        opened.fetch(0)
        opened.fetch(1)
    (record,) = caplog.records
    count = opened.num_shards
    assert f"s3://bucket/r/index.json: has no hashes for {count} of {count}" in record.message


def test_neither_remotes_with_hashes_nor_local_streams_are_warned_of(tmp_path, caplog):
    path, _ = written(tmp_path)
    bare, _ = builders.write_stream_files(tmp_path / "bare", LENGTHS)
    with caplog.at_level(logging.WARNING):
        open_stream(remote(tmp_path), 0, store=Origin(path).store)
        open_stream(Stream(local=str(bare)), 0)
    assert not caplog.records


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


def test_a_bad_index_is_not_kept(tmp_path):
    path, samples = written(tmp_path)
    origin = Origin(path, lambda name, content: content[:50] if name == "index.json" else content)
    with pytest.raises(DataError, match=r"s3://bucket/r/index\.json: 50 bytes that are not JSON"):
        open_stream(remote(tmp_path), 0, store=origin.store)
    assert not list((tmp_path / "l").rglob("index.*.json"))
    assert_reads(open_stream(remote(tmp_path), 0, store=Origin(path).store), samples)


# ---------------------------------------------------------------------------- one at a time


def fetch_all(stream, origin, barrier) -> None:
    opened = open_stream(stream, 0, store=origin.store)
    barrier.wait(60)
    for shard in range(opened.num_shards):
        opened.fetch(shard)


@pytest.mark.processes
def test_processes_that_bring_the_same_shards_at_once_fetch_each_once(tmp_path):
    path, samples = written(tmp_path, compression="zstd")
    log = tmp_path / "log"

    def change(basename, content):
        with log.open("a") as file:
            file.write(f"{basename}\n")
        return content

    origin = Origin(path, change)
    opened = open_stream(remote(tmp_path), 0, store=origin.store)
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(3)
    processes = [
        fork.Process(target=fetch_all, args=(remote(tmp_path), origin, barrier)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    fetched = [name for name in log.read_text().split() if name.startswith("shard")]
    assert sorted(fetched) == sorted({shard.packed.basename for shard in opened.index.shards})
    assert_reads(opened, samples)


def test_a_shard_that_somebody_else_brings_is_skipped_by_who_will_not_wait(tmp_path):
    path, _ = written(tmp_path)
    opened = open_stream(remote(tmp_path), 0, store=Origin(path).store)
    name = opened.cache._names_of(opened.index.shards[0]).raw
    with LocalFilesystem().lock(cache_of(tmp_path / "l") / NOTES / f"{name}.lock", 1):
        assert opened.fetch(0, is_waiting=False) is None
        assert opened.fetch(1, is_waiting=False)
    assert not opened.is_here(0)
    assert opened.is_here(1)
    assert opened.fetch(0)


# ---------------------------------------------------------------------------- the disk fails


def test_a_cache_that_is_deleted_while_a_shard_is_brought_is_begun_again(tmp_path):
    path, samples = written(tmp_path)
    deleted = []

    def change(basename, content):
        if basename == "shard.00001.mds" and not deleted:
            deleted.append(basename)
            shutil.rmtree(tmp_path / "l")
        return content

    def fetch_here(files, basename, to, **options):
        return fetch(files, basename, to, **options)

    origin = Origin(path, change)

    def fetch_and_delete(files, basename, to, **options):
        fetch_here(files, basename, to, **options)
        change(basename, b"")

    stream = Stream(remote=str(path), local=str(tmp_path / "l"))
    store = Downloader(fetch=fetch_and_delete, fetch_if_there=fetch_if_there)
    assert_reads(open_stream(stream, 0, store=store), samples)
    assert deleted
    assert origin.asked == []


def test_a_folder_that_is_deleted_while_its_index_is_fetched_is_a_data_error(tmp_path):
    path, _ = written(tmp_path)

    def fetch_and_delete(files, basename, to, **options):
        Origin(path).fetch(files, basename, to, **options)
        shutil.rmtree(tmp_path / "l")

    store = Downloader(fetch=fetch_and_delete, fetch_if_there=fetch_if_there)
    with pytest.raises(DataError, match=r"index\.json: cannot be read or written \(.*No such file"):
        open_stream(remote(tmp_path), 0, store=store)


class Counted(LocalFilesystem):
    """A disk that calls a function at its n-th use."""

    def __init__(self, at: int, what) -> None:
        self.left = at
        self.what = what

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.what()


def _counting(name: str):
    def method(self, *args, **options):
        self._count()
        return getattr(LocalFilesystem, name)(self, *args, **options)

    return method


for _name in (
    "state",
    "names",
    "open",
    "map",
    "write",
    "rename",
    "link",
    "remove",
    "touch",
    "make_folder",
    "lock",
):
    setattr(Counted, _name, _counting(_name))


def read_all(tmp_path, disk, path, samples, cache_limit=None) -> None:
    (opened,) = open_streams(
        [remote(tmp_path)], cache_limit=cache_limit, disk=disk, store=Origin(path).store
    )
    assert_reads(opened, samples)
    opened.mark_planned(np.arange(opened.num_shards))
    opened.mark_finished(np.arange(opened.num_shards))


def few(tmp_path, compression):
    return builders.write_stream_files(
        tmp_path / "r",
        [300],
        compression=compression,
        hashes=["xxh64"],
        lengths_file=False,
        size_limit=1500,
    )


def killed_at(at: int, tmp_path, path, samples) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            disk = Counted(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            read_all(tmp_path, disk, path, samples)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("compression", [pytest.param(None, marks=pytest.mark.slow), "zstd"])
def test_killed_at_any_use_of_the_disk_the_next_start_needs_nothing_by_hand(tmp_path, compression):
    path, samples = few(tmp_path, compression)
    num_killed = 0
    for at in range(1, 1000):
        status = killed_at(at, tmp_path, path, samples)
        read_all(tmp_path, LocalFilesystem(), path, samples)
        assert not leftovers(tmp_path / "l")
        records = {file.name for file in (cache_of(tmp_path / "l") / NOTES).glob("*.json")}
        assert records == {f"{file.name}.json" for file in cached_shards(tmp_path / "l")}
        shutil.rmtree(tmp_path / "l")
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        num_killed += 1
    assert status == 0
    assert num_killed > 30


# ---------------------------------------------------------------------------- a shard's own head


@pytest.mark.parametrize("field", ["names", "encodings", "sizes"])
def test_a_shard_whose_head_states_other_columns_is_refused(tmp_path, field):
    path, _ = builders.write_stream_files(
        tmp_path / "r", LENGTHS, extra_columns=True, lengths_file=False
    )
    index = json.loads((path / "index.json").read_text())
    for shard in index["shards"]:
        column = shard[f"column_{field}"]
        at = shard["column_names"].index("y_blob" if field != "sizes" else "b_number")
        column[at] = {"names": "x_blob", "encodings": "str", "sizes": column[at] and 4}[field]
    (path / "index.json").write_text(json.dumps(index))
    opened = open_stream(Stream(local=str(path)), 0)
    message = rf"stream 'r', shard 0 \({path}/shard\.00000\.mds\): column_{field} is .*, but index"
    with pytest.raises(DataError, match=message):
        opened.open_shard(0)


@pytest.mark.parametrize("head", [b"{}", b"[]", b"\xff\xfe", b"null", b'{"column_names": 3}'])
def test_a_head_that_does_not_state_its_columns_is_refused(tmp_path, head):
    path, _ = builders.write_stream_files(tmp_path / "r", LENGTHS, lengths_file=False)
    shard = path / "shard.00000.mds"
    content = bytearray(shard.read_bytes())
    num_samples, begin = np.frombuffer(content, np.uint32, 2).tolist()
    content[8 + 4 * num_samples : begin] = head.ljust(begin - 8 - 4 * num_samples)
    shard.write_bytes(content)
    opened = open_stream(Stream(local=str(path)), 0)
    with pytest.raises(DataError, match=r"its config of \d+ bytes does not state its columns"):
        opened.open_shard(0)
