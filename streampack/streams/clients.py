"""The clients with which stores are asked: made late, used by one thread at a time, never forked.

::

    thread --take--> client --download--> give back --> idle, for the next thread of this process
                                 '-- failed, or too late --> dropped

A forked child finds its parent's clients in memory and leaves them alone: it neither uses them nor
lets go of them, since letting go may close a connection that the parent still speaks on.

Cost: a client for each thread that downloads at a time; making one takes some 10 to 100 ms.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

from streampack.streams import mosaic

__all__ = ["ClientPool", "ask_for_credentials", "library_of", "process_clients"]

# Stores whose libraries do not come with mosaicml-streaming, by the extra that brings them.
EXTRAS = {"alipan": "alipan", "dbfs": "databricks", "hf": "hf"}
AZURE_SCOPE = "https://storage.azure.com/.default"


def library_of(remote: str) -> str:
    """Return how to install what speaks to a store.

    >>> library_of("dbfs:/Volumes/books")
    "pip install 'mosaicml-streaming[databricks]'"
    """
    extra = EXTRAS.get(remote.partition(":")[0])
    return (
        f"pip install 'mosaicml-streaming[{extra}]'" if extra else "pip install mosaicml-streaming"
    )


def ask_for_credentials(client: Any) -> None:
    """Let a new client say whether there are credentials, where it would be long in saying so.

    Azure's clients take it for a request that failed if nothing gives them a token, and try for
    more than a minute; what gives tokens knows within a second. Other stores' say it at once.

    Raises:
        ClientAuthenticationError: Of Azure's library, if there are none.
    """
    credential: Any = getattr(client, "credential", None)
    if hasattr(credential, "get_token"):
        credential.get_token(AZURE_SCOPE)


class ClientPool:
    """The idle clients of one process, by the store that they speak to."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, float], list[Any]] = {}
        self._lock = threading.Lock()

    @staticmethod
    def key_of(remote: str | None, timeout_s: float) -> tuple[str, float]:
        """Return what a client is made for: scheme and host, and its timeout.

        >>> ClientPool.key_of("s3://bucket/books/en", 60.0)
        ('s3://bucket', 60.0)
        """
        return "/".join((remote or "").split("/")[:3]), timeout_s

    def take(self, remote: str | None, timeout_s: float, *, is_new: bool) -> tuple[Any, bool]:
        """Take a client out of the pool, or make one.

        Args:
            remote: The stream's remote folder.
            timeout_s: The stream's `download_timeout`, which some clients are made with.
            is_new: Whether it must be a new one; the idle ones are dropped then.

        Returns:
            The client, and whether it was used before.
        """
        key = self.key_of(remote, timeout_s)
        with self._lock:
            idle = self._idle.pop(key, []) if is_new else self._idle.get(key, [])
            client = idle.pop() if idle and not is_new else None
        if is_new:
            for old in idle:
                self.drop(old)
        if client is not None:
            return client, True
        return mosaic.CloudDownloader.get(remote), False

    def give_back(self, remote: str | None, timeout_s: float, client: Any) -> None:
        """Keep a client, with which a download has just gone well, for the next thread."""
        with self._lock:
            self._idle.setdefault(self.key_of(remote, timeout_s), []).append(client)

    @staticmethod
    def drop(client: Any) -> None:
        """Close what a client holds open; whatever it says to that is of no more interest."""
        with suppress(Exception):
            client.clean_up()


_pools: dict[int, ClientPool] = {}


def process_clients() -> ClientPool:
    """Return this process's clients."""
    # The parents' pools stay in the dictionary: garbage collection would close their connections.
    # Their locks may be held by threads that are not here, so nothing of theirs is touched.
    return _pools.get(os.getpid()) or _pools.setdefault(os.getpid(), ClientPool())
