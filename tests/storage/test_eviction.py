"""Eviction under a limit: only our files, finished ones first, and readers lose nothing."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from streampack import Download
from streampack.errors import ConfigError, DataError
from streampack.storage.download import fetch, fetch_if_there
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.materialize import Downloader
from streampack.streams import Stream, open_stream, open_streams
from streampack.streams.shard_pool import ShardPool
from tests.helpers import builders
from tests.helpers.caches import NOTES, cache_of, cached_shards

LENGTHS = [200] * 40  # 10 shards of 4 samples, all of one size


class NetworkDisk(LocalFilesystem):
    """A disk on which every folder is on a network."""

    def is_network(self, _):
        return True


def limited(tmp_path, num_shards: float, **options):
    """Return a stream with room for `num_shards` shards in its cache, and its samples."""
    shutil.rmtree(tmp_path / "r", ignore_errors=True)
    path, samples = builders.write_stream_files(
        tmp_path / "r", LENGTHS, lengths_file=False, hashes=["xxh64"]
    )
    stream = Stream(remote=str(path), local=str(tmp_path / "l"))
    size = open_stream(stream, 0).raw_bytes[0]
    (opened,) = open_streams([stream], cache_limit=int(num_shards * size), **options)
    assert len(set(opened.raw_bytes[:-1].tolist())) == 1
    assert opened.num_shards >= 8
    return opened, samples


def here(local: Path) -> list[int]:
    return sorted(int(file.name.split(".")[1]) for file in cached_shards(local))


def notes(local: Path) -> list[Path]:
    return sorted((cache_of(local) / NOTES).glob("shard*.json"))


def set_planned(local: Path, times: dict[int, float]) -> None:
    for note in notes(local):
        time_s = times[int(note.name.split(".")[1])]
        os.utime(note, (time_s, time_s))


def test_finished_shards_go_first_and_then_those_planned_longest_ago(tmp_path):
    opened, _ = limited(tmp_path, 4)
    for shard in range(4):
        opened.fetch(shard)
    set_planned(tmp_path / "l", {0: 400.0, 1: 300.0, 2: 200.0, 3: 100.0})
    opened.mark_finished(np.array([1]))
    opened.fetch(4)
    assert here(tmp_path / "l") == [0, 2, 3, 4]
    opened.fetch(5)
    assert here(tmp_path / "l") == [0, 2, 4, 5]
    opened.mark_planned(np.array([2]))
    opened.fetch(6)
    assert here(tmp_path / "l") == [2, 4, 5, 6]


def test_what_others_may_be_made_of_goes_after_finished_shards_and_before_planned_ones(tmp_path):
    opened, _ = limited(tmp_path, 4)
    for shard in range(4):
        opened.fetch(shard)
    opened.cache.mark_spare([opened.shards.entry(1)])
    opened.mark_finished(np.array([2]))
    opened.fetch(4)
    assert here(tmp_path / "l") == [0, 1, 3, 4]
    opened.fetch(5)
    assert here(tmp_path / "l") == [0, 3, 4, 5]


def test_a_finished_shard_that_is_planned_again_goes_last(tmp_path):
    opened, _ = limited(tmp_path, 2)
    opened.fetch(0)
    opened.fetch(1)
    set_planned(tmp_path / "l", {0: 100.0, 1: 200.0})
    opened.mark_planned(np.array([0]))
    opened.mark_finished(np.array([0]))
    opened.mark_planned(np.array([0]))
    opened.fetch(2)
    assert here(tmp_path / "l") == [0, 2]


def test_without_a_limit_plans_leave_no_trace_and_nothing_goes(tmp_path):
    path, _ = builders.write_stream_files(tmp_path / "r", LENGTHS)
    (opened,) = open_streams([Stream(remote=str(path), local=str(tmp_path / "l"))])
    opened.fetch(0)
    (record,) = notes(tmp_path / "l")
    before = record.stat().st_mtime_ns
    opened.mark_planned(np.array([0]))
    opened.mark_finished(np.array([0]))
    assert record.stat().st_mtime_ns == before
    for shard in range(opened.num_shards):
        opened.fetch(shard)
    assert len(here(tmp_path / "l")) == opened.num_shards


@pytest.mark.processes
def test_room_kept_by_a_process_that_was_killed_is_given_back(tmp_path):
    def die(*_, **__):
        os._exit(9)

    opened, _ = limited(tmp_path, 1, store=Downloader(fetch=die))
    child = multiprocessing.get_context("fork").Process(target=opened.fetch, args=(3,))
    child.start()
    child.join(30)
    assert child.exitcode == 9
    assert [note.name.split(".")[1] for note in notes(tmp_path / "l")] == ["00003"]
    opened, _ = limited(tmp_path, 1)
    opened.fetch(1)
    assert [note.name.split(".")[1] for note in notes(tmp_path / "l")] == ["00001"]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_local_streams_lose_nothing_but_what_was_unpacked(tmp_path, compression):
    path, samples = builders.write_stream_files(tmp_path / "s", LENGTHS, compression=compression)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    (opened,) = open_streams([Stream(local=str(path))], cache_limit=1)
    for shard in range(opened.num_shards):
        data = opened.open_shard(shard)
        first = int(opened.first_sample[shard])
        np.testing.assert_array_equal(data.tokens.read(data.data, 0), samples[first])
    now = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
    assert before == now
    assert len(list((path / NOTES).glob("*.mds.*"))) == (0 if compression is None else 1)


def test_the_limit_is_one_for_all_streams_together(tmp_path):
    streams, size = [], 0
    for name in ("a", "b"):
        path, _ = builders.write_stream_files(tmp_path / name, LENGTHS, seed=len(name))
        streams.append(Stream(remote=str(path), local=str(tmp_path / f"l{name}")))
        size = int(open_stream(streams[-1], 0).raw_bytes[0])
    one, two = open_streams(streams, cache_limit=4 * size)
    assert [one.number, two.number] == [0, 1]
    for shard in range(4):
        one.fetch(shard)
    for shard in range(3):
        two.fetch(shard)
    assert len(here(tmp_path / "la")) == 1
    assert here(tmp_path / "lb") == [0, 1, 2]


def test_a_file_counts_once_if_two_streams_share_its_folder(tmp_path):
    path, _ = builders.write_stream_files(tmp_path / "r", LENGTHS, lengths_file=False)
    streams = [Stream(remote=str(path), local=str(tmp_path / "l")) for _ in range(2)]
    size = open_stream(streams[0], 0).raw_bytes[0]
    opened, _ = open_streams(streams, cache_limit=int(3.5 * size))
    for shard in range(5):
        opened.fetch(shard)
    assert here(tmp_path / "l") == [2, 3, 4]


def test_an_evicted_shard_that_is_open_is_read_on_and_let_go_at_the_next_opening(tmp_path):
    opened, samples = limited(tmp_path, 1)
    shard = opened.open_shard(0)
    assert shard.is_gone is not None
    assert not shard.is_gone()
    opened.fetch(1)
    assert here(tmp_path / "l") == [1]
    assert shard.is_gone()
    np.testing.assert_array_equal(shard.tokens.read(shard.data, 1), samples[1])

    recent = ShardPool(max_shards=10, max_samples=10**6)
    recent.put(shard)
    other = opened.open_shard(1)
    recent.put(other)
    assert recent.get(shard.key) is None
    assert recent.get(other.key) is not None
    opened.fetch(0)  # this is a different file now
    assert shard.is_gone()


@pytest.mark.parametrize("keep_zip", [False, True])
def test_a_compressed_file_under_way_counts_for_other_processes_too(tmp_path, keep_zip):
    path, _ = builders.write_stream_files(tmp_path / "r", LENGTHS, compression="zstd")
    stream = Stream(
        remote=str(path), local=str(tmp_path / "l"), download=Download(keep_zip=keep_zip)
    )
    shards = open_stream(stream, 0).shards.index.shards
    raw = [shard.raw.num_bytes for shard in shards]
    packed = [shard.packed.num_bytes for shard in shards]
    seen = []

    def watching(files, basename, to, **options):
        if basename == shards[1].packed.basename:
            other.fetch(2)
            seen.extend(here(tmp_path / "l"))
        return fetch(files, basename, to, **options)

    # Room for shard 0, and for 1 and 2 while they arrive, except for one byte.
    there = raw[0] + packed[0] * keep_zip
    limit = there + sum(raw[1:3]) + sum(packed[1:3]) - 1
    store = Downloader(fetch=watching, fetch_if_there=fetch_if_there)
    (other,) = open_streams([stream], cache_limit=limit)
    (opened,) = open_streams([stream], cache_limit=limit, store=store)
    opened.fetch(0)
    opened.fetch(1)
    assert seen == [2]
    # Once a shard is here, a compressed file that is not kept does not count.
    names = [note.name.removesuffix(".json") for note in notes(tmp_path / "l")]
    names = [name for name in names if not name.startswith("shard.00000")]
    assert sum(name.endswith(".zip") for name in names) == (2 if keep_zip else 0)
    assert sum(not name.endswith(".zip") for name in names) == 2


def test_a_failed_download_of_a_compressed_shard_keeps_no_room(tmp_path):
    path, _ = builders.write_stream_files(tmp_path / "r", LENGTHS, compression="zstd")
    stream = Stream(remote=str(path), local=str(tmp_path / "l"))
    (opened,) = open_streams([stream], cache_limit=10**6)
    (path / opened.shards.index.shards[0].packed.basename).unlink()
    with pytest.raises(DataError, match="cannot be fetched"):
        opened.fetch(0)
    assert not notes(tmp_path / "l")


def test_a_limit_on_a_network_file_system_is_refused(tmp_path):
    path, _ = builders.write_stream_files(tmp_path / "r", LENGTHS)
    stream = Stream(remote=str(path), local=str(tmp_path / "l"))
    message = r"cache_limit=5: .*/l/\w+ is on a network file system, .*; set local= to a folder of"
    with pytest.raises(ConfigError, match=message):
        open_streams([stream], cache_limit=5, disk=NetworkDisk())
    # Nothing of a local stream would be removed.
    open_streams([Stream(local=str(path))], cache_limit=5, disk=NetworkDisk())
