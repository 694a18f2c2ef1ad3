"""Stores tell sums of their objects: what comes is compared, and nothing is refused wrongly."""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import boto3
import google_crc32c
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud.storage import Client

from streampack.errors import DataError
from streampack.mds import mosaic
from streampack.storage import store_checksums
from streampack.storage.download import fetch, fetch_if_there
from streampack.storage.location import StreamLocation
from streampack.storage.store_checksums import sums_of
from streampack.streams import Stream, open_stream
from streampack.write import write_lengths
from tests.helpers import builders
from tests.helpers.faults import servers
from tests.helpers.faults.faultserver import FaultServer

CONTENT = bytes(range(256)) * 400
LARGE = CONTENT * 90  # more than the 8 MiB from which boto3 asks for parts
# A pooled client keeps the server it was made for, so that no two tests may share a bucket.
numbers = itertools.count()

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def b64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def crc64(content: bytes) -> bytes:
    summed = store_checksums._factories()["crc64nvme"]()
    summed.update(memoryview(content))
    return bytes.fromhex(summed.hexdigest())


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def google_hashes(content: bytes) -> str:
    crc = google_crc32c.value(content).to_bytes(4, "big")
    return f"crc32c={b64(crc)},md5={b64(hashlib.md5(content).digest())}"


NO_ETAG: dict[str, str | None] = {"ETag": None}
TOLD: dict[str, Callable[[bytes], Mapping[str, str | None]]] = {
    "etag": lambda _: {},
    "etag_sse_s3": lambda _: {"x-amz-server-side-encryption": "AES256"},
    "content_md5": lambda c: NO_ETAG | {"Content-MD5": b64(hashlib.md5(c).digest())},
    "crc32": lambda c: NO_ETAG | {"x-amz-checksum-crc32": b64(zlib.crc32(c).to_bytes(4, "big"))},
    "crc32c": lambda c: (
        NO_ETAG | {"x-amz-checksum-crc32c": b64(google_crc32c.value(c).to_bytes(4, "big"))}
    ),
    "crc64nvme": lambda c: ({"ETag": f'"{md5(c)}-3"', "x-amz-checksum-crc64nvme": b64(crc64(c))}),
    "sha1": lambda c: NO_ETAG | {"x-amz-checksum-sha1": b64(hashlib.sha1(c).digest())},
    "sha256": lambda c: NO_ETAG | {"x-amz-checksum-sha256": b64(hashlib.sha256(c).digest())},
    "goog": lambda c: {"ETag": '"CKicn4fknoQCEAE="', "x-goog-hash": google_hashes(c)},
}
WRONG = '"0123456789abcdef0123456789abcdef"'
UNTOLD: dict[str, Mapping[str, str | None]] = {
    "none": NO_ETAG,
    "multipart": {"ETag": '"0123456789abcdef0123456789abcdef-8"'},
    "weak": {"ETag": f"W/{WRONG}"},
    "other_etag": {"ETag": '"CKicn4fknoQCEAE="'},
    "kms": {"ETag": WRONG, "x-amz-server-side-encryption": "aws:kms"},
    "dsse": {"ETag": WRONG, "x-amz-server-side-encryption": "aws:kms:dsse"},
    "sse_c": {"ETag": WRONG, "x-amz-server-side-encryption-customer-algorithm": "AES256"},
    "ibm_kp": {"ETag": WRONG, "ibm-sse-kp-enabled": "true"},
    "goog_kms": {"ETag": WRONG, "x-goog-encryption-kms-key-name": "k"},
    "express": {"ETag": WRONG, "x-amz-storage-class": "EXPRESS_ONEZONE"},
    "composite": NO_ETAG | {"x-amz-checksum-crc32": "NSRBwg==-3"},
    "unknown_sum": NO_ETAG | {"x-amz-checksum-md17": "NSRBwg=="},
    "no_base64": NO_ETAG | {"Content-MD5": "?", "x-goog-hash": "x,md5=??,crc32c="},
    "stored_packed": {
        "ETag": WRONG,
        "x-goog-hash": "crc32c=AAAAAA==",
        "x-goog-stored-content-encoding": "gzip",
    },
}


@pytest.mark.parametrize("row", UNTOLD)
def test_what_is_no_sum_of_the_whole_object_is_not_compared(row):
    assert sums_of({name: value for name, value in UNTOLD[row].items() if value}) == {}


@pytest.mark.parametrize("row", TOLD)
def test_each_sum_that_is_told_is_found(row):
    told = {"ETag": f'"{md5(CONTENT)}"'} | dict(TOLD[row](CONTENT))
    sums = sums_of({name: value for name, value in told.items() if value})
    assert sums
    for name, digest in sums.items():
        summed = store_checksums._factories()[name]()
        summed.update(memoryview(CONTENT))
        assert summed.hexdigest() == digest


def test_sums_have_their_published_check_values():
    published = {"crc32": "cbf43926", "crc32c": "e3069283", "crc64nvme": "ae8b14860a799888"}
    for name, digest in published.items():
        whole, parts = store_checksums._factories()[name](), store_checksums._factories()[name]()
        whole.update(memoryview(b"123456789"))
        for each in b"123456789":
            parts.update(memoryview(bytes([each])))
        assert whole.hexdigest() == parts.hexdigest() == digest


@dataclass(frozen=True, kw_only=True)
class Bucket:
    server: FaultServer
    folder: Path
    remote: str
    to: Path

    @property
    def files(self) -> StreamLocation:
        local = self.to.parent
        local.mkdir(exist_ok=True)
        return StreamLocation.of(Stream(remote=self.remote, local=str(local), download_timeout=20))


