"""Verification of local files against index.json: always the size, and the hash if there is one.

::

    stat --same as last time in this process--> whole
         --size of index.json--> its note vouches for this size, time and hash --> whole
                                 else hash it --> whole, noted | damaged
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from streampack.errors import DataError, raise_if_limited
from streampack.mds.codecs import HASHES
from streampack.mds.index import Shard, ShardFile
from streampack.storage.filesystem import FileState, LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.locks import CacheEntry, FileLocks
from streampack.storage.sealed import SEAL_BYTES, stated_hash

FAST_HASHES = ("xxh3_64", "xxh3_128", "xxh128", "xxh64", "xxh32", "sha1", "md5", "blake2b")


@contextmanager
def attach_uri(uri: str | Path, shard: str | None = None) -> Iterator[None]:
    """Attach a file's uri, and its path under the stream's folder, to a DataError without them."""
    try:
        yield
    except DataError as error:
        if error.uri is None:
            error.uri, error.shard = str(uri), error.shard or shard
        raise
    except (OSError, RuntimeError) as error:
        raise_if_limited(error)
        raise


@contextmanager
def as_data_error(
    path: Path, num_bytes: int = 0, *, is_retried: bool = True, elsewhere: str = ""
) -> Iterator[None]:
    """Turn a file's OSError into a DataError; the file needs `num_bytes` if it should be written.

    `elsewhere` is what to set with local= to write it to another folder. If the caller retries
    because the file may have been evicted, FileNotFoundError passes.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise_if_limited(error)
        if isinstance(error, RuntimeError) or (is_retried and isinstance(error, FileNotFoundError)):
            raise
        if num_bytes:
            text = (
                f"cannot be written ({error}); {num_bytes} bytes are needed: free them, or set "
                f"{elsewhere}local= to a folder that can be written"
            )
        else:
            text = (
                f"cannot be read or written ({error}); check the disk and the folder's rights, and "
                "put the file back if it was removed"
            )
        raise DataError(f"{path}: {text}", uri=str(path), shard=path.name) from error


def file_digest(disk: LocalFilesystem, path: Path, expected: str, begin: int = 0) -> str:
    """Return a file's hash by the algorithm of `expected`; both are "algorithm:digest"."""
    algorithm = expected.partition(":")[0]
    with disk.open(path) as file:
        file.seek(begin)
        digest = hashlib.file_digest(file, HASHES[algorithm])
    return f"{algorithm}:{digest.hexdigest()}"


