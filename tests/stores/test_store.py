"""Objects are listed, read and written the same way in S3 and over HTTP, and by forked children."""

from __future__ import annotations

import http.server
import multiprocessing
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from streampack.errors import DataError
from streampack.stores.failures import ChangedError, FailureKind
from streampack.stores.objects import PART_BYTES
from streampack.stores.retries import kind_of, list_objects, request
from streampack.stores.store import open_store
from tests.helpers.faults import servers
from tests.helpers.faults.faultserver import FaultServer

SMALL = bytes(range(256)) * 4
LARGE = os.urandom(1 << 20) * 20 + b"rest"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A folder behind a server that can misbehave."""

    folder: Path
    url: str
    server: FaultServer


@pytest.fixture(params=["s3", "http"])
def place(request, tmp_path):
    root = tmp_path / "root"
    folder = root / "bucket" / "ds"
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        if request.param == "s3":
            s3 = stack.enter_context(servers.s3_server(root))
            server = stack.enter_context(FaultServer(upstream=s3.url))
            stack.enter_context(servers.s3_environment(server.url))
            url = "s3://bucket/ds"
        else:
            server = stack.enter_context(FaultServer(folder=root))
            url = f"{server.url}/bucket/ds"
        yield Place(folder=folder, url=url, server=server)


def test_an_object_is_read_whole_and_in_part_in_its_version(place):
    (place.folder / "a").write_bytes(SMALL)
    url = f"{place.url}/a"
    store = open_store(url)
    found = store.stat(url)
    assert (found.url, found.num_bytes) == (url, len(SMALL))
    assert store.read(url) == SMALL
    assert store.read(url, 7, 19, version=found.version) == SMALL[7:19]
    assert store.read(url, 7, version=found.version) == SMALL[7:]
    assert store.read(url, 7, 7) == b""


def test_a_read_of_a_version_that_was_replaced_is_refused(place):
    path, url = place.folder / "a", f"{place.url}/a"
    path.write_bytes(SMALL)
    store = open_store(url)
    version = store.stat(url).version
    path.write_bytes(SMALL[::-1])
    with pytest.raises(ChangedError, match=r"a: is no longer etag:"):
        store.read(url, 0, 10, version=version)
    with pytest.raises(DataError, match=r"cannot be read, 1 attempt .*no process writes") as raised:
        request(url, "read", lambda store: store.read(url, version=version))
    assert kind_of(raised.value) is FailureKind.CHANGED


def test_a_large_object_arrives_in_parallel_parts_and_a_checked_one_in_one(place, tmp_path):
    (place.folder / "a").write_bytes(LARGE)
    url = f"{place.url}/a"
    store = open_store(url)
    store.download(url, tmp_path / "parts", len(LARGE), is_checked=False)
    assert (tmp_path / "parts").read_bytes() == LARGE
    assert place.server.count("/a") == -(-len(LARGE) // PART_BYTES) == 3


def test_a_large_object_that_changes_between_its_parts_is_refused(place, tmp_path):
    path, url = place.folder / "a", f"{place.url}/a"
    path.write_bytes(LARGE)
    store = open_store(url)

    class Replaced(threading.Thread):
        def run(self) -> None:
            while not any(request.num_bytes for request in place.server.requests("/a", "GET")):
                time.sleep(0.01)
            path.write_bytes(LARGE[::-1])

    place.server.add("trickle", path="/a", bytes_per_s=10_000_000, times=1)
    replaced = Replaced()
    replaced.start()
    with pytest.raises(ChangedError, match="is no longer etag:"):
        store.download(url, tmp_path / "a", len(LARGE), is_checked=False)
    replaced.join()


def test_a_web_server_without_ranges_serves_a_whole_download_only(tmp_path):
    (tmp_path / "a").write_bytes(LARGE)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    handler = partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        folder = f"http://127.0.0.1:{server.server_port}/"
        url = f"{folder}a"
        open_store(url).download(url, tmp_path / "to", None, is_checked=False)
        assert (tmp_path / "to").read_bytes() == LARGE
        assert [found.url for found in list_objects(folder)] == [url, f"{folder}to"]
        with pytest.raises(DataError, match=r"1 attempt .*whole objects only.*copy the file to"):
            request(url, "read", lambda store: store.read(url, 1, 3))
        server.shutdown()
        thread.join()


def _read(
    url: str, results: multiprocessing.Queue, environment: dict[str, str], are_made: Event
) -> None:
    # A fork server has the environment from its start, perhaps in an earlier test.
    os.environ.update(environment)
    # The server's threads are in the parent. A fork while they answer would copy their locks.
    are_made.wait()
    results.put(request(url, "read", lambda store: store.read(url)))


@pytest.mark.parametrize(
    ("place", "method"),
    [("s3", "fork"), ("s3", "forkserver"), ("http", "fork"), ("http", "spawn")],
    indirect=["place"],
)
def test_children_read_after_their_parent_has_used_the_store(place, method):
    (place.folder / "a").write_bytes(SMALL)
    url = f"{place.url}/a"
    assert request(url, "read", lambda store: store.read(url)) == SMALL
    context = multiprocessing.get_context(method)
    results = context.Queue()
    are_made = context.Event()
    arguments = url, results, dict(os.environ), are_made
    num = 3 if method == "fork" else 1  # the others import everything again
    children = [context.Process(target=_read, args=arguments) for _ in range(num)]
    for child in children:
        child.start()
    are_made.set()
    assert [results.get(timeout=300) for _ in children] == [SMALL] * num
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    assert request(url, "read", lambda store: store.read(url)) == SMALL
    clients = [request.client for request in place.server.requests("/a", "GET")]
    assert len(set(clients)) == 1 + len(children)
