"""Verification of local files against index.json: always the size, and the hash if there is one.

::

    stat --same as last time in this process--> whole
         --size of index.json--> manifest entry vouches for this version --> whole
                                 else hash it --> whole, recorded | damaged
                                 no hash: is its source unchanged, a file of the remote folder
                                 or a compressed file here?

Cost: one `stat`. A file's first use in a process reads its manifest entry. Its first use on a node,
or after a reboot, reads the file. Without a hash, one `stat` in the remote folder, if that is
a folder of this machine.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from streampack.errors import DataError, raise_if_limited
from streampack.mds.codecs import HASHES
from streampack.mds.index import Shard, ShardFile
from streampack.storage.checksum import expected_hash, file_digest
from streampack.storage.filesystem import FileState, LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.manifest import PENDING, CacheEntry, Manifest


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
def as_data_error(path: Path, num_bytes: int = 0, *, is_retried: bool = True) -> Iterator[None]:
    """Turn a file's OSError into a DataError; the file needs `num_bytes` if it is to be written.

    If the caller retries because the file may have been evicted, FileNotFoundError passes.
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
                "local= to a folder that can be written"
            )
        else:
            text = f"cannot be read or written ({error}); check the disk and the folder's rights"
        raise DataError(f"{path}: {text}", uri=str(path), shard=path.name) from error


class FileVerifier:
    """Compares the local files of one stream with index.json; safe to pickle."""

    def __init__(self, location: StreamLocation, disk: LocalFilesystem) -> None:
        self.validate_hash: str | None = location.stream.validate_hash or None
        # The source folder of our files, if it is on this machine.
        self._source = location.folder if location.remote is None else location.remote_folder
        self._folder = location.folder
        self._index_uri = location.index_uri
        self._opened: tuple[Path, FileState] | None = None
        self._disk = disk
        self._verified: dict[Path, FileState] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_verified": {}}

    def expected(self, file: ShardFile, *, is_validated: bool = False) -> str:
        """Return the hash that a file must have, as "algorithm:digest"; empty if none is known.

        If `is_validated`, a missing hash of the name in `validate_hash` is an error.
        """
        # A shard's two files may have different hashes; only the fetched one must have this hash.
        is_used = is_validated or self.validate_hash in file.hashes
        return expected_hash(file, self.validate_hash if is_used else None, self._index_uri)

    def is_hashed(self, shard: Shard) -> bool:
        """Return whether a known hash verifies a shard's file, or the file unpacked from it."""
        return not HASHES.keys().isdisjoint((*shard.stored.hashes, *shard.raw.hashes))

    def verify(self, folder: Path, file: ShardFile) -> FileState | None:
        """Return the state of a file that matches index.json; None if it is missing or damaged.

        A hash of our own file is recorded on disk, and that of any other in this process only. A
        DataError says that the file may belong to a newer version than the opened stream.
        """
        path = folder / file.basename
        try:
            state = self._disk.state(path)
            if state is None or state.num_bytes != file.num_bytes:
                return None
            if self._verified.get(path) == state:
                return state
            manifest = Manifest(folder, self._disk)
            entry, expected = manifest.read(file.basename), self.expected(file)
            boot_id = self.boot_id(folder)
            is_known = entry is not None and entry.is_verified(state, expected, boot_id)
            if expected and not is_known and file_digest(self._disk, path, expected) != expected:
                return None
            if entry is not None and self.is_replaced(entry):
                return None
            if entry is not None and entry.origin:
                self.raise_if_rewritten()  # another process may have fetched the new version
            if entry not in (None, PENDING) and not is_known:
                verified = CacheEntry.of(
                    state, hash_=expected, boot_id=boot_id, origin=entry.origin
                )
                with suppress(OSError):  # only an optimization
                    manifest.write(file.basename, verified)
        except OSError:
            return None
        self._verified[path] = state
        return state

    def boot_id(self, folder: Path) -> str:
        """Return the boot id for manifest entries; empty if several machines share the folder."""
        return "" if self._disk.is_network(folder) else self._disk.boot_id()

    def origin(self, shard: Shard) -> str:
        """Return the current version of a shard's source, as in the manifest; empty if hashed."""
        # A hash of the fetched file does not vouch for a raw file next to a newer one.
        is_vouched = self.expected(shard.raw) or self._source != self._folder
        return "" if self.is_hashed(shard) and is_vouched else self.version(shard.stored.basename)

    def version(self, basename: str) -> str:
        """Return the version of a file at its source; empty if it cannot be seen."""
        if self._source is not None:
            with suppress(OSError):
                state = self._disk.state(self._source / basename)
                if state is not None:
                    inode = f":{state.inode}" if state.inode else ""
                    return f"{basename}:{state.num_bytes}:{state.mtime_ns}{inode}"
        return ""

    def is_replaced(self, entry: CacheEntry) -> bool:
        """Return whether the file's source has been replaced by another version."""
        basename = entry.origin.partition(":")[0]  # no name in index.json contains a colon
        now = self.version(basename) if basename else ""
        # Entries of earlier releases have no inode.
        return bool(now) and not f"{now}:".startswith(f"{entry.origin}:")

    def watch_index(self, path: Path, state: FileState | None) -> None:
        """Record the index.json that the stream was opened with, where checking it is free."""
        self._opened = None if state is None else (path, state)

    def raise_if_rewritten(self) -> None:
        """Refuse to continue with a stream whose index.json was replaced since it was opened.

        The bytes may be equal: without hashes they do not identify a shard's version.
        """
        if self._opened is not None:
            path, before = self._opened
            raise_if_changed(path, before, self._disk.state(path), "was written again")

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
                    f"write it again, or, if it is a cached copy, delete it{where}"
                )


def raise_if_changed(
    path: Path, before: FileState, now: FileState | None, change: str = "was changed"
) -> None:
    """Refuse a file that was replaced since the stream was opened; it may be missing."""
    if now not in (None, before):
        raise DataError(
            f"{path}: {change} since the stream was opened, and without hashes it cannot be "
            "checked for the same tokens; make the dataset again and load the last state",
            uri=str(path),
        )
