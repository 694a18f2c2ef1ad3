"""`Stream(check_remote=True)`: a start opens the version that is in the store at that time."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from streampack import Download, Stream
from streampack.streams import open_streams
from streampack.write import write_stream
from tests.helpers.faults.faultserver import FaultServer
from tests.helpers.faults.servers import s3_environment, s3_server

pytestmark = pytest.mark.processes


def write(folder: Path, number: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    write_stream(([i + 1] * 8 for i in range(number)), folder)


@pytest.fixture(params=["python", "rclone"])
def bucket(request, tmp_path):
    """The folder of a bucket in a store."""
    root = tmp_path / "store"
    write(root / "bucket" / "ds", 50)
    if request.param == "rclone":
        with s3_server(root) as server, s3_environment(server.url):
            yield root / "bucket"
        return
    with FaultServer(folder=root) as server, s3_environment(server.url):
        yield root / "bucket"


def samples(local: Path, **options: object) -> int:
    stream = Stream(
        remote="s3://bucket/ds", local=str(local), download=Download(retry=0, timeout=60), **options
    )
    return open_streams([stream])[0].num_samples


def test_a_start_that_asks_opens_the_version_that_the_store_holds_now(bucket, tmp_path):
    local = tmp_path / "local"
    assert samples(local, check_remote=True) == samples(local, check_remote=True) == 50
    write(bucket / "ds", 70)
    assert samples(local) == 50  # opt-in
    assert samples(local, check_remote=True) == 70
    assert samples(local) == 70  # the last one
    assert not list(local.rglob("*.tmp*"))


def test_a_store_that_cannot_tell_is_a_warning(bucket, tmp_path, caplog):
    local = tmp_path / "local"
    samples(local)
    shutil.rmtree(bucket / "ds")
    with caplog.at_level(logging.WARNING, "streampack"):
        assert samples(local, check_remote=True) == 50
    assert "check_remote cannot tell whether the store still has" in caplog.text


def test_index_json_is_asked_for_once_a_start_and_not_without_the_option(tmp_path):
    root, local = tmp_path / "store", tmp_path / "local"
    write(root / "bucket" / "ds", 50)
    with FaultServer(folder=root) as server, s3_environment(server.url):
        asked = []
        for options in ({}, {}, {"check_remote": True}, {"check_remote": True}):
            before = len(server.requests("/bucket/ds/index.json", "GET"))
            samples(local, **options)
            asked.append(len(server.requests("/bucket/ds/index.json", "GET")) - before)
    assert asked == [1, 0, 1, 1]
