"""An entry says that a file is ours, and which version of it was verified."""

from __future__ import annotations

import json

import pytest

from streampack.storage.filesystem import FileState, LocalFilesystem
from streampack.storage.manifest import PENDING, CacheEntry, Manifest

STATE = FileState(num_bytes=3, mtime_ns=7, inode=1)
ENTRY = CacheEntry.of(STATE, hash_="md5:0f", boot_id="boot", origin="a:3:7")


def test_an_entry_vouches_for_one_version_hash_and_boot(tmp_path):
    manifest = Manifest(tmp_path, LocalFilesystem())
    assert manifest.read("a/b.mds") is None
    manifest.write("a/b.mds", ENTRY)
    entry = manifest.read("a/b.mds")
    assert entry.matches(STATE)
    assert entry.is_verified(STATE, "md5:0f", "boot")
    assert not entry.is_verified(STATE, "md5:00", "boot")
    assert not entry.is_verified(STATE, "md5:0f", "another boot")
    for other in (FileState(4, 7, 1), FileState(3, 8, 1)):
        assert not entry.matches(other)
        assert not entry.is_verified(other, "md5:0f", "boot")
    assert [file.name for file in (tmp_path / ".streampack").iterdir()] == ["a_b.mds.json"]


def test_a_pending_entry_matches_no_file_and_claims_none(tmp_path):
    manifest = Manifest(tmp_path, LocalFilesystem())
    manifest.write("a", PENDING)
    assert not manifest.read("a").matches(STATE)
    assert not manifest.has("a")
    manifest.remove("a")
    assert manifest.read("a") is None
    manifest.remove("a")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "null", "\x00" * 90, "[" * 10**5, '{"num_bytes": 3}']
)
def test_an_unreadable_entry_still_marks_a_file_as_ours(tmp_path, text):
    manifest = Manifest(tmp_path, LocalFilesystem())
    manifest.write("a", PENDING)
    manifest.path("a").write_text(text)
    assert not manifest.read("a").matches(STATE)
    assert manifest.has("a")


def test_an_entry_with_values_of_other_types_is_unreadable(tmp_path):
    manifest = Manifest(tmp_path, LocalFilesystem())
    manifest.write("a", ENTRY)
    fields = json.loads(manifest.path("a").read_text())
    for wrong in ({"mtime_ns": None}, {"origin": 3}):
        manifest.path("a").write_text(json.dumps(fields | wrong))
        assert not manifest.read("a").matches(STATE)


def test_an_entry_without_an_origin_is_read(tmp_path):
    manifest = Manifest(tmp_path, LocalFilesystem())
    manifest.write("a", ENTRY)
    fields = json.loads(manifest.path("a").read_text())
    assert fields.pop("origin") == "a:3:7"
    manifest.path("a").write_text(json.dumps(fields))
    assert manifest.read("a").matches(STATE)
