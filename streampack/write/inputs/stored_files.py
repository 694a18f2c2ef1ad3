"""Files of object stores, as inputs.

A version is the tag of the object, or what its store has instead. Each request for bytes names the
version, so that an object that has changed meanwhile is an error.

Cost: a request for each block of 8 MiB; two of them in memory.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from streampack.errors import DataError
from streampack.stores.failures import FailureKind
from streampack.stores.objects import Found
from streampack.stores.retries import kind_of, list_objects, request
from streampack.stores.s3 import S3_SCHEMES
from streampack.stores.store import Store
from streampack.write.inputs.places import (
    MAGIC,
    Listing,
    OpenInput,
    changed,
    is_hidden,
    match_glob,
)
from streampack.write.inputs.range_file import BLOCK_BYTES, RangeFile

SMALL_BLOCK_BYTES = 1 << 18  # for readers that look at a few places of a file
WAY_OUT = "check the URL and the access to it, and run it again"


def find_objects(uri: str) -> list[Listing]:
    """Return the objects that a URL names: an object, a folder or a glob."""
    scheme, _, rest = uri.partition("://")
    if scheme in S3_SCHEMES and not rest.partition("/")[0]:
        raise DataError(f"{uri}: names no bucket; write it as {scheme}://bucket/path", uri=uri)
    if MAGIC.search(uri):
        found = {file.url: file for file in _objects(MAGIC.split(uri)[0])}
        if uri in found:
            return [Listing(None, [found[uri]])]
        return match_glob(uri, found, found.__getitem__)
    folder = uri.rstrip("/")
    file = _object_if_there(uri) if uri == folder and "/" in rest else None
    if file is not None:
        return [Listing(None, [file])]
    below = len(folder) + 1
    return [Listing(folder, [f for f in _objects(f"{folder}/") if not is_hidden(f.url[below:])])]


def _objects(prefix: str) -> Iterator[Found]:
    return map(_with_size, list_objects(prefix, way_out=WAY_OUT))


def _object(uri: str) -> Found:
    return _with_size(request(uri, "read", lambda store: store.stat(uri), way_out=WAY_OUT))


def _object_if_there(uri: str) -> Found | None:
    try:
        return _object(uri)
    except DataError as error:
        if kind_of(error) is FailureKind.MISSING:
            return None
        raise


def _with_size(file: Found) -> Found:
    if file.num_bytes < 0:
        raise DataError(
            f"{file.url}: its server does not say how many bytes it has; copy it to this machine, "
            "or to a store",
            uri=file.url,
        )
    return file


@contextmanager
def open_object(uri: str, version: str, stop: int, *, is_sequential: bool) -> Iterator[OpenInput]:
    """Open an object for reading up to `stop`, or up to its end if that is negative.

    Reading ahead, in a thread, is worth it if the reader `is_sequential`.
    """
    if stop < 0:
        now = _object(uri)
        if now.version != version:
            raise changed(uri, version, now.version)
        stop = now.num_bytes
    fetch = partial(read_object, uri, version)
    block_bytes = BLOCK_BYTES if is_sequential else SMALL_BLOCK_BYTES
    with RangeFile(stop, fetch, block_bytes, reads_ahead=is_sequential) as file:
        yield OpenInput(io.BufferedReader(file, SMALL_BLOCK_BYTES), lambda: None)


def read_object(uri: str, version: str, start: int, stop: int) -> bytes:
    """Return bytes of an object; a DataError says that it is another version."""

    def attempt(store: Store) -> bytes:
        data = store.read(uri, start, stop, version=version)
        if len(data) != stop - start:
            raise ConnectionError(f"{len(data)} of {stop - start} bytes arrived")
        return data

    try:
        return request(uri, f"read from byte {start} on", attempt, way_out=WAY_OUT)
    except DataError as error:
        if kind_of(error) is FailureKind.CHANGED:
            raise changed(uri, version, "another") from error
        raise
