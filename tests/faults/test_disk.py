"""Disks that are full, read-only, emptied under the job, or bounded by `cache_limit`.

::

    full         DataError with the path and the bytes needed, no partial file; once there is
                 space, the run resumes from its last state
    emptied      refetched
    cache_limit  the folder stays within it, give or take a shard per reader; files that streampack
                 did not fetch are never removed

The small disks are real: they are tmpfs mounts that only the jobs see.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.caches import cached_shards, plain_name
from tests.helpers.faults import harness
from tests.helpers.faults.launch import Bench, outcome


def check_no_part_of_a_shard(cache: Path, datasets: list[harness.DataSet]) -> None:
    """Check that every file with a shard's name in a cache is the complete shard."""
    for dataset in datasets:
        for path in cached_shards(cache / dataset.folder.name):
            assert path.read_bytes() == (dataset.folder / plain_name(path.name)).read_bytes(), path


def check_says_that_the_disk_is_full(folder: Path, cache: Path) -> None:
    told = outcome(folder)
    assert told["outcome"] == "DataError", told
    assert str(cache) in told["message"]
    assert "bytes" in told["message"]
    assert "No space left" in told["message"]


@pytest.mark.parametrize(
    "num_workers", [*(pytest.param(num, marks=pytest.mark.slow) for num in (0, 1)), 2]
)
def test_a_full_disk_is_an_error_that_names_the_path_and_the_bytes_needed(bench, num_workers):
    """Hold disk_full and disk_full_1worker."""
    cache = bench.cache()
    seen = bench.jobs.mount(cache, "200k")
    config = bench.config(streams=bench.streams(s3=False), loader={"num_workers": num_workers})
    job = bench.jobs.run(config)
    assert job.status == 3, job.errors()
    check_says_that_the_disk_is_full(job.folder, cache)
    check_no_part_of_a_shard(seen, bench.datasets)
    assert harness.temporary_names(seen) == []

    bench.jobs.remount(cache, "size=8m")
    job = bench.jobs.run({**config, "state": "last"})
    assert job.status == 0, job.errors()
    bench.check_exact(config)
    bench.check_as_unbroken(config)


def test_a_disk_that_fills_up_stops_both_ranks_of_a_node(bench):
    """Hold disk_full_2ranks."""
    cache = bench.cache()
    bench.jobs.mount(cache, "200k")
    configs = [
        bench.config(
            f"rank{rank}",
            streams=bench.streams(s3=False),
            world={"rank": rank, "num_ranks": 2},
            loader={"num_workers": 2},
        )
        for rank in range(2)
    ]
    for job in bench.jobs.run_all(configs):
        assert job.status == 3, job.errors()
        check_says_that_the_disk_is_full(job.folder, cache)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_disk_that_fills_up_while_unpacking_is_the_same_error(bench, tmp_path, num_workers):
    """Hold disk_full_zstd_rawfull."""
    # Three compressed shards fit, but no unpacked one.
    packed = [
        harness.write_dataset(
            tmp_path / "store" / "packed" / "s0",
            num_samples=300,
            seed=0,
            size_limit=131_072,
            compression="zstd",
        )
    ]
    bench.datasets = packed
    assert max(path.stat().st_size for path in packed[0].shards) < 40_000
    cache = bench.cache()
    seen = bench.jobs.mount(cache, "124k")
    config = bench.config(streams=bench.streams(s3=False), loader={"num_workers": num_workers})
    job = bench.jobs.run(config)
    assert job.status == 3, job.errors()
    check_says_that_the_disk_is_full(job.folder, cache)
    whole = {shard["raw_data"]["bytes"] for shard in packed[0].index["shards"]}
    assert {path.stat().st_size for path in seen.rglob("shard.*.mds.????????")} <= whole
    assert harness.temporary_names(seen) == []

    bench.jobs.remount(cache, "size=8m")
    assert bench.jobs.run({**config, "state": "last"}).status == 0
    bench.check_exact(config)


def test_an_empty_cache_on_a_read_only_disk_is_an_error_at_construction(bench):
    cache = bench.cache()
    bench.jobs.mount(cache, "8m")
    bench.jobs.remount(cache, "ro")
    job = bench.jobs.run(bench.config(streams=bench.streams(s3=False)))
    assert job.status == 3, job.errors()
    told = outcome(job.folder)
    assert told["outcome"] == "DataError"
    assert str(cache) in told["message"]
    assert job.num_batches == 0


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_cache_that_is_deleted_in_mid_run_is_fetched_again(bench, num_workers):
    """Hold disk_cache_deleted_midrun."""
    config = bench.config(
        streams=bench.streams(s3=False),
        loader={"num_workers": num_workers},
        order={"shuffle_block_size": 20},
        num_epochs=2,
    )
    job = bench.jobs.start_and_take(config, 5)
    # For the job, this is atomic: a removal file by file would race with its writes.
    away = bench.cache("away")
    bench.cache().rename(away)
    shutil.rmtree(away)
    job.go_on()
    assert job.join() == 0, job.errors()
    bench.check_exact(config, num_epochs=2)
    assert list(bench.cache().rglob("shard.*.mds.????????")), "nothing was refetched"


