"""Files of this machine, as inputs.

A version is the size and the time of the last write. It is compared when a file is opened, before
each batch of rows is handed over, and at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from itertools import chain
from typing import NoReturn

from streampack.errors import DataError, naming_limits
from streampack.stores.objects import Found
from streampack.write.inputs.places import (
    MAGIC,
    Listing,
    OpenInput,
    changed,
    is_hidden,
    match_glob,
)


def find_files(path: str) -> list[Listing]:
    """Return the files that a path names: a file, a folder or a glob."""
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
def open_file(path: str, version: str) -> Iterator[OpenInput]:
    """Open a file in the version that was listed; a DataError refuses another version."""
    try:
        with naming_limits():
            file = open(path, "rb", buffering=1 << 18)  # noqa: SIM115 - closed below
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no longer exists; put it back, or name the inputs again", uri=path
        ) from error
    except PermissionError as error:
        raise DataError(
            f"{path}: may not be read ({error.strerror}); change its rights (chmod u+r), or "
            "leave it out",
            uri=path,
        ) from error

    def check() -> None:
        now = version_of(os.fstat(file.fileno()))
        if now != version:
            raise changed(path, version, now)

    with file:
        check()
        yield OpenInput(file, check)
        check()


def version_of(status: os.stat_result) -> str:
    """Return the version of a file of this size and time."""
    return f"size:{status.st_size},mtime_ns:{status.st_mtime_ns}"


def _found(path: str) -> Found:
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: was deleted, or is a link to a file that does not exist; restore it, "
            "or delete the link",
            uri=path,
        ) from error
    return Found(path, version_of(status), status.st_size)


def _names_below(folder: str) -> Iterator[str]:
    """Yield the files in a folder and in linked ones, hidden files too, in any order.

    Broken links are among them: they are refused later, so that no rows are missing silently.
    """
    paths: dict[str, str] = {}  # by what they are without links
    for path, folders, names in os.walk(folder, followlinks=True, onerror=_refuse_folder):
        folders[:] = [name for name in folders if not is_hidden(name)]
        first = paths.setdefault(os.path.realpath(path), path)
        if first != path:
            raise DataError(
                f"{path}: is a link to a folder that is read as {first} already; delete the "
                "link, or name the folders to read",
                uri=path,
            )
        files = (os.path.join(path, name) for name in names)
        yield from (file for file in files if os.path.isfile(file) or not os.path.exists(file))


def _refuse_folder(error: OSError) -> NoReturn:
    raise DataError(
        f"{error.filename}: may not be listed ({error.strerror}); change its rights (chmod u+rx), "
        "or name the other inputs",
        uri=error.filename,
    ) from error
