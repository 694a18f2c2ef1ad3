"""S3 and compatible stores, through boto3.

::

    list-objects                                             key, ETag, size
    GET Range: bytes=0-8388607, If-Match: "ETag"             a part, or 412: the object has changed
    GET x-amz-checksum-mode: ENABLED                         botocore compares the store's checksum
    PUT Content-MD5, If-None-Match: *                        a new object, or 412: there is one

`S3_ENDPOINT_URL` and `AWS_ENDPOINT_URL` name a compatible store. Buckets in
`MOSAICML_STREAMING_AWS_REQUESTER_PAYS` are read at the reader's cost. Without credentials requests
are unsigned, which public buckets answer.

botocore's own retries are off: `retries.py` retries.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from streampack.stores.failures import CHANGED, ChangedError, DamagedError, codes_of, status_of
from streampack.stores.objects import (
    PART_BYTES,
    StoredObject,
    fetch_parts,
    is_large,
    version_of_tag,
)
from streampack.stores.threads import cut_when_abandoned

S3_SCHEMES = ("s3", "r2")
CONNECT_S = 10.0
CHUNK_BYTES = 1 << 20
MAX_CONNECTIONS = 128
REQUESTER_PAYS = "MOSAICML_STREAMING_AWS_REQUESTER_PAYS"
# Codes and statuses of a store's answer: not every store sends both of a pair.
UNSUPPORTED = {"NotImplemented", "501"}  # stores that do not know If-None-Match
EXISTS = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}


class S3Store:
    """The `Store` of one bucket."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._scheme, _, rest = url.partition("://")
        self._bucket = rest.partition("/")[0]
        session = import_module("boto3.session").Session()
        self.has_credentials = session.get_credentials() is not None
        options: dict[str, Any] = {}
        if not self.has_credentials:
            options["signature_version"] = import_module("botocore").UNSIGNED
        config = import_module("botocore.config").Config(
            retries={"total_max_attempts": 1},
            connect_timeout=min(CONNECT_S, timeout_s),
            read_timeout=timeout_s,
            max_pool_connections=MAX_CONNECTIONS,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            **options,
        )
        endpoint = os.environ.get("S3_ENDPOINT_URL") or None
        self._client = session.client("s3", config=config, endpoint_url=endpoint)
        self.has_served = False

    def list(self, prefix: str, after: str = "") -> tuple[list[StoredObject], str | None]:
        token = {"ContinuationToken": after} if after else {}
        page = self._client.list_objects_v2(**self._options(), Prefix=self._key(prefix), **token)
        found = [
            StoredObject(self._url(entry["Key"]), version_of_tag(entry["ETag"]), entry["Size"])
            for entry in page.get("Contents", ())
            # A console makes an empty object with such a name for a folder.
            if not entry["Key"].endswith("/")
        ]
        return found, page.get("NextContinuationToken")

    def stat(self, url: str) -> StoredObject:
        answer = self._client.head_object(**self._address(url))
        return StoredObject(url, version_of_tag(answer["ETag"]), int(answer["ContentLength"]))

    def read(
        self, url: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> bytes:
        if stop is not None and start >= stop:
            return b""
        _, chunks = self._get(url, start, stop, version)
        return b"".join(chunks)

    def download(self, url: str, to: Path, num_bytes: int | None, *, is_checked: bool) -> None:
        with to.open("wb") as file:
            if is_checked or not is_large(num_bytes):
                for chunk in self._get(url, is_checked=is_checked)[1]:
                    file.write(chunk)
                return
            found, chunks = self._get(url, 0, PART_BYTES)
            for chunk in chunks:
                file.write(chunk)
            file.flush()

            def fetch_part(start: int, stop: int) -> None:
                for chunk in self._get(url, start, stop, found.version)[1]:
                    os.pwrite(file.fileno(), chunk, start)
                    start += len(chunk)

            fetch_parts(fetch_part, PART_BYTES, found.num_bytes)

    def write(self, url: str, data: bytes, **conditions: str) -> None:
        digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        options = self._address(url) | conditions
        if acl := os.environ.get("S3_CANNED_ACL"):  # as MosaicML's uploader
            options["ACL"] = acl
        self._client.put_object(Body=data, ContentMD5=digest, **options)

    def write_if_absent(self, url: str, data: bytes) -> bool:
        try:
            self.write(url, data, IfNoneMatch="*")
            return True
        except Exception as error:  # botocore's, which derive from Exception
            codes = codes_of(error)
            # A retry may meet the object that its first attempt wrote.
            if codes & EXISTS:
                return False
            if not codes & UNSUPPORTED:
                raise
        if any(found.url == url for found in self.list(url)[0]):
            return False
        self.write(url, data)
        return True

    def remove(self, url: str) -> None:
        self._client.delete_object(**self._address(url))

    def _get(
        self,
        url: str,
        start: int = 0,
        stop: int | None = None,
        version: str | None = None,
        *,
        is_checked: bool = False,
    ) -> tuple[StoredObject, Iterator[bytes]]:
        options = self._address(url)
        if start or stop is not None:
            options["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        if version is not None:
            options["IfMatch"] = f'"{version.removeprefix("etag:")}"'
        if is_checked:
            options["ChecksumMode"] = "ENABLED"
        try:
            answer = self._client.get_object(**options)
        except Exception as error:  # botocore's, which derive from Exception
            if version is not None and status_of(error) in CHANGED:
                raise ChangedError(f"{url}: is no longer {version}") from error
            raise
        now = version_of_tag(answer.get("ETag", ""))
        if version not in (None, now):  # a store that does not know If-Match
            answer["Body"].close()
            raise ChangedError(f"{url}: is no longer {version}, but {now}")
        total = answer.get("ContentRange", "").rpartition("/")[2] or answer["ContentLength"]
        found = StoredObject(url, now, int(total))
        end = found.num_bytes if stop is None else min(stop, found.num_bytes)
        return found, _chunks(answer["Body"], end - start)

    def _options(self) -> dict[str, str]:
        names = [name.strip() for name in os.environ.get(REQUESTER_PAYS, "").split(",")]
        payer = {"RequestPayer": "requester"} if self._bucket in names else {}
        return {"Bucket": self._bucket, **payer}

    def _address(self, url: str) -> dict[str, str]:
        return {**self._options(), "Key": self._key(url)}

    def _key(self, url: str) -> str:
        return url.removeprefix(self._url(""))

    def _url(self, key: str) -> str:
        return f"{self._scheme}://{self._bucket}/{key}"


def _chunks(body: Any, num_bytes: int) -> Iterator[bytes]:
    left = num_bytes
    # The library compares checksum and length only if it is read to the end through `read`.
    with closing(body), cut_when_abandoned(body._raw_stream.shutdown):
        try:
            while chunk := body.read(CHUNK_BYTES):
                left -= len(chunk)
                yield chunk
        except Exception as error:
            if type(error).__name__ == "FlexibleChecksumError":  # botocore is not imported here
                raise DamagedError(" ".join(str(error).split())) from error
            raise
    if left:  # an answer may be short, and consistent in itself
        raise ConnectionError(f"{num_bytes - left} of {num_bytes} bytes arrived")
