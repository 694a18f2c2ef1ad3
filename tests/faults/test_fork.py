"""No client and no socket crosses a fork: workers never get each other's bytes.

A client shared by forked workers mixes up responses that take a while. Therefore the bodies are
slow, the shards have no hash that could hide a mix-up, and the files in the cache are compared with
the store byte by byte.
"""

from __future__ import annotations

import os
import shutil

import pytest

from tests.helpers.faults import harness, servers
from tests.helpers.faults.launch import Bench

NUM_QUICK, NUM_ALL = 1, 10
BYTES_PER_S = 400_000

RUNS = [
    pytest.param(run, marks=[pytest.mark.slow] if run >= NUM_QUICK else [])
    for run in range(NUM_ALL)
]


@pytest.fixture
def unhashed(bench: Bench, dataset) -> Bench:
    written = dataset(num_samples=350, size_limit=32_768, hashes=(), lengths_file=False)
    bench.datasets = [written]
    bench.server.folder = written.folder.parent.parent
    bench.server.add("trickle", path="shard", bytes_per_s=BYTES_PER_S)
    return bench


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("torch_loader", [False, True], ids=["planned_here", "planned_in_workers"])
def test_forked_workers_never_get_the_bytes_of_another_shard(unhashed, torch_loader, run):
    """Hold fork_shared_connection."""
    bench = unhashed
    config = bench.config(
        torch_loader=torch_loader,
        loader={"num_workers": 2, "multiprocessing_context": "fork"},
        order={"shuffle_block_size": 40, "seed": run},
    )
    job = bench.jobs.run(config)
    assert job.status == 0, job.errors()
    bench.check_exact(config)
    (dataset,) = bench.datasets
    for path in dataset.shards:
        (cached,) = (bench.cache() / dataset.folder.name).glob(f"*/{path.name}.*")
        assert cached.read_bytes() == path.read_bytes(), path.name
    # The training process fetched index.json; no worker may reuse its connection.
    agents = {request.client for request in bench.server.requests("index.json")}
    if torch_loader:
        assert not agents & {request.client for request in bench.server.requests("shard")}


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_sftp_works_with_and_without_workers(bench, tmp_path, num_workers):
    folder = tmp_path / "sftp"
    shutil.copytree(bench.datasets[0].folder, folder / "s0")
    with servers.sftp_server(folder) as server:
        stream = {"remote": f"{server.url}/s0", "local": str(bench.cache() / "s0")}
        # The server of jobs was started before these variables were set.
        environment = {k: v for k, v in os.environ.items() if k.startswith("COMPOSER_SFTP")}
        config = bench.config(
            streams=[stream], loader={"num_workers": num_workers}, environment=environment
        )
        job = bench.jobs.run(config)
        assert job.status == 0, job.errors()
    bench.datasets = [harness.DataSet(folder=folder / "s0", lengths=bench.datasets[0].lengths)]
    bench.check_exact(config)
