"""Files of this machine and objects of stores, found by name and opened in one version.

::

    data/*.jsonl     glob, walk; open, fstat        version: size and time of the last write
    s3://bucket/a    through the stores room        version: its tag, or what its store has instead

The version of a file is compared when it is opened, before each batch of rows is handed over, and
at the end. Each request to a store names the version, so an object that has changed is an error.

Cost: for an object, a request for each block of 8 MiB, with the next block read ahead.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from glob import glob
from importlib import import_module
from itertools import chain
from typing import Any, BinaryIO

from streampack._paths import is_url, walk_linked
from streampack._threads import ordered_thread_map
from streampack.errors import DataError, naming_limits
from streampack.stores.failures import FailureKind
from streampack.stores.objects import StoredObject
from streampack.stores.retries import kind_of, list_objects, request
from streampack.stores.s3 import S3_SCHEMES
from streampack.stores.store import Store
from streampack.texts.inputs.slices import InputSlice

BLOCK_BYTES = 8 << 20  # of a request, in an object that is read in order
BUFFER_BYTES = 1 << 18  # of a file, and of a request at any place of an object
MAGIC = re.compile(r"[*?[]")
SLASH = re.compile("/")
MARKERS = {"_SUCCESS", "_metadata", "_common_metadata"}
WAY_OUT = "check the URL and the access to it, and rerun it"


@dataclass(frozen=True, slots=True)
class Listing:
    """Files that an input names."""

    folder: str | None
    """The folder that they are in, if the input or a match of its glob is one; else None."""
    files: list[StoredObject] = field(default_factory=list)
    """Files in the order of their names, except hidden ones."""


@dataclass(frozen=True, slots=True)
class OpenInput:
    """One version of a file, open for reading."""

    file: BinaryIO
    """`read(n)` returns fewer bytes only at the end."""
    check: Callable[[], None]
    """Raises DataError if the file has changed since it was listed."""


def open_input(slice_: InputSlice, *, is_sequential: bool) -> AbstractContextManager[OpenInput]:
    """Open the file of a slice in the version that was listed; a DataError refuses another one.

    If `is_sequential`, the file is at the slice's first byte, and is read in order up to its last.
    """
    if not is_url(slice_.uri):
        return _open_file(slice_, is_sequential=is_sequential)
    file = _blocks_of(slice_) if is_sequential else _ranges_of(slice_)
    return nullcontext(OpenInput(io.BufferedReader(file, BUFFER_BYTES), lambda: None))


def find_input(path: str) -> list[Listing]:
    """Return the files that a path or URL names: a file, a folder or a glob.

    A glob has one listing for its files, and one for each folder that it matches. A DataError says
    that the folder or store cannot be listed.
    """
    if is_url(path):
        return _find_objects(path)
    if os.path.isdir(path):
        below = len(path.rstrip("/")) + 1
        names = sorted(_names_below(path.rstrip("/") or "/"))
        return [Listing(path, [_found(name) for name in names if not is_hidden(name[below:])])]
    if os.path.exists(path):
        return [Listing(None, [_found(path)])]
    if not MAGIC.search(path):
        return []
    matches = glob(path.rstrip("/"), recursive=True)
    each = (_names_below(name) if os.path.isdir(name) else (name,) for name in matches)
    return match_glob(path, chain.from_iterable(each), _found)


@contextmanager
def _open_file(slice_: InputSlice, *, is_sequential: bool) -> Iterator[OpenInput]:
    path = slice_.uri
    try:
        with naming_limits():
            file = open(path, "rb", buffering=BUFFER_BYTES)  # noqa: SIM115 - closed below
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no longer exists; put it back, or name the inputs again", uri=path
        ) from error
    except PermissionError as error:
        raise DataError(
            f"{path}: may not be read ({error.strerror}); change its rights (chmod u+r), or "
            "omit it",
            uri=path,
        ) from error

    def _check() -> None:
        now = file_version(os.fstat(file.fileno()))
        if now != slice_.version:
            raise _changed(slice_, now)

    with file:
        _check()
        if is_sequential:
            file.seek(slice_.start)
        yield OpenInput(file, _check)
        _check()


def file_version(status: os.stat_result) -> str:
    """Return the version of a file of this machine."""
    return f"size:{status.st_size},mtime_ns:{status.st_mtime_ns}"


def _found(path: str) -> StoredObject:
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: was deleted, or is a link to a file that does not exist; restore it, "
            "or delete the link",
            uri=path,
        ) from error
    return StoredObject(path, file_version(status), status.st_size)


def _names_below(folder: str) -> Iterator[str]:
    """Yield the files in a folder and in linked ones, hidden files too, in any order.

    Broken links are among them: they are refused later, so that no rows are missing silently.
    """
    for path, folders, names in walk_linked(folder):
        folders[:] = [name for name in folders if not is_hidden(name)]
        files = (os.path.join(path, name) for name in names)
        yield from (file for file in files if os.path.isfile(file) or not os.path.exists(file))


def _find_objects(uri: str) -> list[Listing]:
    scheme, _, rest = uri.partition("://")
    if scheme in S3_SCHEMES and not rest.partition("/")[0]:
        raise DataError(f"{uri}: names no bucket; write it as {scheme}://bucket/path", uri=uri)
    if MAGIC.search(uri):
        found = {file.url: file for file in _objects(MAGIC.split(uri)[0])}
        if uri in found:
            return [Listing(None, [found[uri]])]
        return match_glob(uri, found, found.__getitem__)
    folder = uri.rstrip("/")
    if uri == folder and "/" in rest:
        try:
            return [Listing(None, [_object(uri)])]
        except DataError as error:
            if kind_of(error) is not FailureKind.MISSING:
                raise
    below = len(folder) + 1
    return [Listing(folder, [f for f in _objects(f"{folder}/") if not is_hidden(f.url[below:])])]


def _objects(prefix: str) -> Iterator[StoredObject]:
    return map(_with_size, list_objects(prefix, way_out=WAY_OUT))


def _object(uri: str) -> StoredObject:
    return _with_size(request(uri, "read", lambda store: store.stat(uri), way_out=WAY_OUT))


def _with_size(file: StoredObject) -> StoredObject:
    if file.num_bytes < 0:
        raise DataError(
            f"{file.url}: its server does not say how many bytes it has; copy it to this machine, "
            "or to a store",
            uri=file.url,
        )
    return file


def _blocks_of(slice_: InputSlice) -> _ObjectFile:
    stop = slice_.start + slice_.num_bytes
    starts = range(slice_.start, stop, BLOCK_BYTES)

    def _read(start: int) -> bytes:
        return read_object(slice_, start, min(start + BLOCK_BYTES, stop))

    blocks = ordered_thread_map(starts, _read, depth=2)
    block = memoryview(b"")

    def _next(start: int, stop: int) -> memoryview:
        nonlocal block
        if not block:
            block = memoryview(b"")  # so that its bytes are freed before the next ones come
            block = memoryview(next(blocks, b""))
        piece, block = block[: stop - start], block[stop - start :]
        return piece

    return _ObjectFile(slice_.start, stop, _next)


def _ranges_of(slice_: InputSlice) -> _ObjectFile:
    now = _object(slice_.uri)
    if now.version != slice_.version:
        raise _changed(slice_, now.version)
    return _ObjectFile(0, now.num_bytes, partial(read_object, slice_))


class _ObjectFile(io.RawIOBase):
    """An object as a file; `fetch` may return fewer bytes than those from a start to a stop."""

    def __init__(
        self, position: int, end: int, fetch: Callable[[int, int], bytes | memoryview]
    ) -> None:
        self._position = position
        self._end = end
        self._fetch = fetch

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}
        self._position = max(0, base[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + len(buffer), self._end)
        piece = self._fetch(self._position, stop) if self._position < stop else b""
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


def read_object(slice_: InputSlice, start: int, stop: int) -> bytes:
    """Return bytes of a slice's object; a DataError says that it is another version."""

    def _read(store: Store) -> bytes:
        return store.read(slice_.uri, start, stop, version=slice_.version)

    try:
        return request(slice_.uri, f"read from byte {start} on", _read, way_out=WAY_OUT)
    except DataError as error:
        if kind_of(error) is FailureKind.CHANGED:
            raise _changed(slice_, "another") from error
        raise


