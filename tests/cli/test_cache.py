"""`streampack cache` lists the versions of remote streams on this disk, and removes them."""

from __future__ import annotations

import json
import shutil

import pytest

from streampack.streams import Stream, open_stream
from tests.helpers import builders
from tests.helpers.caches import assert_reads
from tests.helpers.verbs import call_verb


@pytest.fixture
def local(tmp_path):
    """A cache with a stream that grew from 3 to 5 shards, and with another remote."""
    for num_samples in (6, 10):
        shutil.rmtree(tmp_path / "code", ignore_errors=True)
        options = {"hashes": ["xxh64"], "size_limit": 900}
        _, samples = builders.write_stream_files(tmp_path / "code", [60] * num_samples, **options)
        stream = Stream(remote=str(tmp_path / "code"), local=str(tmp_path / "l"))
        assert_reads(open_stream(stream, 0), samples)
    builders.write_stream_files(tmp_path / "web", [60] * 4, size_limit=900)
    stream = Stream(remote=str(tmp_path / "web"), local=str(tmp_path / "l"))
    open_stream(stream, 0).open_shard(0)
    return tmp_path / "l"


def listed(local, *options):
    remotes = json.loads(call_verb("cache", local, "--json", *options))
    return {
        remote["remote"].rpartition("/")[2]: [
            (one["is_last"], one["shards_here"], one["shards"]) for one in remote["versions"]
        ]
        for remote in remotes
    }


def test_remotes_versions_shards_and_bytes_are_listed(local, tmp_path):
    assert listed(local) == {"code": [(False, 3, 3), (True, 5, 5)], "web": [(True, 1, 2)]}
    shown = call_verb("cache", tmp_path)  # a folder above
    assert "5 of 5" in shown
    assert "(last)" in shown
    code = next(r for r in json.loads(call_verb("cache", local, "--json")) if r["bytes"] > 3000)
    assert code["bytes"] == sum(file.stat().st_size for file in (tmp_path / "code").glob("*.mds"))


def test_old_versions_are_removed_and_the_last_stays_whole(local, tmp_path):
    for path in (tmp_path / "code").glob("shard.00003*"):
        path.unlink()  # now the cache has the only copy
    assert listed(local, "--remove", "old") == {"code": [(True, 5, 5)], "web": [(True, 1, 2)]}
    open_stream(Stream(remote=str(tmp_path / "code"), local=str(local)), 0).open_shard(3)


def test_shards_that_only_an_old_version_names_are_removed(local, tmp_path):
    path, _ = builders.write_stream_files(
        tmp_path / "new", [60] * 10, seed=1, hashes=["xxh64"], size_limit=900
    )
    shutil.rmtree(tmp_path / "code")
    path.rename(tmp_path / "code")
    open_stream(Stream(remote=str(tmp_path / "code"), local=str(local)), 0).open_shard(0)
    assert listed(local, "--remove", "old")["code"] == [(True, 1, 5)]
    assert len(list(local.rglob("shard.*.mds.????????"))) == 1 + 1  # and the other remote's


def test_all_is_removed_and_files_of_mosaicmls_layout_stay(local):
    (local / "shard.00000.mds").write_bytes(b"theirs")
    assert listed(local, "--remove", "all") == {}
    assert [path.name for path in local.iterdir()] == ["shard.00000.mds"]
