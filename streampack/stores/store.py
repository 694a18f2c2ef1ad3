"""What a store can do, and this process's stores.

::

    open_store("s3://bucket/en/shard.00000.mds")    S3Store of s3://bucket
    open_store("gs://bucket/en/shard.00000.mds")    DriverStore of gs://bucket, through gcsfs

Methods make one attempt and raise the exceptions of the library. `retries.py` retries them. They
raise ChangedError if an object is not the version that was asked for.

A forked child inherits its parent's stores in memory. It neither uses nor finalizes them, because
finalizing one may close a connection that the parent still uses.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from streampack.stores.drivers import DriverStore
from streampack.stores.objects import StoredObject
from streampack.stores.s3 import S3_SCHEMES, S3Store

TIMEOUT_S = 60.0
ADDRESSES = ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")


class Store(Protocol):
    """The objects of one bucket or host, addressed by URL; several threads may use it."""

    has_credentials: bool
    """False if requests are sent unsigned because no credentials were found."""
    has_served: bool
    """Whether an operation has succeeded."""

    def list(self, prefix: str, after: str = "") -> tuple[list[StoredObject], str | None]:
        """Return objects with a URL that begins with `prefix`, sorted by name, and `after`.

        With this `after`, the next call continues; None: these are the last. Markers of folders are
        omitted.
        """

    def stat(self, url: str) -> StoredObject:
        """Return an object's version and size."""

    def read(
        self, url: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> bytes:
        """Return the bytes of an object from `start` up to `stop`, None for its end."""

    def download(self, url: str, to: Path, num_bytes: int | None, *, is_checked: bool) -> None:
        """Write an object to a new file, a large one in parallel ranges.

        `num_bytes` is its expected size. With `is_checked` it is read by one request, and the
        checksum that the store reports is compared, where the library can compute it.
        """

    def write(self, url: str, data: bytes) -> None:
        """Write an object, replacing another of its name."""

    def write_if_absent(self, url: str, data: bytes) -> bool:
        """Write an object and return True; return False if there is one of its name.

        A ConfigError says that the store has no such request.
        """

    def remove(self, url: str) -> None:
        """Remove an object."""


@dataclass(slots=True)
class _Slot:
    lock: threading.Lock = field(default_factory=threading.Lock)
    store: Store | None = None


_slots: dict[int, dict[tuple[object, ...], _Slot]] = {}


def open_store(url: str, timeout_s: float = TIMEOUT_S) -> Store:
    """Return this process's store for a URL; `timeout_s` is how long an answer may take.

    Raises:
        NoStoreError: If the scheme is unknown.
        ImportError: If the driver of the scheme is not installed.
    """
    slot = _slot(url, timeout_s)
    with slot.lock:
        if slot.store is None:
            kind = S3Store if url.partition("://")[0] in S3_SCHEMES else DriverStore
            slot.store = kind(url, timeout_s)
        return slot.store


def renew_store(url: str, timeout_s: float, old: Store) -> None:
    """Make the next `open_store` create a store, which reads the credentials again."""
    slot = _slot(url, timeout_s)
    with slot.lock:
        if slot.store is old:
            slot.store = None


def _slot(url: str, timeout_s: float) -> _Slot:
    # Stores of the parents stay in the dictionary, so that they are never finalized here. They are
    # not touched either: their locks may be held by threads that do not exist in this process.
    slots = _slots.get(os.getpid()) or _slots.setdefault(os.getpid(), {})
    addresses = (os.environ.get(name) for name in ADDRESSES)
    key = ("/".join(url.split("/")[:3]), timeout_s, *addresses)
    return slots.get(key) or slots.setdefault(key, _Slot())