@pytest.fixture
def small_shared_memory(bench: Bench) -> Iterator[Bench]:
    """Give the jobs a /dev/shm that is too small for a batch."""
    bench.jobs.remount("/dev/shm", "size=8k")
    yield bench
    bench.jobs.remount("/dev/shm", "size=256m")


def test_a_full_dev_shm_is_an_error_at_construction_and_none_without_workers(small_shared_memory):
    """Hold disk_shm_full."""
    bench = small_shared_memory
    streams = [{"local": str(dataset.folder)} for dataset in bench.datasets]
    job = bench.jobs.run(bench.config("two", streams=streams, loader={"num_workers": 2}))
    assert job.status == 3, job.errors()
    told = outcome(job.folder)
    assert told["outcome"] == "ConfigError", told
    assert "/dev/shm" in told["message"]
    assert "num_workers=0" in told["message"]
    assert job.num_batches == 0
    config = bench.config("none", streams=streams)
    assert bench.jobs.run(config).status == 0
    bench.check_exact(config)


# Eviction.


class Watch:
    """Keeps the most bytes that the shards in a cache folder, temporary ones too, took together."""

    def __init__(self, folder: Path) -> None:
        self.most_bytes = 0
        self._folder = folder
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over.wait(0.005):
            total = 0
            for path in self._files():
                with suppress(FileNotFoundError):
                    total += path.stat().st_size
            self.most_bytes = max(self.most_bytes, total)

    def _files(self) -> list[Path]:
        found: list[Path] = []
        for folder, _, names in os.walk(self._folder):
            found += [Path(folder, name) for name in names]
        return [path for path in found if path.suffix not in (".bin", ".json", ".lock")]

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def data_bytes(bench: Bench) -> int:
    return sum(path.stat().st_size for of in bench.datasets for path in of.shards)


@pytest.mark.parametrize(
    "readers",
    [
        pytest.param("1 rank x 4 workers", marks=pytest.mark.slow),
        "1 rank x 8 workers",
        pytest.param("4 ranks x 2", marks=pytest.mark.slow),
    ],
)
def test_readers_under_a_limit_of_half_their_data_are_exact_and_within_it(fine, readers):
    """Hold disk_evict_4workers."""
    bench = fine
    num_ranks = 4 if readers.startswith("4") else 1
    num_workers = {"1 rank x 4 workers": 4, "1 rank x 8 workers": 8, "4 ranks x 2": 2}[readers]
    limit = data_bytes(bench) // 2
    configs = [
        bench.config(
            f"rank{rank}",
            world={"rank": rank, "num_ranks": num_ranks},
            loader={"num_workers": num_workers},
            packing={"max_seq_len": 8192},
            order={"shuffle_block_size": 32},
            buffers={"cache_limit": limit},
            batch_size=4 // num_ranks,
        )
        for rank in range(num_ranks)
    ]
    with Watch(bench.cache()) as watch:
        for job in bench.jobs.run_in_step(configs):
            assert job.status == 0, job.errors()
    bench.check_exact(*configs)
    largest = max(path.stat().st_size for path in bench.datasets[0].shards)
    num_readers = num_ranks * num_workers
    assert watch.most_bytes > limit // 2, "nothing was seen of the cache"
    assert watch.most_bytes <= limit + num_readers * largest
    fetches = bench.fetches()
    assert len(fetches) == len(bench.datasets[0].shards)
    assert max(fetches.values()) <= 3, fetches


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_local_only_stream_loses_no_file_to_a_cache_limit(bench, tmp_path, num_workers):
    """Hold disk_evict_local_only_stream."""
    own = tmp_path / "own"
    shutil.copytree(bench.datasets[0].folder, own)
    before = {path.name: path.read_bytes() for path in own.iterdir()}
    streams = [{"local": str(own)}, bench.streams(s3=False)[1]]
    config = bench.config(
        streams=streams,
        loader={"num_workers": num_workers},
        order={"shuffle_block_size": 20},
        buffers={"cache_limit": 250_000},
    )
    job = bench.jobs.run(config)
    assert job.status == 0, job.errors()
    bench.check_exact(config)
    after = {path.name: path.read_bytes() for path in own.iterdir() if path.is_file()}
    assert after == before
