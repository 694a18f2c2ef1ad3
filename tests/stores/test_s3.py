"""Properties of S3: paged listings, requester pays, checksums, endpoints, and private CAs."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import threading
import zlib
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from streampack import Download
from streampack.errors import DataError
from streampack.storage.download import fetch, fetch_if_there
from streampack.storage.location import StreamLocation
from streampack.stores.retries import list_objects, request
from streampack.stores.store import Store, open_store
from streampack.streams import Stream
from streampack.write.job_output import open_output
from tests.helpers.examples import crossed
from tests.helpers.faults import servers
from tests.helpers.faults.faultserver import FaultServer
from tests.helpers.locations import location_of

CONTENT = bytes(range(256)) * 400
LARGE = CONTENT * 180  # too large for a single request if it had a hash
KEYS = ("in/", "in/a.txt", "in/deep/", "in/deep/b.txt", "out/", "out/parts/")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


class Listing(BaseHTTPRequestHandler):
    """A bucket with an object for each key, listed one by one."""

    def do_GET(self) -> None:
        query = {name: each[0] for name, each in parse_qs(urlsplit(self.path).query).items()}
        keys = [key for key in KEYS if key.startswith(query.get("prefix", ""))]
        at = int(query.get("continuation-token", 0))
        entries = "".join(
            f'<Contents><Key>{key}</Key><ETag>"0"</ETag><Size>0</Size></Contents>'
            for key in keys[at : at + 1]
        )
        more = at + 1 < len(keys)
        token = f"<NextContinuationToken>{at + 1}</NextContinuationToken>" if more else ""
        body = (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}"
            "</ListBucketResult>"
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def listing():
    with ThreadingHTTPServer(("127.0.0.1", 0), Listing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with servers.s3_environment(f"http://127.0.0.1:{server.server_port}"):
            yield
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("listing")
def test_every_page_is_listed_without_the_folders_that_a_console_made():
    found = [each.url for each in list_objects("s3://bucket/in/")]
    assert found == ["s3://bucket/in/a.txt", "s3://bucket/in/deep/b.txt"]
    output = open_output("s3://bucket/out")
    assert output.is_empty()
    assert output.names("", "") == []
    assert not open_output("s3://bucket/in").is_empty()


def b64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


TOLD: dict[str, Callable[[bytes], Mapping[str, str]]] = {
    "crc32": lambda c: {"x-amz-checksum-crc32": b64(zlib.crc32(c).to_bytes(4, "big"))},
    "sha1": lambda c: {"x-amz-checksum-sha1": b64(hashlib.sha1(c).digest())},
    "sha256": lambda c: {"x-amz-checksum-sha256": b64(hashlib.sha256(c).digest())},
}
UNTOLD: dict[str, Mapping[str, str]] = {
    "etag": {"ETag": '"0123456789abcdef0123456789abcdef"'},
    "composite": {"x-amz-checksum-crc32": "NSRBwg==-3"},
    "crc64nvme": {"x-amz-checksum-crc64nvme": "AAAAAAAAAAA="},
    "unknown": {"x-amz-checksum-md17": "NSRBwg=="},
}


@pytest.fixture
def bucket(tmp_path):
    (tmp_path / "root" / "bucket").mkdir(parents=True)
    (tmp_path / "root" / "bucket" / "a.mds").write_bytes(CONTENT)
    (tmp_path / "local").mkdir()
    server = FaultServer(folder=tmp_path / "root")
    with server, servers.s3_environment(server.url):
        yield server


def location(tmp_path: Path, **options: int) -> StreamLocation:
    download = Download(**{"timeout": 60, "retry": 2, **options})
    local = str(tmp_path / "local")
    return location_of(Stream(remote="s3://bucket", local=local, download=download))


@pytest.mark.parametrize(("told", "size"), crossed(list(TOLD), ["small", "large"]))
def test_a_flip_in_flight_is_noticed_by_a_checksum_of_the_store(bucket, tmp_path, told, size):
    content = LARGE if size == "large" else CONTENT
    (tmp_path / "root" / "bucket" / "a.mds").write_bytes(content)
    bucket.tells = TOLD[told]
    fault = bucket.add("flip", path="a.mds", times=1)
    to = tmp_path / "local" / "x.tmp"
    assert fetch(location(tmp_path), "a.mds", to, num_bytes=len(content)) == 2
    assert to.read_bytes() == content
    assert fault.given == 1
    assert bucket.count("a.mds", "HEAD|GET") == 2
    # A length file has no hash either.
    bucket.add("flip", path="a.mds", times=1)
    assert fetch_if_there(location(tmp_path), "a.mds", to)
    assert to.read_bytes() == content


def test_an_answer_with_fewer_bytes_than_were_asked_for_is_asked_for_again(bucket, tmp_path):
    url, path, to = "s3://bucket/a.mds", tmp_path / "root" / "bucket" / "a.mds", tmp_path / "to"
    fault = bucket.add("shorter", path="a.mds", times=1)
    assert request(url, "read", lambda store: store.read(url, 10, 1000)) == CONTENT[10:1000]
    assert fault.given == 1
    path.write_bytes(LARGE)
    fault = bucket.add("shorter", path="a.mds", skip=1, times=1)  # one of its parts

    def download(store: Store) -> None:
        store.download(url, to, len(LARGE), is_checked=False)

    request(url, "fetched", download)
    assert fault.given == 1
    assert to.read_bytes() == LARGE


def test_what_cannot_be_compared_is_taken(bucket, tmp_path):
    for name, untold in UNTOLD.items():
        bucket.tells = lambda _, untold=untold: untold
        assert fetch(location(tmp_path), "a.mds", tmp_path / "local" / f"{name}.tmp") == 1, name


@pytest.mark.parametrize("variable", ["S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_each_variable_for_a_compatible_store_is_obeyed(bucket, monkeypatch, variable):
    monkeypatch.delenv("S3_ENDPOINT_URL")
    monkeypatch.setenv(variable, bucket.url)
    assert open_store("s3://bucket/a.mds").read("s3://bucket/a.mds") == CONTENT


def test_a_proxy_of_the_environment_is_used(bucket, monkeypatch):
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://store.invalid")
    monkeypatch.setenv("HTTP_PROXY", bucket.url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    assert request("s3://bucket/a.mds", "read", lambda s: s.read("s3://bucket/a.mds")) == CONTENT


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Return a self-signed certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("authority")
    certificate, key = folder / "ca.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "2"]
    command += ["-subj", "/CN=streampack", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def test_a_store_with_a_private_authority_is_read_over_tls(tmp_path, authority, monkeypatch):
    (tmp_path / "root" / "bucket").mkdir(parents=True)
    (tmp_path / "root" / "bucket" / "a.mds").write_bytes(CONTENT)
    (tmp_path / "local").mkdir()
    to = tmp_path / "local" / "x.tmp"
    with (
        servers.s3_server(tmp_path / "root", tls=authority) as server,
        servers.s3_environment(server.url),
    ):
        with pytest.raises(DataError, match=r"cannot be fetched.*SSLError"):
            fetch(location(tmp_path, timeout=10, retry=0), "a.mds", to)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority[0]))
        assert fetch(location(tmp_path), "a.mds", to) == 1
        assert to.read_bytes() == CONTENT
