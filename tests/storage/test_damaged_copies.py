"""Damaged copies of ours are refetched once; files of others are not touched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from streampack import Download
from streampack.errors import DataError
from streampack.streams import Stream, open_stream
from streampack.streams.shard_pool import shard_pool
from tests.helpers.caches import (
    LENGTHS,
    Buckets,
    assert_reads,
    at_once,
    cached,
    cached_shards,
    read_all,
    write_bare,
)


@pytest.fixture
def new_process():
    """Forget everything this process has open, as if it were a new one."""
    return shard_pool().clear


def flip_offset(file: Path, sample: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[4 + 4 * sample + 1] ^= 0x40
    time_ns = file.stat().st_mtime_ns
    file.write_bytes(content)
    os.utime(file, ns=(time_ns, time_ns))  # like bit rot


@pytest.mark.parametrize("keep_zip", [False, True])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_cached_shard_with_damaged_offsets_is_fetched_once_more(
    tmp_path, compression, keep_zip, new_process
):
    path, samples = write_bare(tmp_path / "r", seed=0, compression=compression)
    buckets = Buckets(b=path)
    stream = Stream(
        remote="s3://b/r", local=str(tmp_path / "l"), download=Download(keep_zip=keep_zip)
    )
    assert_reads(open_stream(stream, 0, store=buckets.store), samples)
    flip_offset(cached(tmp_path / "l", "shard.00000.mds"))
    buckets.asked.clear()
    for _ in range(2):
        new_process()
        assert_reads(open_stream(stream, 0, store=buckets.store), samples)
    assert len(buckets.asked) == 1


def test_a_shard_that_is_damaged_at_its_origin_is_fetched_twice_and_named(tmp_path):
    path, samples = write_bare(tmp_path / "r", seed=0)
    whole = (path / "shard.00000.mds").read_bytes()
    flip_offset(path / "shard.00000.mds")
    buckets = Buckets(b=path)
    stream = Stream(remote="s3://b/r", local=str(tmp_path / "l"))
    opened = open_stream(stream, 0, store=buckets.store)
    buckets.asked.clear()
    message = r"s3://b/r/shard\.00000\.mds.*refetched.* damaged at its origin: rewrite it"
    with pytest.raises(DataError, match=message):
        opened.open_shard(0)
    assert buckets.asked == ["shard.00000.mds"] * 2
    # Once the origin is fixed, the next start needs nothing by hand.
    (path / "shard.00000.mds").write_bytes(whole)
    assert_reads(open_stream(stream, 0, store=buckets.store), samples)


def test_a_damaged_shard_that_is_not_ours_is_never_touched(tmp_path):
    path, samples = write_bare(tmp_path / "r")
    shutil.copytree(path, tmp_path / "l")
    theirs = tmp_path / "l" / "shard.00000.mds"
    flip_offset(theirs)
    content = theirs.read_bytes()
    with pytest.raises(DataError, match="the shard is damaged: if it is a cached copy, delete"):
        open_stream(Stream(local=str(tmp_path / "l")), 0).open_shard(0)
    assert_reads(open_stream(Stream(remote=str(path), local=str(tmp_path / "l")), 0), samples)
    assert theirs.read_bytes() == content


def open_all(remote: str, local: str, barrier, results) -> None:
    opened = open_stream(Stream(remote=remote, local=local), 0)
    barrier.wait()
    results.put(sum(map(sum, read_all(opened))))


@pytest.mark.processes
def test_processes_that_find_one_damaged_shard_all_go_on(tmp_path):
    path, samples = write_bare(tmp_path / "r", seed=0)
    local = tmp_path / "l"
    assert_reads(open_stream(Stream(remote=str(path), local=str(local)), 0), samples)
    for file in cached_shards(local):
        flip_offset(file)
    sums = at_once(open_all, [(str(path), str(local))] * 3)
    assert sums == [sum(int(sample.sum()) for sample in samples)] * 3


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def flip_head(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)


def flip_length(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-8 * len(LENGTHS) - 4] ^= 1  # the last sample's length; the edges come after it
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("lengths.bin", damage) for damage in (cut, flip_head, flip_length)),
        *(("index.json", damage) for damage in (cut, flip_head)),
    ],
)
def test_a_damaged_length_file_or_index_of_ours_is_fetched_again(tmp_path, name, damage):
    path, samples = write_bare(tmp_path / "r", seed=0)
    stream = Stream(remote=str(path), local=str(tmp_path / "l"))
    before = open_stream(stream, 0)
    damage(cached(tmp_path / "l", name))
    opened = open_stream(stream, 0)
    for shard in range(opened.num_shards):
        lengths = opened.shard_lengths(shard)
        first = int(opened.first_sample[shard])
        np.testing.assert_array_equal(lengths, LENGTHS[first : first + len(lengths)])
    assert cached(tmp_path / "l", name).read_bytes() == (path / name).read_bytes()
    assert_reads(before, samples)


def test_a_length_file_that_another_process_has_mended_is_kept(tmp_path):
    path, _ = write_bare(tmp_path / "r", seed=0)
    metadata = open_stream(Stream(remote=str(path), local=str(tmp_path / "l")), 0).cache.metadata
    fetched, answers = metadata.fetched.copy(), iter([DataError("is damaged"), "lengths"])

    def read():
        if isinstance(answer := next(answers), DataError):
            raise answer
        return answer

    assert metadata.read_lengths(read) == "lengths"
    assert metadata.fetched == fetched
