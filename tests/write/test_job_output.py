"""Files appear complete or not at all, in a folder and on a real S3 server that misbehaves."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from streampack.errors import DataError
from streampack.stores.s3 import REQUESTER_PAYS
from streampack.stores.store import open_store
from streampack.streams import Stream, open_stream
from streampack.write import job_output as output_module
from streampack.write import merge, verify, write_texts
from streampack.write.job_output import LocalOutput, open_output
from tests.helpers.faults.faultserver import Fault, FaultServer
from tests.helpers.faults.servers import s3_environment, s3_server, s3_variables
from tests.helpers.preparing import files_of, jsonl_file, options_of, text_rows

PAYER = "x-amz-request-payer"

# A store's client leaves connections open after a failure.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture
def store(tmp_path):
    """A bucket in a folder, and a server for it that can be given faults."""
    (tmp_path / "store" / "bucket").mkdir(parents=True)
    with (
        s3_server(tmp_path / "store", is_written=True) as s3,
        FaultServer(upstream=s3.url) as faulty,
        s3_environment(faulty.url),
    ):
        yield faulty


@pytest.fixture(params=["folder", "store"])
def output(request, tmp_path):
    """An empty output of each kind."""
    if request.param == "folder":
        return LocalOutput(url=str(tmp_path / "out"))
    request.getfixturevalue("store")
    return open_output("s3://bucket/out")


@pytest.mark.processes
def test_files_are_written_read_listed_and_cleaned_up(output):
    assert output.is_empty()
    assert output.read("parts/a/x.json") is None
    output.put(".hidden", b"0")
    assert output.is_empty()
    output.put("parts/a/x.json", b"1")
    output.put("parts/a/x.json", b"22")
    output.put("parts/b/x.json", b"3")
    output.put("parts/b/y.bin", b"")
    assert not output.is_empty()
    assert [output.read(f"parts/{name}") for name in ("a/x.json", "b/y.bin")] == [b"22", b""]
    assert output.names("parts/", "/x.json") == ["parts/a/x.json", "parts/b/x.json"]
    assert output.names("others/", "") == []
    output.clean_up("parts", lambda: {"a"})
    assert output.names("parts/", "") == ["parts/a/x.json"]


@pytest.mark.processes
@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("buckets", "payer"), [("other, bucket", b"requester"), ("other", None)])
def test_each_request_to_a_bucket_says_who_pays(monkeypatch, buckets, payer):
    payers = {}
    output = open_output("s3://bucket/out")
    open_store(output.url)._client.meta.events.register(
        "before-send.s3",
        lambda request, **_: payers.update({request.method: request.headers.get(PAYER)}),
    )
    monkeypatch.setenv(REQUESTER_PAYS, buckets)
    output.put("parts/a/x.json", b"1")
    assert output.read("parts/a/x.json") == b"1"
    assert payers == {"PUT": payer, "GET": payer}
    payers.clear()
    assert not output.is_empty()
    assert payers == {"GET": payer}
    output.clean_up("parts", set)
    assert payers == {"GET": payer, "DELETE": payer}
    assert output.is_empty()


def test_of_many_that_write_a_new_file_one_succeeds(tmp_path):
    output = LocalOutput(url=str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda n: output.put_new("job.json", b"%d" % n * 9), range(40)))
    assert written.count(True) == 1
    assert output.read("job.json") == b"%d" % written.index(True) * 9
    assert files_of(tmp_path).keys() == {"job.json"}


def test_clean_up_leaves_what_a_living_process_writes(tmp_path, monkeypatch):
    output, fsync = LocalOutput(url=str(tmp_path)), os.fsync
    output.put("parts/a/x.json", b"1")
    (tmp_path / "parts" / "a" / ".y.json.of-a-killed-process.partial").write_bytes(b"2")

    def clean_up_beside(number: int) -> None:
        output.clean_up("parts", set)  # like another process with another job
        fsync(number)

    monkeypatch.setattr(output_module.os, "fsync", clean_up_beside)
    assert output.put_new("parts/a/z.json", b"3")
    assert files_of(tmp_path) == {"parts/a/x.json": b"1", "parts/a/z.json": b"3"}
    output.clean_up("parts", set)
    assert files_of(tmp_path) == {}


def test_a_folder_is_locked_by_one_at_a_time(tmp_path):
    output, inside = LocalOutput(url=str(tmp_path)), []

    def enter(number: int) -> None:
        with output.locked():
            inside.append(number)
            assert inside[-1:] == [number]
            time.sleep(0.001)
            assert inside.pop() == number
            assert inside == []

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(enter, range(100)))
    assert files_of(tmp_path) == {}


def test_a_file_system_without_locks_gets_its_files_all_the_same(tmp_path, monkeypatch):
    def no_lock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_lock)
    output = LocalOutput(url=str(tmp_path))
    with output.locked():
        assert output.put_new("a", b"1")
    (tmp_path / ".b.perhaps-alive.partial").write_bytes(b"2")
    (tmp_path / "parts").mkdir()
    output.clean_up("parts", set)
    assert files_of(tmp_path) == {"a": b"1", ".b.perhaps-alive.partial": b"2"}


def test_a_file_system_without_hard_links_gets_a_rename(tmp_path, monkeypatch):
    def no_link(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(output_module.os, "link", no_link)
    output = LocalOutput(url=str(tmp_path))
    assert [output.put_new("a", b"1"), output.put_new("a", b"2")] == [True, False]
    assert files_of(tmp_path) == {"a": b"1"}


def put_requests(store) -> list[str]:
    """Return the paths of successful PUT requests."""
    return [each.path for each in store.log if each.method == "PUT" and each.status == 200]


@pytest.fixture
def rows(tmp_path):
    return jsonl_file(tmp_path / "rows.jsonl", text_rows(200))


@pytest.mark.processes
def test_a_stream_in_a_store_has_the_bytes_of_one_in_a_folder(tmp_path, rows, store):
    options = options_of(tmp_path)
    write_texts([rows], tmp_path / "s", options)
    written = write_texts([rows], "s3://bucket/s", options)
    whole = files_of(tmp_path / "s")

    assert files_of(tmp_path / "store" / "bucket" / "s") == whole
    assert written.path == "s3://bucket/s"
    # Each file is sent once, from memory, and index.json last.
    assert sorted(put_requests(store)) == sorted(f"/bucket/s/{name}" for name in whole)
    assert put_requests(store)[-2:] == ["/bucket/s/lengths.bin", "/bucket/s/index.json"]
    assert verify("s3://bucket/s") == written.num_shards
    stream = open_stream(Stream(remote="s3://bucket/s", local=str(tmp_path / "cache")), 0)
    assert stream.num_samples == written.num_samples
    assert merge("s3://bucket/s") == written


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["status", "reset"])
def test_a_store_that_fails_now_and_then_gets_the_same_bytes(tmp_path, rows, store, kind):
    store.faults += [
        Fault(kind=kind, method="PUT|GET", status=503, share=0.1, seed=3),
        Fault(kind="short", path=r"\.(json|bin)$", share=0.1, seed=4),
    ]
    options = options_of(tmp_path, part_bytes="10kb", size_limit="8kb")
    write_texts([rows], tmp_path / "s", options)
    write_texts([rows], "s3://bucket/s", options)
    assert any(fault.given for fault in store.faults)
    assert files_of(tmp_path / "store" / "bucket" / "s") == files_of(tmp_path / "s")


@pytest.mark.processes
def test_a_store_that_stops_is_one_error_and_the_same_call_resumes(tmp_path, rows, store):
    options = options_of(tmp_path)
    write_texts([rows], tmp_path / "s", options)
    fault = Fault(kind="status", status=403, method="PUT", path="part.json", skip=3)
    store.faults.append(fault)
    with pytest.raises(DataError, match=r"part\.json: cannot be written, .*AccessDenied.*; the"):
        write_texts([rows], "s3://bucket/s", options)
    done = set(put_requests(store))
    assert len([path for path in done if path.endswith("part.json")]) == 3
    store.faults.clear()
    store.log.clear()
    write_texts([rows], "s3://bucket/s", options)
    kept = {path.rsplit("/", 1)[0] for path in done if path.endswith("part.json")}
    assert not [path for path in put_requests(store) if path.rsplit("/", 1)[0] in kept]
    assert files_of(tmp_path / "store" / "bucket" / "s") == files_of(tmp_path / "s")


@pytest.mark.processes
@pytest.mark.parametrize(("status", "expected"), [(412, False), (501, True)])
def test_conditional_puts_are_obeyed_or_replaced(store, status, expected):
    output = open_output("s3://bucket/out")
    store.faults.append(Fault(kind="status", status=status, method="PUT", times=1))
    assert output.put_new("part.json", b"1") is expected


@pytest.mark.processes
def test_worker_processes_write_to_a_store_from_the_command_line(tmp_path, rows, store):
    options = options_of(tmp_path)
    whole = write_texts([rows], tmp_path / "s", options)
    command = [sys.executable, "-m", "streampack", "write", str(rows), "--out", "s3://bucket/s"]
    command += ["--tokenizer", str(options.rows.tokenizer)]
    command += ["--columns", "url", "--columns", "score"]
    command += ["--part-bytes", "4000", "--size-limit", "1500", "--num-workers", "2"]
    command += ["--json", "--verify"]
    environment = {**os.environ, **s3_variables(store.url)}
    done = subprocess.run(command, check=True, capture_output=True, env=environment)
    assert json.loads(done.stdout)["num_tokens"] == whole.num_tokens
    assert files_of(tmp_path / "store" / "bucket" / "s") == files_of(tmp_path / "s")
