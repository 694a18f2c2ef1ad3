"""Files that are made here: they state their hash, and have no size before they are made."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

from streampack.errors import DataError
from streampack.mds.index import Layout, Shard, ShardFile
from streampack.storage.cache import ShardCache
from streampack.storage.eviction import CacheLimit
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.locks import NOTES_FOLDER
from streampack.storage.materialize import lock_of_shard_s
from streampack.storage.sealed import seal

LAYOUT = Layout(names=("tokens",), encodings=("",), sizes=(None,))
CONTENT = bytes(range(100))


def write(content: bytes, made: list[Path], to: Path) -> None:
    made.append(to)
    to.write_bytes(seal(b"SPTEST01", [content]) + content)


def entry(made: list[Path], number: int = 1, num_bytes: int = 1000) -> Shard:
    """Return a shard that is made here; the names of 16 are in one folder."""
    make = partial(write, CONTENT, made)
    name = f"ab{number:02x}.{number:08x}"
    file = ShardFile(basename=name, num_bytes=num_bytes, hashes={}, make=make)
    return Shard(num_samples=1, raw=file, packed=None, compression=None, layout=LAYOUT)


def cache_in(folder: Path) -> ShardCache:
    return ShardCache(StreamLocation(folder=folder, remote="texts", root=folder))


def test_a_file_is_made_once_and_found_by_other_processes(tmp_path):
    made: list[Path] = []
    shard, cache = entry(made), cache_in(tmp_path)
    assert not cache.is_here(shard)
    assert [cache.fetch(shard), cache.fetch(shard)] == [116, 0]
    assert cache_in(tmp_path).fetch(shard) == 0
    assert len(made) == 1
    path = tmp_path / "ab" / shard.raw.basename
    assert bytes(cache.map(shard).data) == path.read_bytes()
    assert not list((tmp_path / "ab" / NOTES_FOLDER).glob("*.tmp*"))


@pytest.mark.parametrize("place", [8, 20, -1], ids=["its hash", "inside", "the end"])
@pytest.mark.parametrize("has_note", [True, False])
def test_a_damaged_file_is_made_again(tmp_path, place, has_note):
    made: list[Path] = []
    shard = entry(made)
    path = Path(cache_in(tmp_path).file(shard).path)
    whole = path.read_bytes()
    data = bytearray(whole)
    data[place] ^= 1
    path.write_bytes(data)
    if not has_note:
        [note] = (path.parent / NOTES_FOLDER).glob("*.json")
        note.unlink()
    assert cache_in(tmp_path).fetch(shard) == len(whole)
    assert path.read_bytes() == whole


def test_a_file_takes_what_it_has_once_it_is_made(tmp_path):
    made: list[Path] = []
    cache = cache_in(tmp_path)
    folders = cache.cache_folders([entry(made)])
    assert len(folders) == 256
    cache.keep_within(CacheLimit(1000, folders, LocalFilesystem()))
    for number in range(9):  # of 1000 bytes before, and 116 afterwards
        cache.fetch(entry(made, number, num_bytes=100))
    assert sum(path.stat().st_size for path in (tmp_path / "ab").glob("ab*")) == 8 * 116
    cache.fetch(entry(made, 10, num_bytes=600))  # makes room for the most that it may take
    assert len(list((tmp_path / "ab").glob("ab*"))) <= 4


def test_what_was_seen_in_transit_counts_as_it_is_afterwards(tmp_path):
    limit = CacheLimit(1000, [tmp_path], LocalFilesystem())
    limit.reserve(tmp_path, {"a.00000001": 900})
    limit.reserve(tmp_path, {"b.00000002": 50})
    (tmp_path / "a.00000001").write_bytes(CONTENT)
    limit.reserve(tmp_path, {"c.00000003": 700})
    assert (tmp_path / "a.00000001").exists()


def test_its_lock_is_waited_for_as_long_as_its_holder_lives(tmp_path):
    made: list[Path] = []
    assert lock_of_shard_s(cache_in(tmp_path).location, entry(made).raw) == float("inf")
    begun, end = threading.Event(), threading.Event()

    def make(to: Path) -> None:
        begun.set()
        end.wait(10)
        write(CONTENT, made, to)

    file = ShardFile(basename="ab.00000001", num_bytes=1, hashes={}, make=make)
    shard = Shard(num_samples=1, raw=file, packed=None, compression=None, layout=LAYOUT)
    sizes: list[int] = []
    threads = [
        threading.Thread(target=lambda: sizes.append(cache_in(tmp_path).fetch(shard)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    begun.wait(10)
    assert not cache_in(tmp_path).is_free(shard)
    end.set()
    for thread in threads:
        thread.join()
    assert sorted(sizes) == [0, 116]


def test_a_failure_is_raised_and_leaves_nothing(tmp_path):
    def fail(to: Path) -> None:
        to.write_bytes(b"half")
        raise DataError("rows.jsonl, row 3: is bad")

    file = ShardFile(basename="ab.00000001", num_bytes=1, hashes={}, make=fail)
    shard = Shard(num_samples=1, raw=file, packed=None, compression=None, layout=LAYOUT)
    cache = cache_in(tmp_path)
    with pytest.raises(DataError, match="row 3: is bad"):
        cache.fetch(shard)
    assert [path.name for path in (tmp_path / "ab").rglob("*") if path.is_file()] == [
        "ab.00000001.lock"
    ]