class FileVerifier:
    """Compares the local files of one stream with index.json; safe to pickle."""

    def __init__(self, location: StreamLocation, disk: LocalFilesystem) -> None:
        self.validate_hash = location.download.hash or None
        self._index_uri = location.index_uri
        self.opened: tuple[Path, FileState] | None = None
        """The index.json that the stream was opened with, where checking it is free."""
        self._disk = disk
        self._verified: dict[Path, FileState] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_verified": {}}

    def expected(self, file: ShardFile, *, is_validated: bool = False) -> str:
        """Return the hash that a file must have, as "algorithm:digest"; empty if none is known.

        It is that of `validate_hash`, or by default the cheapest. If `is_validated`, a missing one
        is an error.
        """
        known = sorted(HASHES.keys() & file.hashes)
        # A shard's two files may have different hashes; only the fetched one must have this hash.
        if is_validated and self.validate_hash and self.validate_hash not in known:
            raise DataError(
                f"{self._index_uri}: {file.basename} has no {self.validate_hash!r} hash, only "
                f"{sorted(file.hashes)}; set Download(hash=) to one of them, or to None"
            )
        wanted = (self.validate_hash, *FAST_HASHES, *known)
        algorithm = next(filter(known.__contains__, wanted), None)
        return f"{algorithm}:{file.hashes[algorithm].lower()}" if algorithm else ""

    def expected_at(self, path: Path, file: ShardFile) -> str:
        """Return the hash that the file at a path must have, which it may state itself."""
        return stated_hash(self._disk, path) if file.make else self.expected(file)

    def verify(self, path: Path, file: ShardFile, *, is_cached: bool = True) -> FileState | None:
        """Return the state of a file that matches index.json; None if it is missing or damaged.

        The hash of a file in a cache is recorded on disk, and that of any other in this process
        only.
        """
        try:
            state = self._disk.state(path)
            if state is None or not file.has_size(state.num_bytes):
                return None
            if self._verified.get(path) != state:
                expected = self.expected_at(path, file)
                # Of a file that is made here and states no hash, only its note knows the size.
                is_checked = bool(expected) or file.make is not None
                if is_checked and not self._is_verified(
                    path, file, state, expected, is_cached=is_cached
                ):
                    return None
        except OSError:
            return None
        self._verified[path] = state
        return state

    def _is_verified(
        self, path: Path, file: ShardFile, state: FileState, expected: str, *, is_cached: bool
    ) -> bool:
        if not is_cached:
            return file_digest(self._disk, path, expected) == expected
        locks = FileLocks(path.parent, self._disk)
        entry = CacheEntry(num_bytes=state.num_bytes, mtime_ns=state.mtime_ns, hash=expected)
        if locks.read_entry(path.name) == entry:
            return True
        begin = SEAL_BYTES if file.make else 0
        if not expected or file_digest(self._disk, path, expected, begin) != expected:
            return False
        with suppress(OSError):  # only an optimization
            locks.write_entry(path.name, entry)
        return True

    def raise_if_rewritten(self, shard: Shard) -> None:
        """Refuse to fetch a shard without a hash if index.json was replaced since it was opened.

        The text may be the same: without hashes it does not identify a shard's version.
        """
        if self.opened is not None and not shard.is_hashed:
            path, before = self.opened
            raise_if_changed(path, before, self._disk.state(path), "was rewritten")

    def problem(self, path: Path, file: ShardFile, digest: str | None = None) -> str | None:
        """Return a description of how a file differs from index.json; None if it does not.

        The file is read, unless its hash (`digest`) was computed while it was written.
        """
        state = self._disk.state(path)
        if state is None:
            raise FileNotFoundError(errno.ENOENT, "the file does not exist", str(path))
        if state.num_bytes != file.num_bytes:
            return f"has {state.num_bytes} bytes, but index.json says {file.num_bytes}"
        expected = self.expected(file)
        if digest is None:
            digest = file_digest(self._disk, path, expected) if expected else ""
        if digest == expected:
            return None
        algorithm, _, expected_digest = expected.partition(":")
        hint = ""
        if file.hashes_from != "index.json":
            hint = " (if the stream was rewritten since: `streampack index`)"
        return (
            f"its {algorithm} is {digest.partition(':')[2]}, but {file.hashes_from} says "
            f"{expected_digest}{hint}"
        )

    def raise_if_damaged(self, path: Path, file: ShardFile, where: str = "") -> None:
        """Raise a DataError for a missing or damaged file that is not ours to replace.

        `where` names the file's entry in index.json, for messages.
        """
        with attach_uri(path, file.basename), as_data_error(path):
            try:
                problem = self.problem(path, file)
            except FileNotFoundError as error:
                raise DataError(
                    f"{path}: does not exist, but index.json names it, and the shard is not "
                    f"here in another form; copy the shard there, or set remote={where}"
                ) from error
            if problem is not None:
                raise DataError(
                    f"{path}: {problem}; the shard was truncated, damaged or changed: copy or "
                    f"rewrite it, or, if it is a cached copy, delete it{where}"
                )


def raise_if_changed(path: Path, before: object, now: object, change: str = "was changed") -> None:
    """Refuse a file that was replaced since the stream was opened; it may be missing."""
    if now not in (None, before):
        raise DataError(
            f"{path}: {change} since the stream was opened, and without hashes it cannot be "
            "checked for the same tokens; recreate the dataset and load the last state",
            uri=str(path),
        )
