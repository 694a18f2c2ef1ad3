"""Fixtures of the fault tests: data sets, written once, and an S3 server behind a proxy."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import boto3.s3.transfer
import pytest

from streampack.streams import Stream
from tests.helpers.faults import harness, launch, servers
from tests.helpers.faults.faultserver import FaultServer

BUCKET = "faults"


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., harness.DataSet]:
    """Return a function that takes `write_dataset`'s arguments; do not damage its data sets."""
    written: dict[str, harness.DataSet] = {}
    root = tmp_path_factory.mktemp("datasets")

    def get(**options: Any) -> harness.DataSet:
        key = repr(sorted(options.items()))
        if key not in written:
            written[key] = harness.write_dataset(root / str(len(written)), **options)
        return written[key]

    return get


def copied(written: harness.DataSet, folder: Path) -> harness.DataSet:
    shutil.copytree(written.folder, folder)
    return replace(written, folder=folder)


@pytest.fixture(scope="session")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, FaultServer]]:
    """Yield a `FaultServer` in front of a real S3 server, and the folder that it serves.

    All tests share it: clients live as long as the process, know one address, and are slow to make.
    """
    root = tmp_path_factory.mktemp("s3") / "root"
    (root / BUCKET).mkdir(parents=True)
    # Import, and in a fresh environment compile, everything S3 clients need before measuring time.
    boto3.session.Session().client("s3", region_name="us-east-1").close()
    with servers.s3_server(root) as server, FaultServer(upstream=server.url) as proxy:
        yield root, proxy


@pytest.fixture
def store(proxy: tuple[Path, FaultServer], tmp_path: Path) -> Iterator[harness.Store]:
    """Yield a folder in a bucket, with an environment that points S3 clients to it."""
    root, server = proxy
    folder = root / BUCKET / uuid.uuid4().hex[:12]
    folder.mkdir()
    server.start_anew(f"/{BUCKET}/{folder.name}/")
    with servers.s3_environment(server.url):
        yield harness.Store(server=server, root=root, folder=folder, caches=tmp_path / "caches")
    server.start_anew()


@pytest.fixture(scope="session", autouse=True)
def compiled(dataset: Callable[..., harness.DataSet]) -> None:
    """Run an epoch without a store, since tests measure time and kernels compile at first use.

    In a fresh clone on a busy machine, that takes more than a minute.
    """
    known = dataset(num_samples=200)
    stream = Stream(local=str(known.folder))
    harness.run_epoch(lambda: harness.make_loader(stream), known, limit_s=600).assert_exact()


@pytest.fixture(scope="session")
def jobs() -> Iterator[launch.Jobs]:
    with launch.Jobs() as jobs:
        yield jobs


@pytest.fixture
def bench(
    jobs: launch.Jobs, tmp_path: Path, dataset: Callable[..., harness.DataSet]
) -> Iterator[launch.Bench]:
    """Yield two streams behind a new `FaultServer`, with the means to start jobs on them."""
    datasets = [
        copied(
            dataset(num_samples=170, seed=seed, size_limit=16 * 1024),
            tmp_path / "store" / "bucket" / f"s{seed}",
        )
        for seed in range(2)
    ]
    with FaultServer(folder=tmp_path / "store") as server:
        yield launch.Bench(jobs=jobs, server=server, folder=tmp_path / "test", datasets=datasets)


@pytest.fixture
def fine(bench: launch.Bench, dataset: Callable[..., harness.DataSet]) -> launch.Bench:
    """Yield a bench with a single stream; half of it is more than is planned ahead."""
    written = dataset(num_samples=24_000, size_limit=2**17)
    bucket = bench.folder / "store" / "fine"
    bench.server.folder = bucket.parent
    bench.datasets = [copied(written, bucket / "s0")]
    return bench
