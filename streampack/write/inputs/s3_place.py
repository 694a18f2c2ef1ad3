"""Objects of S3, or a compatible store, as a place of inputs.

::

    list-objects  -->  key, ETag, size
    GET Range: bytes=0-8388607, If-Match: "ETag"  -->  a block, or 412: the object has changed

A request that fails for a passing reason is repeated, also one whose body breaks off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any

from streampack.errors import DataError
from streampack.stores.failures import FailureKind, classify, status_of, text_of
from streampack.write.inputs.places import (
    MAGIC,
    Found,
    Listing,
    OpenInput,
    changed,
    is_hidden,
    match_glob,
    open_ranges,
    version_of_tag,
)
from streampack.write.s3_client import bucket_options, list_objects, retrying, s3_client

CHANGED = (412, 416)  # If-Match failed; the range lies beyond the end
WAYS_OUT = {
    FailureKind.MISSING: "the store has no such object or bucket: check the URL",
    FailureKind.DENIED: "the store refuses: check the URL and the rights of the credentials",
    FailureKind.NO_CREDENTIALS: (
        "give this process credentials, in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a file or "
        "a role of the machine"
    ),
}


class S3Place:
    """The `Place` of objects."""

    def find(self, uri: str) -> list[Listing]:
        bucket, key = _bucket_and_key(uri)
        first = list(islice(_objects(uri, bucket, key), 1)) if key else []
        if first and first[0].uri == uri:  # the object's own key sorts first
            return [Listing(None, first)]
        if MAGIC.search(key):
            found = {file.uri: file for file in _objects(uri, bucket, MAGIC.split(key)[0])}
            return match_glob(uri, found, found.__getitem__)
        folder = uri.rstrip("/")
        files = _objects(uri, bucket, f"{key.rstrip('/')}/" if key else "")
        below = len(folder) + 1
        return [Listing(folder, [file for file in files if not is_hidden(file.uri[below:])])]

    def open(
        self, uri: str, version: str, stop: int, *, is_sequential: bool
    ) -> AbstractContextManager[OpenInput]:
        bucket, key = _bucket_and_key(uri)
        if stop < 0:
            stop = _size_of(uri, bucket, key, version)
        fetch = partial(_fetch, uri, bucket, key, version)  # each request compares the version
        return open_ranges(fetch, stop, is_sequential=is_sequential)


def _bucket_and_key(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not bucket:
        raise DataError(f"{uri}: names no bucket; write it as s3://bucket/path", uri=uri)
    return bucket, key


def _objects(uri: str, bucket: str, prefix: str) -> Iterator[Found]:
    try:
        for entry in list_objects(bucket, prefix):
            version = version_of_tag(entry["ETag"])
            yield Found(f"s3://{bucket}/{entry['Key']}", version, entry["Size"])
    except Exception as error:  # botocore's, which derive from Exception
        raise _failure(uri, "listed", error) from error


def _size_of(uri: str, bucket: str, key: str, version: str) -> int:
    try:
        answer = s3_client().head_object(**bucket_options(bucket), Key=key)
    except Exception as error:  # botocore's, which derive from Exception
        raise _failure(uri, "read", error) from error
    now = version_of_tag(answer["ETag"])
    if now != version:
        raise changed(uri, version, now)
    return int(answer["ContentLength"])


def _fetch(uri: str, bucket: str, key: str, version: str, start: int, stop: int) -> bytes:
    if start >= stop:
        return b""
    try:
        etag, data = retrying(_is_passing)(_get, bucket, key, version, start, stop)
    except Exception as error:  # botocore's, which derive from Exception
        if status_of(error) in CHANGED:
            raise changed(uri, version, "another") from error
        raise _failure(uri, f"read from byte {start} on", error) from error
    if version_of_tag(etag) != version:  # a store that does not know If-Match
        raise changed(uri, version, version_of_tag(etag))
    return data


def _get(bucket: str, key: str, version: str, start: int, stop: int) -> tuple[str, bytes]:
    answer = s3_client().get_object(
        **bucket_options(bucket),
        Key=key,
        Range=f"bytes={start}-{stop - 1}",
        IfMatch=f'"{version.removeprefix("etag:")}"',
    )
    data: bytes = answer["Body"].read()
    if len(data) != stop - start:
        raise ConnectionError(f"{len(data)} of {stop - start} bytes arrived")
    return answer["ETag"], data


def _is_passing(error: BaseException) -> bool:
    # No file is written here, so no path in the error is ours.
    return classify(error, "\0") is FailureKind.PASSING and status_of(error) not in CHANGED


def _failure(uri: str, action: str, error: Any) -> DataError:
    way_out = WAYS_OUT.get(
        classify(error, "\0"), "check the URL, S3_ENDPOINT_URL and the network, and run it again"
    )
    return DataError(f"{uri}: cannot be {action} ({text_of(error)}); {way_out}", uri=uri)
