"""Several jobs started together on one machine, with the same cache and temporary folder.

::

    job 1 --'                     .-- each shard is fetched by the first job to need it
    job 2 ---> one local=  <-- store
    ...                           '-- under a cache_limit: both are still exact
"""

from __future__ import annotations

import os

import pytest

from tests.helpers.faults import harness
from tests.helpers.faults.launch import Bench, temporary_of


@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(2, marks=pytest.mark.slow)], ids=["0workers", "2workers"]
)
def test_two_jobs_on_one_cache_are_exact_and_fetch_each_shard_once(bench, num_workers):
    """Hold two_jobs_same_cache_same_host."""
    configs = [
        bench.config(f"job{number}", loader={"num_workers": num_workers}) for number in range(2)
    ]
    for job in bench.jobs.run_all(configs):
        assert job.status == 0, job.errors()
    for config in configs:
        bench.check_exact(config)
        bench.check_as_unbroken(config)
    fetches = bench.fetches()
    assert set(fetches.values()) == {1}, fetches
    assert len(fetches) == sum(len(dataset.shards) for dataset in bench.datasets)


@pytest.mark.parametrize(
    "times", [1, pytest.param(10, marks=pytest.mark.slow)], ids=["once", "10times"]
)
def test_two_jobs_under_a_limit_below_their_data_are_exact(fine, times):
    """Hold two_jobs_same_cache_two_containers_evict."""
    bench = fine
    limit = sum(path.stat().st_size for path in bench.datasets[0].shards) // 2
    options = {
        "streams": bench.streams(s3=False),
        "packing": {"max_seq_len": 8192},
        "order": {"shuffle_block_size": 20},
        "buffers": {"cache_limit": limit},
        "loader": {"num_workers": 1},
    }
    for number in range(times):
        # With different seeds, they need different shards at any time.
        configs = [
            bench.config(
                f"{number}-{seed}",
                **{**options, "order": {"shuffle_block_size": 20, "seed": 10 * number + seed}},
            )
            for seed in range(2)
        ]
        for job in bench.jobs.run_all(configs):
            assert job.status == 0, job.errors()
        for config in configs:
            bench.check_exact(config)
    assert harness.temporary_names(bench.cache()) == []


@pytest.fixture
def small(bench: Bench, dataset) -> Bench:
    written = dataset(num_samples=60, size_limit=16_384)
    bench.datasets = [written]
    bench.server.folder = written.folder.parent.parent
    return bench


@pytest.mark.parametrize(
    "times", [1, pytest.param(20, marks=pytest.mark.slow)], ids=["once", "20times"]
)
def test_eight_jobs_that_start_at_once_all_run_and_fetch_each_shard_once(small, times):
    """Hold eight_jobs_start_at_once."""
    for number in range(times):
        cache = f"cache{number}"
        before = dict(small.fetches())
        configs = [
            small.config(f"{number}-{job}", streams=small.streams(cache)) for job in range(8)
        ]
        for job in small.jobs.run_all(configs):
            assert job.status == 0, job.errors()
        for config in configs:
            small.check_exact(config)
        small.check_clean(*configs, cache=cache)
        fetched = {path: n - before.get(path, 0) for path, n in small.fetches().items()}
        assert set(fetched.values()) == {1}, fetched


def test_files_of_others_in_the_temporary_folder_cannot_stop_a_job(small):
    """Hold tmp_lockfile_owned_by_other."""
    config = small.config()
    temporary = temporary_of(config)
    # Names that loaders leave there, as links to nothing, to themselves, or to a folder.
    for name in ("000000_barrier_filelock", "000000_cache_filelock", f"streampack-{os.getuid()}"):
        (temporary / name).symlink_to(temporary / name)
    assert small.jobs.run(config).status == 0
    small.check_exact(config)