@pytest.fixture
def bucket(tmp_path) -> Iterator[Bucket]:
    name = f"answers-{os.getpid()}-{next(numbers)}"
    folder = tmp_path / "root" / name
    folder.mkdir(parents=True)
    (folder / "a.mds").write_bytes(CONTENT)
    with FaultServer(folder=folder.parent) as server, servers.s3_environment(server.url):
        yield Bucket(
            server=server, folder=folder, remote=f"s3://{name}", to=tmp_path / "local" / "x.tmp"
        )


@pytest.mark.parametrize("row", TOLD)
def test_a_flip_in_flight_is_seen_and_the_object_fetched_again(bucket, row):
    bucket.server.tells = TOLD[row]
    fault = bucket.server.add("flip", path="a.mds", times=1)
    attempts = fetch(bucket.files, "a.mds", bucket.to)
    assert bucket.to.read_bytes() == CONTENT
    assert (fault.given, attempts) == (1, 2)
    # The head that tells is asked for anyway.
    assert bucket.server.count("a.mds", "HEAD|GET") == 4


@pytest.mark.parametrize("row", ["etag", "crc64nvme", "crc32", "goog"])
def test_an_object_that_comes_in_parts_is_compared_as_a_whole(bucket, row):
    (bucket.folder / "a.mds").write_bytes(LARGE)
    bucket.server.tells = TOLD[row]
    bucket.server.add("flip", path="a.mds", times=1)
    assert fetch(bucket.files, "a.mds", bucket.to) == 2
    assert bucket.to.read_bytes() == LARGE


def test_flips_that_stay_are_an_error_that_names_both_sums(bucket):
    flipped = bytearray(CONTENT)
    flipped[len(CONTENT) // 2] ^= 1
    bucket.server.add("flip", path="a.mds")
    message = f"its md5 is {md5(bytes(flipped))}, but the store says {md5(CONTENT)}"
    with pytest.raises(DataError, match=message) as caught:
        fetch(bucket.files, "a.mds", bucket.to)
    assert caught.value.attempts == 4
    assert not bucket.to.exists()


@pytest.mark.parametrize("row", UNTOLD)
def test_an_object_whose_sum_is_not_told_is_taken(bucket, row):
    bucket.server.tells = lambda _: UNTOLD[row]
    assert fetch(bucket.files, "a.mds", bucket.to) == 1


def test_a_hash_of_the_streams_own_goes_before_what_the_store_tells(bucket):
    bucket.server.tells = lambda _: {"ETag": WRONG}
    assert fetch(bucket.files, "a.mds", bucket.to, is_hashed=True) == 1


def test_a_length_file_is_compared_too(bucket):
    bucket.server.add("flip", path="a.mds", times=1)
    assert fetch_if_there(bucket.files, "a.mds", bucket.to)
    assert bucket.to.read_bytes() == CONTENT


def test_a_store_whose_etags_are_no_sums_serves_a_stream_that_was_indexed_elsewhere(
    bucket, tmp_path
):
    path, _ = builders.write_stream_files(bucket.folder / "s", [9] * 200, lengths_file=False)
    bucket.server.tells = lambda c: {"ETag": f'"{md5(c)}"' if c[:1] == b"{" else WRONG}
    stream = Stream(remote=f"{bucket.remote}/s", local=str(tmp_path / "local"), download_timeout=20)
    opened = open_stream(stream, 0)
    with pytest.raises(DataError, match="run `streampack index` on a copy") as caught:
        opened.open_shard(0)
    assert "upload its lengths.bin" in str(caught.value)

    shutil.copytree(path, tmp_path / "copy")
    write_lengths(tmp_path / "copy")
    shutil.copy(tmp_path / "copy" / "lengths.bin", tmp_path / "local")
    assert open_stream(stream, 0).open_shard(0).tokens.counts.tolist()[0] == 9


def google_client(url: str) -> Client:
    return Client("p", AnonymousCredentials(), client_options={"api_endpoint": url})


def google_client_by_key(url: str):
    return boto3.session.Session().client(
        "s3",
        region_name="auto",
        endpoint_url=url,
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )


@pytest.mark.parametrize("make", [google_client, google_client_by_key])
def test_googles_sums_are_compared_with_both_of_its_clients(bucket, tmp_path, monkeypatch, make):
    # Its address is fixed in MosaicML's downloader; all else is as there.
    def create(self):
        self._gcs_client = make(bucket.server.url)

    monkeypatch.setattr(mosaic.DOWNLOADER_MAPPINGS["gs"], "_create_gcs_client", create)
    name = bucket.folder.name
    shutil.copy(bucket.folder / "a.mds", bucket.folder / "b.mds")
    api = bucket.folder.parent / "download" / "storage" / "v1" / "b" / name / "o"
    shutil.copytree(bucket.folder, api)
    bucket.server.tells = TOLD["goog"]
    stream = Stream(remote=f"gs://{name}", local=str(tmp_path / "g"), download_timeout=20)
    (tmp_path / "g").mkdir()
    fault = bucket.server.add("flip", path="a.mds", times=1)
    to = tmp_path / "g" / "x.tmp"
    assert fetch(StreamLocation.of(stream), "a.mds", to) == 2
    assert (to.read_bytes(), fault.given) == (CONTENT, 1)

    bucket.server.add("flip", path="b.mds")
    with pytest.raises(DataError, match=r"the same in 4 downloads|damaged 4 times") as caught:
        fetch(StreamLocation.of(stream), "b.mds", to)
    assert "hash" in str(caught.value).lower() or "crc32c is" in str(caught.value)
