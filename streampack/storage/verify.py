"""Verification of local files against index.json: always the size, and the hash if there is one.

::

    stat --same as last time in this process--> whole
         --size of index.json--> manifest entry vouches for this version --> whole
                                 else hash it --> whole, recorded | damaged
                                 no hash: is its source, in the remote folder or compressed here,
                                 unchanged?

Cost: one `stat`. A file's first use in a process reads its manifest entry. Its first use on a node,
or after a reboot, reads the file. Without a hash, one `stat` in the remote folder, if that is
a folder of this machine.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from streampack.errors import DataError, naming_limits
from streampack.mds.index import Part, Shard
from streampack.storage.filesystem import FileState, LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.manifest import CacheEntry, Manifest, file_digest, wanted_hash


@contextmanager
def attach_uri(uri: str | Path, shard: str | None = None) -> Iterator[None]:
    """Attach uri and shard to a DataError that has none.

    Args:
        uri: The file's location.
        shard: Its path under the stream's folder, if it belongs to a shard.

    Raises:
        ConfigError: If this process, or the system, has no file descriptor left.
    """
    try:
        with naming_limits():
            yield
    except DataError as error:
        if error.uri is None:
            error.uri, error.shard = str(uri), error.shard or shard
        raise


@contextmanager
def as_data_error(path: Path, num_bytes: int = 0, *, is_tried_again: bool = True) -> Iterator[None]:
    """Turn a file's OSError into a DataError.

    Args:
        path: The file.
        num_bytes: Space that it needs if it is to be written; 0: little.
        is_tried_again: Whether the caller retries if the file is missing, which may have been
            evicted. FileNotFoundError then passes unchanged.

    Raises:
        ConfigError: If this process, or the system, has no file descriptor left.
    """
    try:
        with naming_limits():
            yield
    except OSError as error:
        if is_tried_again and isinstance(error, FileNotFoundError):
            raise
        if num_bytes:
            text = (
                f"cannot be written ({error}); {num_bytes} bytes are needed: free them, or set "
                "local= to a folder that can be written"
            )
        else:
            text = (
                f"cannot be read or written ({error}); see what ails the disk, or the rights to "
                "the folder"
            )
        raise DataError(f"{path}: {text}", uri=str(path), shard=path.name) from error


class FileVerifier:
    """Compares the local files of one stream with index.json; safe to pickle.

    Args:
        files: Location of the stream's files.
        disk: Filesystem of its local folder.
        uri: The stream's index.json, for messages.
    """

    def __init__(self, files: StreamLocation, disk: LocalFilesystem, uri: str) -> None:
        self._validate_hash: str | None = files.stream.validate_hash or None
        # The source folder of our files, if it is on this machine.
        self._source = files.folder if files.remote is None else files.remote_folder
        self._folder = files.folder
        self._opened: tuple[Path, FileState] | None = None
        self._disk = disk
        self._uri = uri
        self._whole: dict[Path, FileState] = {}
        self._networks: dict[Path, bool] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_whole": {}, "_networks": {}}

    def wanted(self, part: Part, *, is_asked: bool = False) -> str:
        """Return the hash that a file must have, as "algorithm:digest"; empty if none is known.

        Args:
            part: The file's entry in index.json.
            is_asked: Whether it must be the one that `validate_hash` names.

        Raises:
            DataError: If that one is required, and there is no such hash.
        """
        # A shard's two files may have different hashes; only the fetched one must have this hash.
        use = self._validate_hash if is_asked or self._validate_hash in part.hashes else None
        return wanted_hash(part, use, self._uri)

    def is_whole(self, home: Path, part: Part) -> bool:
        """Return whether a file exists and matches index.json, as `whole`."""
        return self.whole(home, part) is not None

    def whole(self, home: Path, part: Part) -> FileState | None:
        """Return the state of a file that matches index.json; None if there is no such file.

        A hash of our own file is recorded on disk, and that of any other in this process only.

        Raises:
            DataError: If it may belong to a newer version than the opened stream.
        """
        path = home / part.basename
        try:
            state = self._disk.state(path)
            if state is None or state.num_bytes != part.num_bytes:
                return None
            known = self.lasting(home, state)
            if self._whole.get(path) == known:
                return known
            records = Manifest(home, self._disk)
            record, wanted = records.read(part.basename), self.wanted(part)
            boot_id = self.boot_id(home)
            is_known = record is not None and record.is_verified(known, wanted, boot_id)
            if wanted and not is_known and file_digest(self._disk, path, wanted) != wanted:
                return None
            if record is not None and self.is_replaced(record):
                return None
            if record is not None and record.origin:
                self.refuse_rewritten()  # another process may have fetched the new version
            if record is not None and not record.is_promise and not is_known:
                with suppress(OSError):  # only an optimization
                    records.remember(part.basename, known, wanted, boot_id, record.origin)
        except OSError:
            return None
        self._whole[path] = known
        return known

    def origin(self, shard: Shard) -> str:
        """Return the current version of a shard's source, as in the manifest; empty if hashed."""
        part = shard.packed or shard.raw
        # A hash of the fetched file does not vouch for a raw file next to a newer one.
        is_told = self.is_hashed(shard) and (self.wanted(shard.raw) or self._source != self._folder)
        return "" if is_told else self.version(part.basename)

    def version(self, basename: str) -> str:
        """Return the version of a file at its source; empty if it cannot be seen."""
        if self._source is not None:
            with suppress(OSError):
                state = self.seen(self._source / basename)
                if state is not None:
                    inode = f":{state.inode}" if state.inode else ""
                    return f"{basename}:{state.num_bytes}:{state.mtime_ns}{inode}"
        return ""

    def is_replaced(self, record: CacheEntry) -> bool:
        """Return whether the file's source has been replaced by another version."""
        basename = record.origin.partition(":")[0]  # no name in index.json contains a colon
        now = self.version(basename) if basename else ""
        # Entries of earlier releases have no inode.
        return bool(now) and not f"{now}:".startswith(f"{record.origin}:")

    def seen(self, path: Path) -> FileState | None:
        """Return the state that identifies a file's version; None if there is no file."""
        state = self._disk.state(path)
        return None if state is None else self.lasting(path.parent, state)

    def lasting(self, folder: Path, state: FileState) -> FileState:
        """Return the part of a file's state that is stable for the file's lifetime."""
        # Some network file systems assign new inodes at each mount, or even sooner.
        if folder not in self._networks:
            self._networks[folder] = self._disk.is_network(folder)
        return replace(state, inode=0) if self._networks[folder] else state

    def was_opened(self, index: Path, state: FileState | None) -> None:
        """Record the index.json that the stream was opened with, where checking it is free."""
        self._opened = None if state is None else (index, self.lasting(index.parent, state))

    def refuse_rewritten(self) -> None:
        """Refuse to continue with a stream that was rewritten since it was opened.

        Raises:
            DataError: If its index.json is now a different file. Its bytes may be equal: without
                hashes they do not identify a shard's version.
        """
        if self._opened is None:
            return
        path, before = self._opened
        if self.seen(path) not in (None, before):
            raise _rewritten(path, "was written again")

    def refuse_changed(self, path: Path, before: FileState, now: FileState | None) -> None:
        """Refuse a file without hashes that differs from the one that was there before.

        Args:
            path: The file.
            before: Its state when the stream was opened.
            now: Its current state; None: it does not exist.

        Raises:
            DataError: If it is a different file now.
        """
        if now not in (None, before):
            raise _rewritten(path, "was changed")

    def boot_id(self, home: Path) -> str:
        """Return the boot id for manifest entries; empty if several machines share the files."""
        return "" if self._disk.is_network(home) else self._disk.boot_id()

    def problem(self, path: Path, part: Part, found: str | None = None) -> str | None:
        """Return what is wrong with a file's bytes; None if nothing is.

        Args:
            path: The file.
            part: Its entry in index.json.
            found: Its hash, as "algorithm:digest", if it was computed during the write; None: the
                file is read.

        Raises:
            OSError: If it cannot be read.
        """
        state = self._disk.state(path)
        if state is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path))
        if state.num_bytes != part.num_bytes:
            return f"has {state.num_bytes} bytes, but index.json says {part.num_bytes}"
        wanted = self.wanted(part)
        if found is None:
            found = file_digest(self._disk, path, wanted) if wanted else ""
        if found == wanted:
            return None
        algorithm, _, digest = wanted.partition(":")
        rewritten = ""
        if part.hashes_from != "index.json":
            rewritten = " (if the stream was rewritten since: `streampack index`)"
        return (
            f"its {algorithm} is {found.partition(':')[2]}, but {part.hashes_from} says "
            f"{digest}{rewritten}"
        )

    def is_hashed(self, shard: Shard) -> bool:
        """Return whether a known hash verifies a shard's file, or the file unpacked from it."""
        return bool(self.wanted(shard.packed or shard.raw) or self.wanted(shard.raw))

    def refuse(self, path: Path, part: Part, where: str = "") -> None:
        """Raise an error for a damaged file that is not ours to replace.

        Args:
            path: The file.
            part: Its entry in index.json.
            where: The entry's field in index.json, for messages.

        Raises:
            DataError: Naming the file and its expected contents.
        """
        with as_data_error(path):
            try:
                problem = self.problem(path, part)
            except FileNotFoundError as error:
                raise DataError(
                    f"{path}: there is no such file, but index.json names it, and there is no "
                    f"other form of it here; copy the shard there, or set remote={where}",
                    uri=str(path),
                    shard=part.basename,
                ) from error
        if problem is not None:
            raise DataError(
                f"{path}: {problem}; the shard was cut short, damaged or changed: copy or write it "
                f"anew, or, if it is a cached copy, delete it{where}",
                uri=str(path),
                shard=part.basename,
            )


def _rewritten(path: Path, what: str) -> DataError:
    return DataError(
        f"{path}: {what} since the stream was opened, and without hashes nothing tells whether it "
        "holds the same tokens; make the dataset again and load the last state",
        uri=str(path),
    )
