"""A stream's index.json and length file on this node: fetched, and compared with the remote's.

::

    index.json  --> this remote's folder? (owner.py) --no--> refused
                --> here? --no--> fetch, parse, rename
                --> is it still the remote's?        --no--> refused
    lengths.bin --> here, and of the remote's version? --no--> fetch, record, rename

Cost: a few `stat` calls per open. If the remote is a folder, its index.json is read and compared
whenever the stream is opened. An object store is checked again only with `check_remote`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from streampack.errors import DataError
from streampack.mds.index import INDEX_FILE, MdsIndex, parse_index
from streampack.mds.length_file import LENGTH_FILE, index_digest
from streampack.storage.filesystem import FileState
from streampack.storage.locks import FileLocks
from streampack.storage.manifest import Manifest
from streampack.storage.materialize import ShardMaterializer
from streampack.storage.verify import as_data_error, attach_uri
from streampack.stores.failures import DamagedError

NAMED_SPLITS = 8  # in a message

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class StreamMetadata:
    """The index.json and the length file of one stream; safe to pickle."""

    def __init__(self, materializer: ShardMaterializer) -> None:
        self._materializer = materializer
        self._location = materializer.location
        self._disk = materializer.disk
        self._owner = materializer.owner
        self._locks = FileLocks(self._location.folder, self._disk)

    def index_bytes(self) -> bytes:
        """Return the bytes of index.json, fetched on the first call on this node.

        A DataError says that there is none, that the remote now holds a different one, or that the
        local folder belongs to another remote or another user.
        """
        path = self._location.folder / INDEX_FILE
        with as_data_error(path, is_retried=False):
            self._make_root_private()
            self._owner.refuse_others()
            text = self._read_index(path)
            if text is None and self._location.remote is None:
                raise DataError(
                    f"{path}: does not exist; {self._split_hint()}give the folder of an MDS "
                    "stream as local=, or set remote= to where it can be fetched; `streampack "
                    "write` makes a stream of text, rows or token ids"
                )
            is_cached = text is not None
            if text is None:
                with self._locks.hold(INDEX_FILE, self._materializer.lock_s()):
                    text = self._read_index(path) or self._fetch_index(path)
            if not self._owner.claim():
                self._owner.refuse_others()
        self._compare_with_remote(text, is_cached=is_cached)
        return text

    def _make_root_private(self) -> None:
        """Make the default folder private to this user; its name is predictable."""
        root = self._location.temporary_root
        if root is None:
            return
        try:
            self._disk.make_folder(root, is_private=True)
        except (PermissionError, FileExistsError) as error:
            raise DataError(
                f"{root}: is the folder of a stream without local=, but cannot be made private to "
                f"this user ({error}); set local= to another folder",
                uri=str(root),
            ) from error

    def _read_index(self, path: Path) -> bytes | None:
        """Return the local index.json; None if it is missing, or was fetched and is damaged."""
        text = self._disk.read(path)
        digest = self._owner.digest
        if text is None or digest in ("", index_digest(text).hex()):
            return text
        logger.warning(
            "%s: is not what was fetched from %s; fetching it again", path, self._location.remote
        )
        return None

    def _split_hint(self) -> str:
        """Return a hint on a stream in the folder above, or in subfolders."""
        folder = Path(self._location.stream.local)
        split = self._location.stream.split
        if split is not None and (folder / INDEX_FILE).exists():
            return f"leave out split={split!r}, as {folder} has an index.json; or "
        splits = sorted(path.parent.name for path in folder.glob(f"*/{INDEX_FILE}"))
        if not splits:
            return ""
        options = " or ".join(f"split={name!r}" for name in splits[:NAMED_SPLITS])
        more = ", ..." if splits[NAMED_SPLITS:] else ""
        return f"set {options}{more}, whose folders hold one; or "

    def _fetch_index(self, path: Path) -> bytes:
        uri = self._location.index_uri
        downloads: list[bytes] = []
        parsed: list[MdsIndex] = []

        def check(fetched: Path) -> None:
            """Refuse an index.json that cannot be parsed, so that the download tries again."""
            # An invalid index must not get its final name: the next start would find it there.
            downloads.append(self._disk.read(fetched) or b"")
            try:
                parsed.append(parse_index(downloads[-1], uri))
            except DataError as error:
                if downloads[-1:] == downloads[-2:-1]:  # so the remote file is wrong
                    raise
                raise DamagedError(str(error).removeprefix(f"{uri}: ")) from error

        with self._locks.temporary(INDEX_FILE) as temporary:
            self._materializer.store.fetch(self._location, INDEX_FILE, temporary, check=check)
            text = downloads[-1]
            digest, owned = index_digest(text).hex(), self._owner.digest
            # Shards of two versions may have equal sizes: only hashes distinguish them.
            hashes = (self._materializer.verifier.expected(one.stored) for one in parsed[-1].shards)
            if owned not in ("", digest) and not all(hashes):
                raise self._other_version(owned, digest)
            if self._owner.claim(digest):
                self._disk.rename(temporary, path)
        return text

    def _compare_with_remote(self, text: bytes, *, is_cached: bool) -> None:
        """Refuse a cache that differs from the remote's index.json, if that is known or checked."""
        folder, current = self._location.remote_folder, None
        if folder is not None:
            path = folder / INDEX_FILE
            try:
                state, current = self._disk.state(path), self._disk.read(path)
            except OSError:
                return  # fetched files remain usable without the remote
            self._materializer.verifier.watch_index(path, state)
        elif self._location.remote and getattr(self._location.stream, "check_remote", False):
            current = self._fetch_current() if is_cached else None
        if current is not None and current != text:
            raise self._other_version(index_digest(text).hex(), index_digest(current).hex())

    def _fetch_current(self) -> bytes | None:
        """Fetch index.json again, which works with any store; etags differ between copies."""
        lock_s = self._materializer.lock_s()
        try:
            with (
                self._locks.hold(INDEX_FILE, lock_s),
                self._locks.temporary(INDEX_FILE) as temporary,
            ):
                self._materializer.store.fetch(self._location, INDEX_FILE, temporary)
                return self._disk.read(temporary) or b""
        except (DataError, OSError) as error:
            logger.warning(
                "%s: check_remote cannot tell whether the store still holds the version in %s, "
                "so the run continues with that version: %s",
                self._location.index_uri,
                self._location.folder,
                error,
            )
            return None

    def _other_version(self, here: str, there: str) -> DataError:
        folder = self._location.folder
        return DataError(
            f"{folder}: was fetched from another version of {self._location.remote}: index.json "
            f"is {here[:8]} here, {there[:8]} there; delete {folder}, or name another local=",
            uri=self._location.index_uri,
        )

    def length_file_path(self) -> Path | None:
        """Return the path of the length file, fetched if the remote has one; None if there is none.

        A DataError says that the store neither returns it nor reports that it does not exist.
        """
        path = self._location.folder / LENGTH_FILE
        with as_data_error(path, is_retried=False):
            if self._location.remote is None:
                return path if self._disk.state(path) is not None else None
            if not self._has_lengths(path):
                with self._locks.hold(LENGTH_FILE, self._materializer.lock_s()):
                    if not self._has_lengths(path) and not self._fetch_lengths():
                        return None
            return path

    def _has_lengths(self, path: Path) -> bool:
        """Return whether the length file is present and matches the remote's version."""
        if self._disk.state(path) is None:
            return False
        entry = Manifest(path.parent, self._disk).read(LENGTH_FILE)
        return entry is None or not self._materializer.verifier.is_replaced(entry)

    def _fetch_lengths(self) -> bool:
        materializer, location = self._materializer, self._location
        origin = materializer.verifier.version(LENGTH_FILE)
        with self._locks.temporary(LENGTH_FILE) as temporary:
            is_there = materializer.store.fetch_if_there(location, LENGTH_FILE, temporary)
            if is_there:
                materializer.publish(temporary, location.folder, LENGTH_FILE, "", origin)
        return is_there

    def read_lengths(self, read: Callable[[], _T]) -> _T | None:
        """Return what `read` returns of the length file; None if it was deleted everywhere.

        If our copy was deleted, or is damaged, it is fetched again first.
        """
        folder, state = self._location.folder, None
        path = folder / LENGTH_FILE
        try:
            with as_data_error(path):
                state = self._disk.state(path)
            return read()
        except (DataError, OSError, RuntimeError) as failure:
            with attach_uri(path), as_data_error(path):
                if not isinstance(failure, FileNotFoundError) and not (
                    isinstance(failure, DataError) and self._remove_damaged_lengths(state)
                ):
                    raise
                return None if self.length_file_path() is None else read()

    def _remove_damaged_lengths(self, damaged: FileState | None) -> bool:
        """Remove a damaged length file that we fetched; return whether there may be a new copy."""
        if damaged is None or self._location.remote is None:
            return False
        folder = self._location.folder
        with as_data_error(folder / LENGTH_FILE):
            return self._materializer.remove_damaged(folder, damaged, LENGTH_FILE)
