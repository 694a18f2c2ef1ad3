"""Shards appear whole or not at all, and existing files stay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from streampack import Download
from streampack.errors import DataError
from streampack.streams import Stream, open_stream
from tests.helpers import builders
from tests.helpers.caches import LENGTHS, NOTES, assert_reads, cache_of
from tests.helpers.examples import crossed
from tests.helpers.locations import location_of

COMPRESSIONS = ["br", "br:3", "bz2", "gz", "gz:1", "snappy", "zstd", "zstd:7"]


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if file.is_file()}


@pytest.mark.parametrize(("compression", "lengths_file"), crossed(COMPRESSIONS, [False, True]))
def test_local_compressed_shards_are_read_and_kept(tmp_path, compression, lengths_file):
    path, samples = builders.write_stream_files(
        tmp_path / "s", LENGTHS, compression=compression, lengths_file=lengths_file
    )
    before = names(path)
    assert_reads(open_stream(Stream(local=str(path)), 0), samples)
    assert names(path) == before
    assert len(names(path / NOTES)) == len({n for n in before if n.startswith("shard")})


@pytest.mark.parametrize(
    ("compression", "keep_zip", "scheme"),
    [
        (None, False, ""),
        (None, True, "file://"),
        ("zstd", True, ""),
        ("zstd", False, "file://"),
        ("gz", False, ""),
        ("gz", True, "file://"),
    ],
)
def test_remote_shards_are_fetched_checked_and_read(tmp_path, scheme, compression, keep_zip):
    path, samples = builders.write_stream_files(
        tmp_path / "remote", LENGTHS, compression=compression, hashes=["md5", "xxh64"]
    )
    before = names(path)
    local = tmp_path / "local"
    stream = Stream(
        remote=f"{scheme}{path}",
        local=str(local),
        download=Download(hash="xxh64", keep_zip=keep_zip),
    )

    opened = open_stream(stream, 0)

    assert opened.cache.is_remote
    assert opened.shards.has_lengths
    assert_reads(opened, samples)
    assert names(path) == before
    packed = {name for name in names(cache_of(local)) if name.endswith(".zip")}
    assert bool(packed) == (keep_zip and compression is not None)
    assert not list(local.rglob("*.tmp*"))


def test_split_is_a_subfolder_of_remote_and_local(tmp_path):
    _, samples = builders.write_stream_files(tmp_path / "r" / "train", LENGTHS)
    stream = Stream(remote=str(tmp_path / "r"), local=str(tmp_path / "l"), split="train")
    assert_reads(open_stream(stream, 0), samples)
    same = Stream(remote=str(tmp_path / "r" / "train"), local=str(tmp_path / "l"))
    assert location_of(same).folder == cache_of(tmp_path / "l")


def test_merged_index_with_subfolders_is_read(tmp_path):
    parts = [
        builders.write_stream_files(tmp_path / "r" / name, LENGTHS, seed=i, lengths_file=False)
        for i, name in enumerate(["00000", "00001"])
    ]
    shards = []
    for path, _ in parts:
        for shard in json.loads((path / "index.json").read_text())["shards"]:
            shard["raw_data"]["basename"] = f"{path.name}/{shard['raw_data']['basename']}"
            shards.append(shard)
    (tmp_path / "r" / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    samples = parts[0][1] + parts[1][1]
    assert_reads(open_stream(Stream(local=str(tmp_path / "r")), 0), samples)
    remote = Stream(remote=str(tmp_path / "r"), local=str(tmp_path / "l"))
    assert_reads(open_stream(remote, 0), samples)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"<html>", "6 bytes that are not JSON"),
        (b'{"version": 3, "shards": []}', "version is 3, but only MDS version 2 is known"),
    ],
)
def test_a_remote_index_that_is_wrong_where_it_comes_from_is_told_as_that(tmp_path, text, said):
    path, samples = builders.write_stream_files(tmp_path / "r", LENGTHS)
    right = (path / "index.json").read_bytes()
    (path / "index.json").write_bytes(text)
    stream = Stream(remote=str(path), local=str(tmp_path / "l"))

    with pytest.raises(DataError, match=rf"r/index\.json: {said}") as caught:
        open_stream(stream, 0)

    assert "download" not in str(caught.value)
    # Once fixed at the origin, it is used: nothing of the wrong one was kept.
    (path / "index.json").write_bytes(right)
    assert open_stream(stream, 0).num_samples == len(samples)


def test_a_cache_that_cannot_be_written_is_refused(tmp_path):
    path, _ = builders.write_stream_files(tmp_path / "r", LENGTHS)
    local = tmp_path / "l"
    opened = open_stream(Stream(remote=str(path), local=str(local)), 0)
    notes = cache_of(local) / NOTES
    shutil.rmtree(notes)
    notes.write_text("")
    with pytest.raises(DataError, match=r"cannot be written \(.*\); \d+ bytes are needed: free"):
        opened.open_shard(0)
