"""Only one process at a time fetches a file; if it fails, those waiting try in turn."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path

import pytest

from streampack.errors import DataError
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.locks import CacheEntry, FileLocks


class WaitedFor(LocalFilesystem):
    """A disk that signals when a caller begins to wait for a lock."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)

    def lock(self, path, timeout_s):
        self.asked.release()
        return super().lock(path, timeout_s)


def test_who_waited_for_a_holder_that_failed_tries_too(tmp_path):
    disk, tried = WaitedFor(), []
    waiter = threading.Thread(target=hold, args=(FileLocks(tmp_path, disk), tried))

    def fail() -> None:
        with FileLocks(tmp_path, LocalFilesystem()).hold("a", 60):
            waiter.start()
            assert disk.asked.acquire(timeout=30)
            raise DataError("s3://a: no answer")

    with pytest.raises(DataError, match="no answer"):
        fail()
    waiter.join(30)
    assert tried == ["a"]


def hold(locks: FileLocks, tried: list[str]) -> None:
    with locks.hold("a", 60):
        tried.append("a")


def test_a_holder_for_too_long_is_an_error_that_names_the_lock(tmp_path):
    locks = FileLocks(tmp_path, LocalFilesystem())
    message = (
        r"a\.lock: another process has held this lock for 0 s; check whether it hangs, or raise"
    )
    with locks.hold("a", 1), pytest.raises(DataError, match=message), locks.hold("a", 0.05):
        pass


def test_each_holder_before_us_has_its_own_time(tmp_path):
    disk = WaitedFor()
    locks = FileLocks(tmp_path, disk)
    outcomes: list[object] = []

    class Waiting(WaitedFor):
        """A disk on which the lock always seems to have been taken just now."""

        def state(self, path: Path):
            LocalFilesystem.touch(self, path, time.time())
            return super().state(path)

    patient = Waiting()
    with locks.hold("a", 60):

        def wait() -> None:
            with FileLocks(tmp_path, patient).hold("a", 0.05):
                outcomes.append("held")

        thread = threading.Thread(target=wait)
        thread.start()
        for _ in range(3):  # it gave up waiting twice, and each time found a recent owner
            assert patient.asked.acquire(timeout=30)
    thread.join(30)
    assert outcomes == ["held"]


def test_a_note_is_written_where_nothing_was_locked_yet(tmp_path):
    locks = FileLocks(tmp_path / "cache", LocalFilesystem())
    entry = CacheEntry(num_bytes=3, mtime_ns=5, hash="md5:0")
    locks.write_entry("a", entry)
    assert locks.read_entry("a") == entry


@pytest.mark.parametrize("note", ["", "{", "[]", "{}", '{"num_bytes": "3"}', '{"num_bytes": null}'])
def test_a_damaged_note_is_none(tmp_path, note):
    locks = FileLocks(tmp_path, LocalFilesystem())
    locks.write_entry("a", CacheEntry(num_bytes=3))
    locks.entry_path("a").write_text(note)
    assert locks.read_entry("a") is None


def test_a_sweep_removes_what_the_dead_left_and_nothing_of_the_living(tmp_path):
    disk = LocalFilesystem()
    locks = FileLocks(tmp_path, disk)
    with locks.hold("a/x", 1), locks.hold("b", 1), locks.temporary("a/x") as living:
        living.write_bytes(b"half")
        folder = tmp_path / ".streampack"
        dead = folder / f"c.{uuid.uuid4().hex}.tmp.1"
        dead.mkdir()
        (dead / "x").write_text("half")
        for name in (f"c.{uuid.uuid4().hex}.tmp", "c.json", "notes.txt"):
            (folder / name).write_text("{}")
        FileLocks(tmp_path, disk).sweep()
        left = {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}
        assert left == {living.name, "c.json", "notes.txt"}
    FileLocks(tmp_path, disk).sweep()
    left = {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}
    assert left == {"c.json", "notes.txt"}


def test_remains_of_one_file_are_not_those_of_another(tmp_path):
    locks = FileLocks(tmp_path, LocalFilesystem())
    with (
        locks.hold("shard.mds", 1),
        locks.temporary("shard.mds") as mine,
        locks.temporary("shard.mds.zstd") as other,
    ):
        mine.write_text("x")
        other.write_text("x")
        locks.remove_leftovers("shard.mds")
        assert not mine.exists()
        assert other.exists()


def test_a_sweep_of_a_folder_that_is_not_there_makes_none(tmp_path):
    FileLocks(tmp_path / "none", LocalFilesystem()).sweep()
    assert not list(tmp_path.iterdir())
