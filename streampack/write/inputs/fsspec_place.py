"""Files of other stores, as a place of inputs, through the store's fsspec driver.

A version is the store's own tag or checksum, else the size and the time of the last write. It is
compared when a file is opened and at the end, because drivers know no conditional requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any

from streampack.errors import DataError
from streampack.write.inputs.places import (
    MAGIC,
    Found,
    Listing,
    OpenInput,
    changed,
    is_hidden,
    match_glob,
    naming_failures,
    open_ranges,
    version_of_tag,
)

TAGS = ("ETag", "etag", "blob_id", "md5Hash", "content_md5", "version_id")
WAY_OUT = "check the URL and the access to it"
TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


class FsspecPlace:
    """The `Place` of files in any store that fsspec has a driver for."""

    def find(self, uri: str) -> list[Listing]:
        files, path = _open_store(uri)
        with naming_failures(uri, "read", WAY_OUT):
            if MAGIC.search(path):
                matches = files.glob(path.rstrip("/"))
                each = (files.find(name) if files.isdir(name) else (name,) for name in matches)
                names = {files.unstrip_protocol(name): name for name in chain.from_iterable(each)}
                glob = files.unstrip_protocol(path)
                return match_glob(glob, names, lambda name: _found(files, names[name]))
            if files.isdir(path):
                below = len(path.rstrip("/")) + 1
                shown = [name for name in sorted(files.find(path)) if not is_hidden(name[below:])]
                folder = files.unstrip_protocol(path).rstrip("/")
                return [Listing(folder, [_found(files, name) for name in shown])]
            return [Listing(None, [_found(files, path)])] if files.exists(path) else []

    @contextmanager
    def open(
        self, uri: str, version: str, stop: int, *, is_sequential: bool
    ) -> Iterator[OpenInput]:
        files, path = _open_store(uri)

        def _check() -> Found:
            # Drivers cache listings, and would report the version that they saw first.
            files.invalidate_cache()
            with naming_failures(uri, "read", WAY_OUT):
                now = _found(files, path)
            if now.version != version:
                raise changed(uri, version, now.version)
            return now

        num_bytes = _check().num_bytes
        fetch = partial(_fetch, files, uri, path)
        end = num_bytes if stop < 0 else stop
        with open_ranges(fetch, end, is_sequential=is_sequential) as opened:
            yield opened
        _check()


def _open_store(uri: str) -> tuple[Any, str]:
    scheme = uri.partition(":")[0]
    try:
        files, path = import_module("fsspec.core").url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise DataError(
            f"{uri}: {scheme}:// cannot be read ({error}); install the fsspec driver of this "
            "store, or name a copy in S3 or on this machine",
            uri=uri,
        ) from error
    return files, path


def _fetch(files: Any, uri: str, path: str, start: int, stop: int) -> bytes:
    with naming_failures(uri, "read", WAY_OUT):
        data: bytes = files.cat_file(path, start=start, end=stop)
    if len(data) != stop - start:
        raise DataError(
            f"{uri}: {len(data)} of {stop - start} bytes from byte {start} on; the file has "
            "changed, or the store broke off: run the same command again",
            uri=uri,
        )
    return data


def _found(files: Any, path: str) -> Found:
    facts: Mapping[str, Any] = files.info(path)
    size = int(facts["size"])
    tag = next((facts[name] for name in TAGS if facts.get(name)), None)
    time = next((facts[name] for name in TIMES if facts.get(name)), None)
    if tag is not None:
        version = version_of_tag(str(tag))
    else:
        version = f"size:{size},mtime_ns:{_nanoseconds(time)}"
    return Found(files.unstrip_protocol(path), version, size)


def _nanoseconds(time: Any) -> int:
    """Return a driver's time in ns since 1970; 0 if it has none.

    >>> _nanoseconds(1.5), _nanoseconds(None)
    (1500000000, 0)
    """
    if isinstance(time, str):
        time = datetime.fromisoformat(time)
    if isinstance(time, datetime):
        time = time.timestamp()
    return round((time or 0) * 10**9)
