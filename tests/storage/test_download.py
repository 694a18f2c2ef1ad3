"""Downloads: the right bytes within the time budget, or an error."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
import streaming
from botocore.exceptions import NoCredentialsError

from streampack import Download
from streampack.errors import DataError
from streampack.storage.download import attempt_s, budget_s, fetch, fetch_if_there
from streampack.storage.location import StreamLocation
from streampack.stores import retries
from streampack.stores.s3 import REQUESTER_PAYS
from streampack.streams import Stream
from tests.helpers.faults import servers
from tests.helpers.faults.faultserver import FaultServer
from tests.helpers.locations import location_of

CONTENT = bytes(range(256)) * 400
SPARE_S = 30.0  # an endless wait would take minutes; on a busy machine, anything may take seconds
BOUND_S = 30.0

# The garbage collector closes what a failed attempt left open, with a warning.
pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
# A store keeps the server it was created for, so no two tests may share a bucket.
bucket_numbers = itertools.count()


def files_of(remote: str, local: Path, timeout_s: float = 1.0, retry: int = 2) -> StreamLocation:
    local.mkdir(exist_ok=True)
    stream = Stream(
        remote=remote, local=str(local), download=Download(retry=retry, timeout=timeout_s)
    )
    return location_of(stream)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A bucket behind a server that misbehaves, and a local folder."""

    server: FaultServer
    remote: str
    folder: Path
    local: Path

    @property
    def to(self) -> Path:
        return self.local / "xyz.tmp"

    @property
    def is_s3(self) -> bool:
        return self.remote.startswith("s3:")

    def files(self, timeout_s: float = 20.0, retry: int = 2) -> StreamLocation:
        return files_of(self.remote, self.local, timeout_s, retry)

    def assert_whole_and_alone(self) -> None:
        assert self.to.read_bytes() == CONTENT
        assert os.listdir(self.local) == [self.to.name]


only_s3 = pytest.mark.parametrize("bucket", ["s3"], indirect=True)


@pytest.fixture(params=["s3", "http"])
def bucket(request, tmp_path):
    name = f"fetch-{os.getpid()}-{next(bucket_numbers)}"
    folder = tmp_path / "root" / name
    folder.mkdir(parents=True)
    (folder / "a.mds").write_bytes(CONTENT)
    local = tmp_path / "local"
    with FaultServer(folder=folder.parent) as server, servers.s3_environment(server.url):
        remote = f"s3://{name}" if request.param == "s3" else f"{server.url}/{name}"
        yield Bucket(server=server, remote=remote, folder=folder, local=local)
    join_late_threads()


@pytest.fixture(scope="module", autouse=True)
def s3_library():
    """Load everything that S3 clients need before anything is timed, and clean up after them."""
    boto3.session.Session().client("s3", region_name="us-east-1").close()
    yield
    gc.collect()


def join_late_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "streampack-fetch":
            thread.join(BOUND_S)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("status", {"status": 500, "times": 2}),
        ("status", {"status": 429, "times": 2}),
        ("reset", {"times": 4}),  # the http client retries once by itself
        ("short", {"times": 6}),
        ("down", {"seconds": 1.0}),
        ("stall_body", {"times": 1}),
        pytest.param("stall_headers", {"times": 1}, marks=pytest.mark.slow),
        pytest.param("slow_start", {"times": 1, "seconds": 15.0}, marks=pytest.mark.slow),
    ],
)
def test_what_passes_within_the_budget_is_ridden_out(bucket, kind, options):
    bucket.server.add(kind, **options)
    # Only a stalled request has to wait for the end of an attempt.
    files = bucket.files(2.0, 20) if kind.startswith(("stall", "slow")) else bucket.files()
    begin = time.monotonic()
    assert fetch(files, "a.mds", bucket.to) > 1
    assert time.monotonic() - begin < budget_s(files)
    bucket.assert_whole_and_alone()


def test_twelve_failures_in_a_row_are_ridden_out_and_told_of_now_and_then(
    tmp_path, caplog, monkeypatch
):
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=waits.append)
    monkeypatch.setattr(retries, "time", clock)  # waits grow with the budget, to seconds
    stream = _Own(tmp_path, [ConnectionResetError(f"the {n}th") for n in range(12)])
    location = location_of(stream)
    attempts = fetch(location, "a.mds", tmp_path / "xyz.tmp")
    assert attempts == 13
    assert len(waits) == 12
    assert sum(waits) < budget_s(location) / 2
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 4
    first = r"a\.mds: attempt 1 failed after \d+\.\d s \(ConnectionResetError: the 0th\); trying"
    assert re.search(first, told[0])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("stall_headers", {}),
        ("trickle", {"bytes_per_s": 20.0}),
        ("status", {"status": 500}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("stall_body", {}),
                ("status", {"status": 429}),
                ("reset", {}),
                ("short", {}),
            )
        ),
    ],
)
def test_what_does_not_pass_is_an_error_soon_after_the_budget(bucket, kind, options):
    bucket.server.add(kind, **options)
    files = bucket.files(0.4)
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"a\.mds: cannot be fetched, \d+ attempts?") as raised:
        fetch(files, "a.mds", bucket.to)
    elapsed_s = time.monotonic() - begin

    assert elapsed_s < budget_s(files) + SPARE_S
    error = raised.value
    assert (error.uri, error.shard) == (f"{bucket.remote}/a.mds", "a.mds")
    assert 0.4 < error.elapsed_s <= elapsed_s
    assert f"cannot be fetched, {error.attempts} attempt" in str(error)
    assert "raise retry and timeout of Download" in str(error)
    assert os.listdir(bucket.local) == []


