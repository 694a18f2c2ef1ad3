"""A record says that a file is ours, and for which version of it what was found."""

from __future__ import annotations

import json

import pytest

from streampack.errors import DataError
from streampack.mds import mosaic
from streampack.mds.index import Part
from streampack.storage.filesystem import FileState, LocalFilesystem
from streampack.storage.manifest import Manifest, file_digest, wanted_hash

STATE = FileState(num_bytes=3, mtime_ns=7, inode=1)


def test_what_was_found_is_remembered_for_one_version_hash_and_boot_of_a_file(tmp_path):
    records = Manifest(tmp_path, LocalFilesystem())
    assert records.read("a/b.mds") is None
    records.remember("a/b.mds", STATE, "md5:0f", "boot")
    record = records.read("a/b.mds")
    assert record.matches(STATE)
    assert record.is_verified(STATE, "md5:0f", "boot")
    assert not record.is_verified(STATE, "md5:00", "boot")
    assert not record.is_verified(STATE, "md5:0f", "another boot")
    for other in (FileState(4, 7, 1), FileState(3, 8, 1)):
        assert not record.matches(other)
        assert not record.is_verified(other, "md5:0f", "boot")
    assert [file.name for file in (tmp_path / ".streampack").iterdir()] == ["a_b.mds.json"]


def test_a_file_under_way_is_of_no_version_and_what_lies_there_is_not_ours(tmp_path):
    records = Manifest(tmp_path, LocalFilesystem())
    records.reserve("a")
    assert not records.read("a").matches(STATE)
    assert not records.has("a")
    records.remove("a")
    assert records.read("a") is None
    records.remove("a")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "null", "\x00" * 90, "[" * 10**5, '{"num_bytes": 3}']
)
def test_a_record_that_cannot_be_read_still_says_that_the_file_is_ours(tmp_path, text):
    records = Manifest(tmp_path, LocalFilesystem())
    records.reserve("a")
    records.path("a").write_text(text)
    assert not records.read("a").matches(STATE)
    assert records.has("a")


def test_values_of_other_types_are_not_believed(tmp_path):
    records = Manifest(tmp_path, LocalFilesystem())
    records.remember("a", STATE, "", "")
    fields = json.loads(records.path("a").read_text())
    for wrong in ({"mtime_ns": None}, {"origin": 3}):
        records.path("a").write_text(json.dumps(fields | wrong))
        assert not records.read("a").matches(STATE)


def test_a_record_of_before_origins_were_kept_is_read(tmp_path):
    records = Manifest(tmp_path, LocalFilesystem())
    records.remember("a", STATE, "", "", "a:3:7")
    fields = json.loads(records.path("a").read_text())
    assert fields.pop("origin") == "a:3:7"
    records.path("a").write_text(json.dumps(fields))
    assert records.read("a").matches(STATE)


@pytest.mark.parametrize("algorithm", sorted(mosaic.get_hashes()))
def test_every_hash_of_mosaicml_is_the_same_here(tmp_path, algorithm):
    content = bytes(range(256)) * 5000  # more than one piece
    (tmp_path / "a").write_bytes(content)
    expected = f"{algorithm}:{mosaic.get_hash(algorithm, content)}"
    part = Part(basename="a", num_bytes=len(content), hashes={algorithm: expected.split(":")[1]})
    assert wanted_hash(part, None, "x") == expected
    assert wanted_hash(part, algorithm, "x") == expected
    assert file_digest(LocalFilesystem(), tmp_path / "a", expected) == expected


def test_hashes_that_nobody_knows_are_left_out():
    part = Part(basename="a", num_bytes=1, hashes={"crc99": "00", "shake_128": "00"})
    assert wanted_hash(part, None, "x") == ""
    with pytest.raises(DataError, match=r"x: a has no 'crc99' hash, only \['crc99', 'shake_128'\]"):
        wanted_hash(part, "crc99", "x")
