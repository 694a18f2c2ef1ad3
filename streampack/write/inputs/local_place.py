"""Files of this machine, as a place of inputs.

A version is the size and the time of the last write. It is compared when a file is opened, before
each batch of rows is handed over, and at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path

from streampack.errors import DataError, naming_limits
from streampack.write.inputs.places import (
    MAGIC,
    Found,
    Listing,
    OpenInput,
    changed,
    is_hidden,
)


class LocalPlace:
    """The `Place` of files of this machine."""

    def find(self, uri: str) -> Listing:
        path = Path(uri)
        if path.is_dir():
            return Listing(uri, _files_below(path))
        if path.exists():
            return Listing(None, [_found(path)])
        names = sorted(glob(uri, recursive=True)) if MAGIC.search(uri) else []
        return Listing(None, [_found(Path(name)) for name in names if not os.path.isdir(name)])

    @contextmanager
    def open(
        self,
        uri: str,
        version: str,
        stop: int,  # noqa: ARG002 - the system reads ahead
        *,
        is_sequential: bool,  # noqa: ARG002
    ) -> Iterator[OpenInput]:
        try:
            with naming_limits():
                file = open(uri, "rb", buffering=1 << 18)  # noqa: SIM115 - closed below
        except FileNotFoundError as error:
            raise DataError(
                f"{uri}: no longer exists; put it back, or name the inputs again", uri=uri
            ) from error
        except PermissionError as error:
            raise DataError(
                f"{uri}: may not be read ({error.strerror}); change its rights (chmod u+r), or "
                "leave it out",
                uri=uri,
            ) from error

        def _check() -> None:
            now = version_of(os.fstat(file.fileno()))
            if now != version:
                raise changed(uri, version, now)

        with file:
            _check()
            yield OpenInput(file, _check)
            _check()


def version_of(status: os.stat_result) -> str:
    """Return the version of a file of this size and time."""
    return f"size:{status.st_size},mtime_ns:{status.st_mtime_ns}"


def _found(path: Path) -> Found:
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: was deleted, or is a link to a file that does not exist; restore it, "
            "or delete the link",
            uri=str(path),
        ) from error
    return Found(str(path), version_of(status), status.st_size)


def _files_below(folder: Path) -> list[Found]:
    # A broken link is refused, because its rows would be missing silently.
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() or not file.exists())
    return [_found(file) for file in files if not is_hidden(str(file.relative_to(folder)))]