@pytest.fixture
def unsigned(bucket, monkeypatch):
    """Give a bucket to a process without credentials."""
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    return bucket


@only_s3
def test_credentials_that_are_given_in_part_are_named(bucket, monkeypatch):
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(DataError, match=r"3 attempts in .*PartialCredentialsError") as raised:
        fetch(bucket.files(60.0), "a.mds", bucket.to)
    assert bucket.server.count() == 0
    assert "; give this process credentials for the store, in the env" in str(raised.value)
    assert raised.value.elapsed_s < BOUND_S


@only_s3
def test_a_public_bucket_is_read_without_credentials(unsigned):
    assert fetch(unsigned.files(60.0), "a.mds", unsigned.to) == 1
    unsigned.assert_whole_and_alone()


@only_s3
def test_a_bucket_that_refuses_who_has_no_credentials_is_asked_three_times(unsigned):
    # The machine's credential service may miss a call.
    refused = unsigned.server.add("status", status=403)
    with pytest.raises(DataError, match=r"3 attempts in .*HTTP 403") as raised:
        fetch(unsigned.files(60.0), "a.mds", unsigned.to)
    assert refused.given == 3
    assert "; give this process credentials for the store, in the env" in str(raised.value)
    assert f"If readers pay for the bucket, name it in {REQUESTER_PAYS}" in str(raised.value)


def test_azure_without_credentials_is_an_error_that_names_them(tmp_path, monkeypatch):
    pytest.importorskip("adlfs", reason="adlfs is in the azure extra")
    for variable in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(variable)
    # Neither this machine's identity nor a login of its user.
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "EnvironmentCredential")
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "streampack")
    monkeypatch.setenv("PATH", str(tmp_path))
    files = files_of("azure://container", tmp_path / "l", 60.0)
    with pytest.raises(DataError, match="ClientAuthenticationError") as raised:
        fetch(files, "a.mds", tmp_path / "l" / "xyz.tmp")
    assert "; give this process credentials for the store, in the env" in str(raised.value)
    assert raised.value.elapsed_s < BOUND_S


def test_credentials_that_come_late_are_waited_for_a_little(tmp_path):
    lost = [NoCredentialsError(), NoCredentialsError()]
    stream = _Own(tmp_path, lost)
    assert fetch(location_of(stream), "a.mds", tmp_path / "xyz.tmp") == 3
    # Without credentials, one cannot tell whether a length file exists.
    stream.failures = [NoCredentialsError()] * 3
    with pytest.raises(DataError, match="cannot be fetched, 3 attempts in"):
        fetch_if_there(location_of(stream), "a.mds", tmp_path / "xyz.tmp")


@only_s3
def test_a_client_is_used_again_and_replaced_once_when_it_is_refused(bucket):
    files = bucket.files(20.0)
    fetch(files, "a.mds", bucket.to)
    fetch(files, "a.mds", bucket.to)
    assert len({request.client for request in bucket.server.requests()}) == 1

    bucket.server.add("status", status=403, times=1)
    assert fetch(files, "a.mds", bucket.to) == 2
    assert len({request.client for request in bucket.server.requests()}) == 2

    bucket.server.clear()
    refused = bucket.server.add("status", status=403)
    with pytest.raises(DataError, match="cannot be fetched, 2 attempts in"):
        fetch(files, "a.mds", bucket.to)
    assert refused.given == 2


def test_a_larger_object_gets_more_time(tmp_path):
    files = files_of(str(tmp_path), tmp_path / "local", timeout_s=10.0, retry=2)
    assert attempt_s(files) == 10.0
    assert attempt_s(files, 64_000_000) == 74.0
    assert budget_s(files, 64_000_000) == 222.0
    assert budget_s(files_of(str(tmp_path), tmp_path / "local", retry=0)) == 1.0


