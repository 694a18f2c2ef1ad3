"""The stores of this process.

::

    open_store("s3://bucket/en/shard.00000.mds")    S3Store of s3://bucket
    open_store("gs://bucket/en/shard.00000.mds")    DriverStore of gs://bucket, through gcsfs

Both classes have the same methods. Each makes one attempt and raises the exceptions of the library,
or ChangedError if an object is not the version that was asked for. `retries.py` retries them.

A page of `list` ends with what continues it, or None after the last. `download` may read large
objects in parallel ranges; with `is_checked` it compares the checksum that the store reports, where
the library can compute it. `has_credentials` is False if requests are unsigned for lack of
credentials, and `has_served` says whether an operation has succeeded.

A forked child inherits its parent's stores in memory. It neither uses nor finalizes them, because
finalizing one may close a connection that the parent still uses.
"""

from __future__ import annotations

import os
import threading
from typing import TypeAlias

from streampack.stores.drivers import DriverStore
from streampack.stores.s3 import S3_SCHEMES, S3Store

TIMEOUT_S = 60.0
ADDRESSES = ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")


Store: TypeAlias = S3Store | DriverStore
"""The objects of one bucket or host, addressed by URL; several threads may use it."""


_stores: dict[tuple[object, ...], Store] = {}
_locks: dict[int, threading.Lock] = {}
"""By process: a thread that exists only in the parent may hold the parent's."""


def open_store(url: str, timeout_s: float = TIMEOUT_S) -> Store:
    """Return this process's store for a URL; `timeout_s` is how long an answer may take.

    Raises:
        NoStoreError: If the scheme is unknown.
        ImportError: If the driver of the scheme is not installed.
    """
    key = _key(url, timeout_s)
    if (store := _stores.get(key)) is not None:
        return store
    with _locks.setdefault(os.getpid(), threading.Lock()):
        if key not in _stores:
            kind = S3Store if url.partition("://")[0] in S3_SCHEMES else DriverStore
            _stores[key] = kind(url, timeout_s)
        return _stores[key]


def renew_store(url: str, timeout_s: float, old: Store) -> None:
    """Make the next `open_store` create a store, which reads the credentials again."""
    key = _key(url, timeout_s)
    with _locks.setdefault(os.getpid(), threading.Lock()):
        if _stores.get(key) is old:
            del _stores[key]


def _key(url: str, timeout_s: float) -> tuple[object, ...]:
    addresses = (os.environ.get(name) for name in ADDRESSES)
    return (os.getpid(), "/".join(url.split("/")[:3]), timeout_s, *addresses)
