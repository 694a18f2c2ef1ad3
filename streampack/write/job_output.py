"""Where a job writes: a local folder, or a prefix in S3 or a compatible store.

::

    put("parts/3f9a.../shard.00000.mds.zstd", data)     whole, or not there
    put_new("job.00001.json", data)                     the same, and only if it is not there yet

A folder gets each file by a rename after an fsync. Until then its writer has it locked, so that
clean-up can tell it from what a killed process left. A store gets each file from memory by one PUT
with its MD5, so no disk is used and no unfinished upload is left behind. `put_new` is a hard link
in a folder, and `If-None-Match: *` in a store.

Cost: one file in memory at a time.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from streampack._paths import folder_of, owned, remove_unowned, shown_path
from streampack.errors import ConfigError, DataError
from streampack.stores.failures import FailureKind, codes_of
from streampack.stores.retries import kind_of, list_objects, request
from streampack.stores.store import Store

TEMPORARY = ".partial"
LOCK = f".commit{TEMPORARY}"
NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
NO_BUCKET = "NoSuchBucket"
WAY_OUT = "check the URL, S3_ENDPOINT_URL and the network, then run the same command again"

_T = TypeVar("_T")


def open_output(out: str | os.PathLike[str]) -> Output:
    """Return the output at a path or URL; refuse a store that may let two writers create a file."""
    url = shown_path(out).rstrip("/")
    folder = folder_of(url)
    if folder is not None:
        return LocalOutput(url=folder)
    if not url.startswith("s3://"):
        raise ConfigError(
            f"out={url!r} is neither a folder nor s3://bucket/path; name a folder, then upload it "
            "with the store's own tool, index.json last"
        )
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not bucket or not prefix:
        raise ConfigError(f"out={url!r} names no place in a bucket; write it as s3://bucket/path")
    return StoreOutput(url=url)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOutput:
    """A place for the files of one stream in a folder, which several machines may share.

    Files are named by their path in it, with `/`.
    """

    url: str
    """The folder's path."""

    def read(self, name: str) -> bytes | None:
        """Return a file's contents, or None if it does not exist."""
        try:
            return self._path(name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def put(self, name: str, data: bytes) -> None:
        """Write a file atomically, over another of its name."""
        with self._written(name, data) as temporary:
            os.replace(temporary, self._path(name))

    def put_new(self, name: str, data: bytes) -> bool:
        """Write a file atomically, and return True; return False if there is one already."""
        path = self._path(name)
        with self._written(name, data) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in NO_HARD_LINKS:
                    raise
                if path.exists():
                    return False
                os.replace(temporary, path)
        return True

    def names(self, prefix: str, suffix: str) -> list[str]:
        folder = self._path(prefix)
        names = [str(file.relative_to(self.url)) for file in folder.rglob("*") if file.is_file()]
        return sorted(name for name in names if name.endswith(suffix))

    def is_empty(self) -> bool:
        """Return whether nothing is there, hidden files aside."""
        folder = Path(self.url)
        if not folder.is_dir():
            return not folder.exists()
        return all(path.name.startswith(".") for path in folder.iterdir())

    def locked(self) -> AbstractContextManager[object]:
        return owned(self._path(LOCK))

    def clean_up(self, parent: str, keep: Callable[[], Set[str]]) -> None:
        """Remove what killed processes left unfinished, and all folders in `parent` but some.

        `keep` returns their names, and is called once the folders are listed.
        """
        for file in Path(self.url).rglob(f".*{TEMPORARY}"):
            remove_unowned(file)
        folders = list(self._path(parent).iterdir())
        kept = keep()
        for folder in folders:
            if folder.name not in kept and not any(folder.rglob(f".*{TEMPORARY}")):
                shutil.rmtree(folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return Path(self.url, name)

    @contextmanager
    def _written(self, name: str, data: bytes) -> Iterator[Path]:
        path = self._path(name)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with owned(temporary) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # a name never outlives its bytes, even without power
            yield temporary


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOutput:
    """The same at a prefix of a bucket in S3 or a compatible store, which has no locks."""

    url: str
    """The prefix."""

    def read(self, name: str) -> bytes | None:
        try:
            return self._ask(name, "read", lambda store, url: store.read(url))
        except DataError as error:
            is_there = NO_BUCKET not in codes_of(error.__cause__ or error)
            if is_there and kind_of(error) is FailureKind.MISSING:
                return None
            raise

    def put(self, name: str, data: bytes) -> None:
        self._ask(name, "written", lambda store, url: store.write(url, data))

    def put_new(self, name: str, data: bytes) -> bool:
        return self._ask(name, "written", lambda store, url: store.write_if_absent(url, data))

    def names(self, prefix: str, suffix: str) -> list[str]:
        return sorted(name for name in self._names(prefix) if name.endswith(suffix))

    def is_empty(self) -> bool:
        return all(name.startswith(".") for name in self._names(""))

    def locked(self) -> AbstractContextManager[object]:
        return nullcontext()

    def clean_up(self, parent: str, keep: Callable[[], Set[str]]) -> None:
        names = self.names(f"{parent}/", "")  # no object is ever unfinished
        kept = keep()
        for name in names:
            if name.split("/")[1] not in kept:
                self._ask(name, "removed", lambda store, url: store.remove(url))

    def _names(self, prefix: str) -> Iterator[str]:
        begin = f"{self.url}/"
        for found in list_objects(begin + prefix, way_out=WAY_OUT):
            yield found.url.removeprefix(begin)

    def _ask(self, name: str, action: str, operation: Callable[[Store, str], _T]) -> _T:
        url = f"{self.url}/{name}"
        return request(url, action, lambda store: operation(store, url), way_out=WAY_OUT)


Output: TypeAlias = LocalOutput | StoreOutput