class _Late(streaming.Stream):
    """A stream where the first attempt hangs until released, and then still writes its file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            remote=str(folder), local=str(folder), download_timeout=0.2, download_retry=200
        )
        self.free = threading.Event()
        self.late: list[Path] = []
        self.calls: list[str] = []

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        path = Path(self.local, to_basename or from_basename)
        self.calls.append(from_basename)
        if len(self.calls) == 1:
            self.free.wait(BOUND_S)
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".part").write_bytes(b"half")
            self.late.append(path)
        path.write_bytes(CONTENT)
        return str(path)


def test_an_overdue_attempt_is_left_alone_and_its_late_files_are_removed(tmp_path):
    stream = _Late(tmp_path)
    to = tmp_path / "xyz.tmp"
    assert fetch(location_of(stream), "a.mds", to) >= 2  # the others need 0.2 s by chance
    assert os.listdir(tmp_path) == ["xyz.tmp"]
    assert not stream.late
    stream.free.set()
    join_late_threads()
    assert len(stream.late) == 1
    assert os.listdir(tmp_path) == ["xyz.tmp"]
    assert to.read_bytes() == CONTENT


class _Own(streaming.Stream):
    """A stream with its own way to fetch; it raises each of `failures` before it succeeds."""

    def __init__(self, folder: Path, failures: list[Exception] | None = None) -> None:
        super().__init__(
            remote=str(folder), local=str(folder), download_timeout=20, download_retry=2
        )
        self.failures = failures or []

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        if self.failures:
            raise self.failures.pop(0)
        path = Path(self.local, to_basename or from_basename)
        path.write_bytes(f"own {from_basename}".encode())
        return str(path)


@pytest.mark.parametrize(
    "error",
    [
        DataError("no room"),
        KeyboardInterrupt("no room"),
        *(OSError(number, "no room") for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)),
    ],
    ids=repr,
)
def test_what_no_other_attempt_can_change_is_raised_as_it_is(tmp_path, error):
    stream = _Own(tmp_path, [error, error])
    with pytest.raises(type(error), match="no room"):
        fetch(location_of(stream), "a.mds", tmp_path / "xyz.tmp")
    assert len(stream.failures) == 1
    assert os.listdir(tmp_path) == []


def test_a_client_that_says_success_and_writes_nothing_is_not_believed(tmp_path):
    class Nothing(_Own):
        def _download_file(self, *_: str) -> str:
            return ""

    stream = Nothing(tmp_path)
    stream.download_timeout = 1
    with pytest.raises(DataError, match=r"client reported success, but wrote no a\.mds"):
        fetch(location_of(stream), "a.mds", tmp_path / "xyz.tmp")


def test_what_may_be_missing_is_told_from_what_cannot_be_had(bucket, caplog):
    files = bucket.files()
    assert not fetch_if_there(files, "b.mds", bucket.to)
    assert fetch_if_there(files, "a.mds", bucket.to)
    bucket.assert_whole_and_alone()
    bucket.to.unlink()
    assert not caplog.records

    # If listing is not allowed, S3 responds with 403 for objects that do not exist.
    refusal = bucket.server.add("status", status=403)
    assert not fetch_if_there(files, "b.mds", bucket.to)
    assert refusal.given <= (2 if bucket.is_s3 else 4)  # HEAD and GET
    message = (
        rf"{bucket.remote}/b\.mds: was refused \(HTTP 403, Client\w*Error: .*\) and is treated "
        r"as missing: a node that gets it plans another sequence; give all nodes the same access "
        r"to it, or, if there is none, write it \(streampack index\)"
    )
    assert caplog.records[-1].levelname == "WARNING"
    assert re.fullmatch(message, caplog.messages[-1])
    bucket.server.add("status", status=500)
    with pytest.raises(DataError, match=r"a\.mds: cannot be fetched"):
        fetch_if_there(bucket.files(0.4), "a.mds", bucket.to)


def test_a_class_of_its_own_may_say_that_there_is_none_with_any_error(tmp_path, caplog):
    stream = _Own(tmp_path, [KeyError("lengths.bin")] * 9)

    assert not fetch_if_there(location_of(stream), "lengths.bin", tmp_path / "x.tmp")
    assert "lengths.bin: was refused (KeyError: 'lengths.bin') and is treated as mis" in caplog.text
    stream.failures.clear()
    assert fetch_if_there(location_of(stream), "a.mds", tmp_path / "x.tmp")


def test_a_folder_is_fetched_from_without_libraries_of_stores(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "a.mds").write_bytes(CONTENT)
    code = """
import sys
from pathlib import Path
from streampack.storage.download import fetch
from streampack.streams import Stream

for scheme in ("", "file://"):
    stream = Stream(remote=f"{scheme}{sys.argv[1]}/r", local=f"{sys.argv[1]}/l")
    fetch(stream.source.location(), "a.mds", Path(sys.argv[1], "l", "a.tmp"))
libraries = {"boto3", "botocore", "fsspec", "aiohttp"}
print(sorted(libraries & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
