"""Objects of a store in one version, and the parts that a large one is read in.

::

    0 ........ 8 ........ 16 ....... 24 ....... 32 MiB
    thread 1   thread 2   thread 3   thread 4   thread 1 ...     each its own request
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from streampack.stores.threads import AttemptThread

PART_BYTES = 8 << 20
NUM_THREADS = 4


class StoredObject(NamedTuple):
    """An object that was found."""

    url: str
    version: str
    """Its tag, as "etag:...", or what the store has instead, as "size:...,mtime_ns:..."."""
    num_bytes: int
    """Its size; -1 if the store does not state it."""


def version_of_tag(tag: str) -> str:
    """Return the version of an object that its store has tagged.

    >>> version_of_tag('"900150983cd24fb0"')
    'etag:900150983cd24fb0'
    """
    return f"etag:{tag.strip(chr(34))}"


def is_large(num_bytes: int | None) -> bool:
    """Return whether parallel ranges are worth their requests.

    >>> is_large(None), is_large(2 * PART_BYTES), is_large(2 * PART_BYTES + 1)
    (False, False, True)
    """
    return num_bytes is not None and num_bytes > 2 * PART_BYTES


def fetch_parts(fetch: Callable[[int, int], object], start: int, stop: int) -> None:
    """Call `fetch(start, stop)` for each part in threads, and raise its first exception."""
    starts = iter(range(start, stop, PART_BYTES))
    lock, errors = threading.Lock(), list[BaseException]()

    def work() -> None:
        while True:
            with lock:
                begin = None if errors else next(starts, None)
            if begin is None:
                return
            try:
                fetch(begin, min(begin + PART_BYTES, stop))
            except BaseException as error:  # re-raised in the waiting thread
                errors.append(error)

    threads = [AttemptThread(work) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
