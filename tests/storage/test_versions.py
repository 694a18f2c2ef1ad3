"""Several versions and remotes share a `local`."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.errors import DataError
from streampack.storage.location import StreamLocation, remote_identity
from streampack.streams import Stream, open_stream, open_streams
from tests.helpers import builders
from tests.helpers.caches import (
    Buckets,
    assert_reads,
    cached_shards,
    write_bare,
)
from tests.helpers.examples import examples
from tests.helpers.locations import location_of


def test_hashes_tell_that_a_file_with_another_time_is_the_same(tmp_path):
    path, samples = write_bare(tmp_path / "s", seed=0, hashes=["xxh64"])
    opened = open_stream(Stream(local=str(path)), 0)
    for file in path.glob("*.mds"):
        os.utime(file, (1, 1))
    assert_reads(opened, samples)


def test_a_remote_folder_that_was_rewritten_with_the_old_times_is_noticed(tmp_path):
    path, samples = write_bare(tmp_path / "r", seed=0)
    stream = Stream(remote=str(path), local=str(tmp_path / "l"))
    assert_reads(open_stream(stream, 0), samples)
    times = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    other, others = write_bare(tmp_path / "other", seed=1)
    for file in other.iterdir():  # like rsync -t and tar
        os.utime(file, ns=(times[file.name], times[file.name]))
        os.replace(file, path / file.name)
    assert_reads(open_stream(stream, 0), others)


SMALL = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
PLACES = ("a", "b")  # two remotes, which are also read as local streams
FOLDERS = ("x", "y")
OPENINGS = st.tuples(
    st.just("open"), st.sampled_from(PLACES), st.sampled_from((*FOLDERS, "in place"))
)
STEPS = st.one_of(
    OPENINGS,
    OPENINGS,
    st.tuples(st.just("rewrite"), st.sampled_from(PLACES), st.sampled_from(("new", "over"))),
    st.tuples(st.just("delete"), st.sampled_from(FOLDERS), st.none()),
    st.tuples(st.just("read_on"), st.integers(0, 3), st.integers(0, 2)),
)


@pytest.fixture(scope="module", params=["no hashes", "hashes in the length file", "zstd"])
def versions(request, tmp_path_factory):
    """Four versions of a stream; without zstd, their index.json is the same, byte for byte."""
    folder = tmp_path_factory.mktemp("versions")
    compression = "zstd" if request.param == "zstd" else None
    write_one = write_bare if request.param == "no hashes" else builders.write_stream_files
    options = {"size_limit": 300, "compression": compression}
    return [write_one(folder / str(i), SMALL, seed=i, **options) for i in range(4)]


class History:
    """Two remotes that are rewritten, and the streams opened from them at each version."""

    def __init__(self, top: Path, versions: list) -> None:
        self.top, self.versions = top, versions
        self.now = dict(zip(PLACES, (0, 1), strict=True))
        self.kept: list[tuple] = []
        self.times = itertools.count(1)
        for place in PLACES:
            self.put(place)

    def put(self, place: str) -> None:
        folder = self.top / place
        folder.mkdir(exist_ok=True)
        for file in self.versions[self.now[place]][0].iterdir():
            shutil.copyfile(file, folder / file.name)
            os.utime(folder / file.name, ns=(1, next(self.times)))

    def rewrite(self, place: str, how: str) -> None:
        self.now[place] = (self.now[place] + 2) % 4
        if how == "new":
            shutil.rmtree(self.top / place)
        self.put(place)

    def delete(self, folder: str, _: None) -> None:
        shutil.rmtree(self.top / folder, ignore_errors=True)

    def open(self, place: str, folder: str) -> None:
        stream = Stream(local=self.top / place)
        if folder != "in place":
            stream = Stream(remote=self.top / place, local=self.top / folder)
        version = self.now[place]
        opened = open_stream(stream, 0)
        for shard in range(0, opened.num_shards, 2):
            self.check(opened, version, shard)
        self.kept.append((opened, version))

    def read_on(self, which: int, shard: int) -> None:
        if self.kept:
            opened, version = self.kept[which % len(self.kept)]
            with contextlib.suppress(DataError):
                self.check(opened, version, shard % opened.num_shards)

    def check(self, opened, version: int, shard: int) -> None:
        first, last = opened.first_sample[shard : shard + 2]
        data = opened.open_shard(shard)
        found = [data.tokens.read(data.data, i).tolist() for i in range(last - first)]
        assert found == [sample.tolist() for sample in self.versions[version][1][first:last]]


FEW = examples(8, many=15)
MANY = examples(500)


@pytest.mark.parametrize("how_many", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_stream_gives_the_version_it_was_opened_with_or_an_error(
    tmp_path_factory, versions, how_many
):
    @how_many
    @given(steps=st.lists(STEPS, min_size=3, max_size=12))
    def law(steps):
        top = tmp_path_factory.mktemp("law")
        history = History(top, versions)
        for name, *arguments in steps:
            getattr(history, name)(*arguments)
        shutil.rmtree(top)

    law()


def in_store(buckets: Buckets, local: Path, bucket: str = "b", **options):
    stream = Stream(remote=f"s3://{bucket}/data", local=str(local), **options)
    return open_stream(stream, 0, store=buckets.store)


def shards_asked(buckets: Buckets) -> list[str]:
    asked = [name for name in buckets.asked if name.startswith("shard")]
    buckets.asked.clear()
    return asked


@pytest.fixture(params=["hashes", "no hashes, but indexed"])
def growing(request, tmp_path):
    """A function that writes a stream of 3 or 5 shards in a bucket, and the bucket."""
    options = {"hashes": ["xxh64"]} if request.param == "hashes" else {}

    def grow(num_samples: int, seed: int = 0):
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        lengths, options["size_limit"] = [60] * num_samples, 900
        return builders.write_stream_files(tmp_path / "b", lengths, seed=seed, **options)[1]

    return grow, Buckets(b=tmp_path / "b")


def test_of_a_stream_that_grew_only_the_new_shards_are_fetched(tmp_path, growing):
    grow, buckets = growing
    local, samples = tmp_path / "l", grow(6)
    assert_reads(in_store(buckets, local), samples)
    assert len(shards_asked(buckets)) == 3
    samples = grow(10)
    assert_reads(in_store(buckets, local, check_remote=True), samples)
    assert shards_asked(buckets) == ["shard.00003.mds", "shard.00004.mds"]
    assert_reads(in_store(buckets, local), samples)  # this is now the last version
    assert buckets.asked == []


def test_without_hashes_no_shard_of_one_version_is_used_for_another(tmp_path):
    path, samples = write_bare(tmp_path / "b", [60] * 6, size_limit=900)
    buckets = Buckets(b=path)
    assert_reads(in_store(buckets, tmp_path / "l"), samples)
    shutil.rmtree(path)
    _, others = write_bare(path, [60] * 8, seed=1, size_limit=900)  # entries 0 to 2 are the same
    assert_reads(in_store(buckets, tmp_path / "l", check_remote=True), others)


def test_the_last_version_opens_without_the_store(tmp_path, growing):
    grow, buckets = growing
    grow(6)
    in_store(buckets, tmp_path / "l")
    samples = grow(10)
    assert_reads(in_store(buckets, tmp_path / "l", check_remote=True), samples)
    shutil.rmtree(tmp_path / "b")
    assert_reads(in_store(buckets, tmp_path / "l"), samples)
    assert_reads(in_store(buckets, tmp_path / "l", check_remote=True), samples)
    moved = shutil.copytree(tmp_path / "l", tmp_path / "moved")
    assert_reads(in_store(buckets, moved), samples)


def test_a_cache_that_cannot_be_written_is_read_all_the_same(tmp_path):
    path, samples = write_bare(tmp_path / "r")
    stream = Stream(remote=str(path), local=str(tmp_path / "l"))
    assert_reads(open_stream(stream, 0), samples)
    assert_reads(open_stream(stream, 0, disk=builders.ReadOnlyDisk()), samples)


def test_a_second_remote_with_the_same_local_is_another_folder(tmp_path):
    one, samples = write_bare(tmp_path / "one")
    two, others = write_bare(tmp_path / "two", seed=1)
    buckets = Buckets(one=one, two=two)
    for _ in range(2):
        assert_reads(in_store(buckets, tmp_path / "l", "one"), samples)
        assert_reads(in_store(buckets, tmp_path / "l", "two"), others)
    assert len(shards_asked(buckets)) == 2 * len(list(one.glob("*.mds")))
    streams = [Stream(remote=f"s3://{name}/data", local=tmp_path / "l") for name in ("one", "two")]
    both = open_streams([*streams, streams[0]], store=buckets.store)
    for opened, expected in zip(both, (samples, others, samples), strict=True):
        assert_reads(opened, expected)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("s3://b/x", "s3://b/x/", True),
        ("S3://b/x", "s3://b/x", True),
        ("s3://b/x", "s3://b/y", False),
        ("sftp://me:secret@host/x", "sftp://me:newer@host/x", True),
        ("sftp://me@host/x", "sftp://you@host/x", False),
        ("{tmp}/r", "file://{tmp}/r", True),
        ("{tmp}/r", "{tmp}/link", True),
        ("{tmp}/r", "{tmp}/q/../r/", True),
        ("{tmp}/r", "{tmp}/q", False),
        ("gs://x/y", "gs://x/y/", True),
    ],
)
def test_one_remote_may_be_written_in_several_ways(tmp_path, one, other, is_same):
    (tmp_path / "r").mkdir()
    (tmp_path / "q").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "r")

    def location(remote: str, split: str) -> StreamLocation:
        return location_of(
            Stream(remote=remote.format(tmp=tmp_path), local=str(tmp_path / "l"), split=split)
        )

    for split in (None, "train"):
        folders = {location(remote, split).folder for remote in (one, other)}
        assert (len(folders) == 1) is is_same, split
        assert "secret" not in remote_identity(location(one, split).remote or "")


def test_old_versions_are_evicted_like_any_other_shard(tmp_path, growing):
    grow, buckets = growing
    samples = grow(6)
    stream = Stream(remote="s3://b/data", local=str(tmp_path / "l"), check_remote=True)
    (opened,) = open_streams([stream], cache_limit=10**6, store=buckets.store)
    assert_reads(opened, samples)
    size = int(opened.raw_bytes[0])
    others = grow(8, seed=1)
    (opened,) = open_streams([stream], cache_limit=4 * size, store=buckets.store)
    assert_reads(opened, others)
    assert len(cached_shards(tmp_path / "l")) == 4
    buckets.asked.clear()
    assert_reads(opened, others)
    assert buckets.asked == []
