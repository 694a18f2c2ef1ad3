"""Pool of store clients: created lazily, used by one thread at a time, never shared across a fork.

::

    thread --take--> client --download--> give back --> idle, for the next thread of this process
                                 '-- failed, or too late --> dropped

A forked child inherits its parent's clients in memory. It neither uses nor finalizes them, because
finalizing one may close a connection that the parent still uses.

Cost: one client for each concurrent download thread; creating one takes about 10 to 100 ms.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

from streampack.mds import mosaic
from streampack.storage.store_checksums import Answers

# Stores whose libraries are not installed with mosaicml-streaming, by the extra that adds them.
EXTRAS = {"alipan": "alipan", "dbfs": "databricks", "hf": "hf"}
AZURE_SCOPE = "https://storage.azure.com/.default"


def library_of(remote: str) -> str:
    """Return the command that installs a store's client library.

    >>> library_of("dbfs:/Volumes/books")
    "pip install 'mosaicml-streaming[databricks]'"
    """
    extra = EXTRAS.get(remote.partition(":")[0])
    return (
        f"pip install 'mosaicml-streaming[{extra}]'" if extra else "pip install mosaicml-streaming"
    )


def ask_for_credentials(client: Any) -> None:
    """Make a new client check for credentials first, if its own check would be slow.

    Azure's clients treat a missing token as a failed request and retry for more than a minute. The
    credential object itself raises ClientAuthenticationError within a second. Clients of other
    stores fail immediately.
    """
    credential: Any = getattr(client, "credential", None)
    if hasattr(credential, "get_token"):
        credential.get_token(AZURE_SCOPE)


class ClientPool:
    """The idle clients of one process, by store."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, float], list[Any]] = {}
        self._lock = threading.Lock()

    @staticmethod
    def key_of(remote: str | None, timeout_s: float) -> tuple[str, float]:
        """Return the pool key of a client: scheme and host, and its timeout.

        >>> ClientPool.key_of("s3://bucket/books/en", 60.0)
        ('s3://bucket', 60.0)
        """
        return "/".join((remote or "").split("/")[:3]), timeout_s

    def take(self, remote: str | None, timeout_s: float, *, is_new: bool) -> tuple[Any, bool]:
        """Take a client out of the pool or create one; return it and whether it was used before.

        Some clients are created with the stream's `download_timeout` (`timeout_s`). With `is_new`,
        the idle ones are dropped. The client's `answers` attribute is an `Answers`.
        """
        key = self.key_of(remote, timeout_s)
        with self._lock:
            idle = self._idle.setdefault(key, [])
            if idle and not is_new:
                return idle.pop(), True
            self._idle[key] = []
        for outdated in idle:
            self.drop(outdated)
        client = mosaic.CloudDownloader.get(remote)
        client.answers = Answers(client)
        return client, False

    def give_back(self, remote: str | None, timeout_s: float, client: Any) -> None:
        """Return a client to the pool after a successful download."""
        with self._lock:
            self._idle.setdefault(self.key_of(remote, timeout_s), []).append(client)

    @staticmethod
    def drop(client: Any) -> None:
        """Close a client's connections, ignoring errors."""
        with suppress(Exception):
            client.clean_up()


_pools: dict[int, ClientPool] = {}


def process_clients() -> ClientPool:
    """Return this process's client pool."""
    # The parents' pools stay in the dictionary: garbage collection would close their connections.
    # They are never touched: their locks may be held by threads that do not exist here.
    return _pools.get(os.getpid()) or _pools.setdefault(os.getpid(), ClientPool())