def _changed(slice_: InputSlice, now: str) -> DataError:
    return DataError(
        f"{slice_.uri}: changed since it was listed ({slice_.version}, now {now}); run the same "
        "command again when no process writes to it: its parts are then rewritten",
        uri=slice_.uri,
    )


def is_hidden(name: str) -> bool:
    """Return whether a path below a folder is hidden, or a marker that a writer left.

    >>> [is_hidden(name) for name in (".git/x", "a/.x.crc", "_SUCCESS", "a/_x.jsonl")]
    [True, True, True, False]
    """
    parts = name.split("/")
    return any(part.startswith(".") for part in parts) or parts[-1] in MARKERS


def match_glob(
    glob: str, uris: Iterable[str], found: Callable[[str], StoredObject]
) -> list[Listing]:
    """Return those of some files that a glob matches, or that are in folders that it matches.

    >>> uris = ["in/a.txt", "in/b/c.txt", "in/b/d/e.txt", "in/.git/f.txt", "in/_SUCCESS"]
    >>> for listing in match_glob("in/*", uris, lambda uri: StoredObject(uri, "v", 1)):
    ...     print(listing.folder, [file.url for file in listing.files])
    None ['in/a.txt']
    in/b ['in/b/c.txt', 'in/b/d/e.txt']
    """
    try:
        pattern = re.compile(import_module("fsspec.utils").glob_translate(glob.rstrip("/")))
    except ValueError as error:
        raise DataError(f"{glob}: {error}; write it as folder/**/*.jsonl", uri=glob) from error
    below = MAGIC.split(glob)[0].rfind("/") + 1  # after the last folder without wildcards
    listings: dict[str | None, Listing] = {}
    for uri in sorted(set(uris)):
        parents = (uri[: match.start()] for match in SLASH.finditer(uri, below))
        folder = next(filter(pattern.fullmatch, parents), None)
        if not is_hidden(uri[below:]) and (folder is not None or pattern.fullmatch(uri)):
            listings.setdefault(folder, Listing(folder)).files.append(found(uri))
    return list(listings.values())
