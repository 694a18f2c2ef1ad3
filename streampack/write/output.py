"""Where a job writes: a local folder, or a prefix in S3 or a compatible store.

::

    put("parts/3f9a.../shard.00000.mds.zstd", data)     whole, or not there
    put_new("parts/3f9a.../part.json", data)            the same, and only if it is not there yet

A folder gets each file by a rename after an fsync. Until then its writer has it locked, so that
clean-up can tell it from what a killed process left. A store gets each file from memory by one PUT
with its MD5, so no disk is used and no unfinished upload is left behind. `put_new` is a hard link
in a folder, and `If-None-Match: *` in a store.

Cost: one file in memory at a time.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from streampack._paths import folder_of, shown_path
from streampack.errors import ConfigError
from streampack.write.inputs.places import naming_failures
from streampack.write.s3_client import bucket_options, list_objects, retrying, s3_client

TEMPORARY = ".partial"
LOCK = f".commit{TEMPORARY}"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
# Codes and statuses of a store's answer: not every store sends both of a pair.
UNSUPPORTED = {"NotImplemented", "501"}  # stores that do not know If-None-Match
EXISTS = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
MISSING = {"NoSuchKey", "404"}
NO_BUCKET = "NoSuchBucket"


class Output(Protocol):
    """A place for the files of one stream, addressed by their path in it, with `/`."""

    @property
    def url(self) -> str:
        """The folder's path, or the URL of the prefix."""

    def read(self, name: str) -> bytes | None:
        """Return a file's contents, or None if it does not exist."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file atomically, over another of its name."""

    def put_new(self, name: str, data: bytes) -> bool:
        """Write a file atomically, and return True; return False if there is one already."""

    def names(self, prefix: str, suffix: str) -> list[str]:
        """Return the sorted names of files with this beginning and end."""

    def is_empty(self) -> bool:
        """Return whether nothing is there, hidden files aside."""

    def locked(self) -> AbstractContextManager[object]:
        """Return a context that one process at a time may enter; in a store, any number may."""

    def clean_up(self, parent: str, keep: Callable[[], Set[str]]) -> None:
        """Remove what killed processes left unfinished, and all folders in `parent` but some.

        `keep` returns their names, and is called once the folders are listed.
        """


def open_output(out: str | os.PathLike[str]) -> Output:
    """Return the output at a path or URL; refuse a store that cannot be written from memory."""
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
    return S3Output(bucket=bucket, prefix=prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOutput:
    """An `Output` in a folder of a file system, which several machines may share."""

    url: str
    """The folder's path."""

    def read(self, name: str) -> bytes | None:
        try:
            return self._path(name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def put(self, name: str, data: bytes) -> None:
        with self._written(name, data) as temporary:
            os.replace(temporary, self._path(name))

    def put_new(self, name: str, data: bytes) -> bool:
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
        folder = Path(self.url)
        if not folder.is_dir():
            return not folder.exists()
        return all(path.name.startswith(".") for path in folder.iterdir())

    def locked(self) -> AbstractContextManager[object]:
        return _owned(self._path(LOCK))

    def clean_up(self, parent: str, keep: Callable[[], Set[str]]) -> None:
        for file in Path(self.url).rglob(f".*{TEMPORARY}"):
            _remove_unowned(file)
        folders = list(self._path(parent).iterdir())
        kept = keep()
        for folder in folders:
            if folder.name not in kept and not any(folder.rglob(f".*{TEMPORARY}")):
                shutil.rmtree(folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return Path(self.url, name)

    @contextmanager
    def _written(self, name: str, data: bytes) -> Iterator[Path]:
        """Yield a temporary file beside `name` that holds the data, and remove it afterwards."""
        path = self._path(name)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with _owned(temporary) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # a name never outlives its bytes, even without power
            yield temporary


@contextmanager
def _owned(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that this process has locked, where it can be, and remove it afterwards."""
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


def _remove_unowned(path: Path) -> None:
    """Remove a file that no living process has locked."""
    with suppress(OSError), path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Output:
    """An `Output` at a prefix of a bucket in S3 or a compatible store (`S3_ENDPOINT_URL`)."""

    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def read(self, name: str) -> bytes | None:
        # botocore retries a request, but not a body that breaks off.
        again = retrying(lambda error: not _codes_of(error))
        with self._naming(name, "read"):
            try:
                return again(self._get, name)
            except Exception as error:
                codes = _codes_of(error)
                if codes & MISSING and NO_BUCKET not in codes:
                    return None
                raise

    def _get(self, name: str) -> bytes:
        answer = s3_client().get_object(**self._address(name))
        data: bytes = answer["Body"].read()
        return data

    def put(self, name: str, data: bytes) -> None:
        with self._naming(name, "written"):
            self._put(name, data)

    def put_new(self, name: str, data: bytes) -> bool:
        with self._naming(name, "written"):
            try:
                self._put(name, data, IfNoneMatch="*")
                return True
            except Exception as error:
                codes = _codes_of(error)
                # A retry may meet the object that its first attempt wrote.
                if codes & EXISTS:
                    return False
                if not codes & UNSUPPORTED:
                    raise
            if self.read(name) is not None:
                return False
            self._put(name, data)
            return True

    def names(self, prefix: str, suffix: str) -> list[str]:
        return sorted(name for name in self._names(prefix) if name.endswith(suffix))

    def is_empty(self) -> bool:
        return all(name.startswith(".") for name in self._names(""))

    def locked(self) -> AbstractContextManager[object]:
        return nullcontext()

    def clean_up(self, parent: str, keep: Callable[[], Set[str]]) -> None:
        with self._naming(parent, "cleaned"):  # no object is ever unfinished
            names = self.names(f"{parent}/", "")
            kept = keep()
            for name in names:
                if name.split("/")[1] not in kept:
                    s3_client().delete_object(**self._address(name))

    def _address(self, name: str) -> dict[str, str]:
        return {**bucket_options(self.bucket), "Key": f"{self.prefix}/{name}"}

    def _names(self, prefix: str) -> Iterator[str]:
        begin = f"{self.prefix}/"
        with self._naming(prefix, "listed"):
            for entry in list_objects(self.bucket, begin + prefix):
                yield entry["Key"].removeprefix(begin)

    def _put(self, name: str, data: bytes, **conditions: str) -> None:
        digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        options = self._address(name) | conditions
        if acl := os.environ.get("S3_CANNED_ACL"):  # as MosaicML's uploader
            options["ACL"] = acl
        s3_client().put_object(Body=data, ContentMD5=digest, **options)

    def _naming(self, name: str, action: str) -> AbstractContextManager[None]:
        """Return a context that raises a store's error with the object and a way out."""
        way_out = (
            f"check that the bucket {self.bucket!r} exists, the credentials and S3_ENDPOINT_URL, "
            "then run the same command again"
        )
        return naming_failures(f"{self.url}/{name}", action, way_out)


def _codes_of(error: BaseException) -> set[str]:
    """Return the code and the HTTP status of a store's answer; empty if there was none."""
    response = getattr(error, "response", None) or {}
    code = response.get("Error", {}).get("Code")
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return {str(each) for each in (code, status) if each}
