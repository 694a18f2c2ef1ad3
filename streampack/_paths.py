"""Tell local folders from URLs of object stores, and replace files atomically.

::

    data/code    ~/code    /data/code    file:///data/code      folders
    s3://bucket/code    dbfs:/Volumes/code                      URLs of stores
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO, NoReturn
from urllib.parse import unquote, urlsplit

from streampack.errors import ConfigError, DataError

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
URL = re.compile(r"[A-Za-z][\w+.-]+:/")  # at least two letters: one letter is a Windows drive


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL, even if a Path has collapsed its double slash.

    >>> [is_url(path) for path in ("s3://bucket/code", "dbfs:/Volumes/code", "s3:/bucket", "code")]
    [True, True, True, False]
    """
    return URL.match(os.fspath(path)) is not None


def folder_of(remote: str) -> str | None:
    """Return the local folder that a stream's `remote` names, or None if it is in a store.

    >>> folder_of("file:///data/my%20code"), folder_of("code"), folder_of("s3://bucket/code")
    ('/data/my code', 'code', None)
    """
    if remote.startswith("file://"):
        return unquote(urlsplit(remote).path)
    return None if is_url(remote) else os.path.expanduser(remote)


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path as text, and restore the slashes of a URL that was turned into a Path.

    >>> shown_path(Path("s3://bucket/code")), shown_path(Path("/data/code"))
    ('s3://bucket/code', '/data/code')
    """
    text = os.fspath(path)
    scheme, _, rest = text.partition(":/")
    if isinstance(path, str) or not is_url(text) or scheme == "dbfs" or rest.startswith("/"):
        return text
    return f"{scheme}://{'/' if scheme == 'file' else ''}{rest}"


def local_path(
    path: str | os.PathLike[str], name: str, way_out: str = "name a copy on this machine"
) -> Path:
    """Return a path, or the path of a `file://` URL, with `~` expanded; refuse a store's URL."""
    text = shown_path(path)
    folder = folder_of(text)
    if folder is None:
        raise ConfigError(f"{name}={text!r} is a URL, but must be a local path; {way_out}")
    return Path(folder)


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return a path from the root on, with its links and dots.

    Raises:
        ConfigError: If it is relative, and this process's working directory was deleted.
    """
    text = os.fspath(path)
    try:
        return text if os.path.isabs(text) else os.path.join(os.getcwd(), text)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{text!r} is relative to the working directory of this process, which was deleted; "
            "change to a folder that exists, or give an absolute path"
        ) from error


def real_path(path: str | os.PathLike[str]) -> str:
    """Return an absolute path without links; raises as `absolute_path` does."""
    return os.path.realpath(absolute_path(path))


def walk_linked(folder: str | os.PathLike[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a folder and those that links below it lead to, as `os.walk` does.

    Raises:
        DataError: If a folder may not be listed, or is reached twice.
    """
    paths: dict[str, str] = {}  # by what they are without links
    for path, folders, names in os.walk(folder, followlinks=True, onerror=_refuse_folder):
        first = paths.setdefault(real_path(path), path)
        if first != path:
            raise DataError(
                f"{path}: is a link to a folder that is read as {first} already; delete the "
                "link, or name the folders to read",
                uri=path,
            )
        yield path, folders, names


def _refuse_folder(error: OSError) -> NoReturn:
    raise DataError(
        f"{error.filename}: may not be listed ({error.strerror}); change its rights (chmod u+rx), "
        "or name the other inputs",
        uri=error.filename,
    ) from error


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which gets its final name once it is written.

    Those that killed processes left are removed first.
    """
    # So that a full disk leaves no broken file.
    for left in path.parent.glob(f".{escape(path.name)}.{'[0-9a-f]' * 32}"):
        remove_unowned(left)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with owned(temporary):
        yield temporary
        temporary.replace(path)


@contextmanager
def owned(path: Path) -> Iterator[BinaryIO]:
    """Open and lock a file, and remove it at the end: it shows that its owner lives."""
    while True:
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            # Another process may have removed the file before it was locked: its name is another's.
            try:
                is_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                is_there = False
            if not is_there:
                continue
            try:
                yield file
            finally:
                path.unlink(missing_ok=True)
            return


def remove_unowned(path: Path, folder: Path | None = None) -> None:
    """Remove a file that a killed process owned, and the folder that it was for."""
    with suppress(OSError), path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        path.unlink()
