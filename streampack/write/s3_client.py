"""The S3 client of this process, as MosaicML Streaming sets it up.

`S3_ENDPOINT_URL` names a compatible store. Buckets in `MOSAICML_STREAMING_AWS_REQUESTER_PAYS` are
read at the reader's cost.

Cost: half a second for the import of boto3, and about 50 ms for a client.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

ATTEMPTS = 10
MAX_WAIT_S = 10
CONNECT_S, READ_S = 10, 120
REQUESTER_PAYS = "MOSAICML_STREAMING_AWS_REQUESTER_PAYS"


def s3_client() -> Any:
    """Return this process's client, which its threads may share.

    Without credentials it sends unsigned requests, which public buckets answer.
    """
    return _client_of(os.getpid(), os.environ.get("S3_ENDPOINT_URL"))


def bucket_options(bucket: str) -> dict[str, str]:
    """Return the options of each request to a bucket."""
    names = [name.strip() for name in os.environ.get(REQUESTER_PAYS, "").split(",")]
    return {"Bucket": bucket, **({"RequestPayer": "requester"} if bucket in names else {})}


def list_objects(bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
    """Yield the store's entries of the keys with a prefix, in order; it is asked page by page.

    A key that ends in `/` is left out: a console makes an empty object of that name for a folder.
    """
    pages = s3_client().get_paginator("list_objects_v2")
    for page in pages.paginate(**bucket_options(bucket), Prefix=prefix):
        yield from (entry for entry in page.get("Contents", ()) if not entry["Key"].endswith("/"))


def retrying(is_passing: Callable[[BaseException], bool]) -> Retrying:
    """Return a caller of functions that calls again after an error that `is_passing`."""
    return Retrying(
        # tenacity also asks about a KeyboardInterrupt.
        retry=retry_if_exception(lambda error: isinstance(error, Exception) and is_passing(error)),
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_random_exponential(multiplier=0.2, max=MAX_WAIT_S),
        reraise=True,
    )


@lru_cache(maxsize=2)
def _client_of(pid: int, endpoint: str | None) -> Any:  # noqa: ARG001 - none crosses a fork
    session = import_module("boto3.session").Session()
    options: dict[str, Any] = {}
    if session.get_credentials() is None:
        options["signature_version"] = import_module("botocore").UNSIGNED
    config = import_module("botocore.config").Config(
        retries={"mode": "standard", "max_attempts": ATTEMPTS},
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        request_checksum_calculation="when_required",
        **options,
    )
    return session.client("s3", config=config, endpoint_url=endpoint)
