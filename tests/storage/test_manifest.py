"""A note says which version of a file was verified, with which hash, in which boot."""

from __future__ import annotations

import pytest

from streampack.storage.filesystem import FileState, LocalFilesystem
from streampack.storage.locks import CacheEntry, Manifest

ENTRY = CacheEntry.of(FileState(num_bytes=3, mtime_ns=7, inode=1), "md5:0f", "boot")


def test_a_note_is_read_as_it_was_written_until_it_is_removed(tmp_path):
    manifest = Manifest(tmp_path, LocalFilesystem())
    assert manifest.read("a.1b7e40d2") is None
    manifest.write("a.1b7e40d2", ENTRY)
    assert manifest.read("a.1b7e40d2") == ENTRY
    assert [file.name for file in (tmp_path / ".streampack").iterdir()] == ["a.1b7e40d2.json"]
    for _ in range(2):
        manifest.remove("a.1b7e40d2")
        assert manifest.read("a.1b7e40d2") is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "null", "\x00" * 90, "[" * 10**5, '{"num_bytes": "3"}']
)
def test_an_unreadable_note_is_none(tmp_path, text):
    manifest = Manifest(tmp_path, LocalFilesystem())
    manifest.write("a", ENTRY)
    manifest.path("a").write_text(text)
    assert manifest.read("a") is None


@pytest.mark.parametrize("changed", [{"mtime_ns": 8}, {"num_bytes": 4}, {"boot_id": "next"}])
def test_a_note_of_another_version_or_boot_is_another(changed):
    fields = {"num_bytes": 3, "mtime_ns": 7, "hash": "md5:0f", "boot_id": "boot"}
    assert CacheEntry(**fields) == ENTRY
    assert CacheEntry(**fields | changed) != ENTRY
