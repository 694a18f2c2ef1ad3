"""Length files for streams in a store: `streampack index s3://...`, against an S3 server."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from streampack.errors import DataError
from streampack.index import write_lengths
from streampack.mds.length_file import LENGTH_FILE
from streampack.streams import Stream, open_stream
from tests.helpers import builders
from tests.helpers.faults import servers
from tests.helpers.faults.faultserver import FaultServer
from tests.helpers.verbs import call_verb

LENGTHS = [1 + (i * 37) % 300 for i in range(40)]
UPLOAD = "PUT|POST"
# A store keeps the server it was created for, so no two tests may share a bucket.
bucket_numbers = itertools.count()

# The garbage collector closes what a failed attempt left open, with a warning.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@dataclass(frozen=True, kw_only=True)
class Store:
    """A bucket on a real S3 server, behind a proxy that can refuse requests."""

    proxy: FaultServer
    folder: Path
    url: str


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("store") / "root"
    root.mkdir()
    with servers.s3_server(root) as running:
        yield root, running


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    root, running = server
    name = f"index-{os.getpid()}-{next(bucket_numbers)}"
    (root / name).mkdir()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with FaultServer(upstream=running.url) as proxy, servers.s3_environment(proxy.url):
        yield Store(proxy=proxy, folder=root / name, url=f"s3://{name}/code")


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_the_length_file_is_uploaded_beside_index_json_and_nothing_stays_here(
    store, tmp_path, compression
):
    path, _ = builders.write_stream_files(
        store.folder / "code", LENGTHS, compression=compression, lengths_file=False
    )
    before = set(os.listdir(path))
    [indexed] = write_lengths(store.url)

    assert indexed.path == f"{store.url}/{LENGTH_FILE}"
    assert (indexed.num_samples, indexed.num_tokens) == (len(LENGTHS), sum(LENGTHS))
    assert set(os.listdir(path)) - before == {LENGTH_FILE}
    assert os.listdir(tmp_path / "temporary") == []
    uploaded = (path / LENGTH_FILE).read_bytes()
    write_lengths(path)
    assert (path / LENGTH_FILE).read_bytes() == uploaded
    opened = open_stream(Stream(remote=store.url, local=str(tmp_path / "local")), 0)
    assert opened.total_tokens() == sum(LENGTHS)


def test_in_a_temporary_folder_lies_one_shard_at_a_time(store, tmp_path):
    builders.write_stream_files(store.folder / "code", LENGTHS, lengths_file=False)
    left = []

    def progress(_: int) -> None:
        left.append([file.name for file in (tmp_path / "temporary").rglob("shard.*.mds")])

    [indexed] = write_lengths(store.url, progress=progress)
    assert left == [[]] * indexed.num_shards


@pytest.mark.parametrize("has_local", [False, True])
def test_a_store_that_cannot_be_written_is_an_error_and_the_work_is_kept(
    store, tmp_path, has_local
):
    path, _ = builders.write_stream_files(store.folder / "code", LENGTHS, lengths_file=False)
    store.proxy.add("status", status=403, method=UPLOAD)
    local = tmp_path / "local" if has_local else None
    message = (
        r"lengths\.bin: cannot be written, .*; the length file is in .*: copy it next to .*local="
    )
    with pytest.raises(DataError, match=message) as raised:
        write_lengths(store.url, local=local)
    (kept,) = tmp_path.rglob(LENGTH_FILE)
    assert f"is in {kept}: copy it next to" in str(raised.value)
    assert raised.value.uri == f"{store.url}/{LENGTH_FILE}"
    store.proxy.clear()
    path.joinpath(LENGTH_FILE).write_bytes(kept.read_bytes())
    opened = open_stream(Stream(remote=store.url, local=str(tmp_path / "other")), 0)
    assert opened.total_tokens() == sum(LENGTHS)


def test_the_verb_takes_urls_and_folders_together(store, tmp_path):
    for folder in (store.folder / "code", tmp_path / "a", tmp_path / "b c"):
        builders.write_stream_files(folder, LENGTHS, lengths_file=False)
    output = call_verb("index", str(tmp_path / "a"), store.url, f"file://{tmp_path}/b%20c")
    lines = output.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        f"{tmp_path}/a/{LENGTH_FILE}",
        f"{store.url}/{LENGTH_FILE}",
        f"{tmp_path}/b c/{LENGTH_FILE}",
    ]
    assert all(f"{sum(LENGTHS):,} tokens" in line for line in lines)
