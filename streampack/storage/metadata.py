"""A stream's index.json and length file on this node: the versions that were fetched.

::

    last version here? --no--> fetch, parse, rename to index.<version>.json, note it as the last
                       --is it still the remote's?--no--^
    lengths.<version>.bin here? --no--> fetch, rename
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from streampack.errors import DataError
from streampack.mds.index import INDEX_FILE, MdsIndex, parse_index
from streampack.mds.length_file import LENGTH_FILE
from streampack.storage.filesystem import FileState, LocalFilesystem
from streampack.storage.location import StreamLocation, remote_identity
from streampack.storage.locks import NOTES_FOLDER, FileLocks
from streampack.storage.materialize import Downloader, lock_s
from streampack.storage.names import LAST, VERSION, index_version
from streampack.storage.verify import FileVerifier, as_data_error, attach_uri
from streampack.stores.failures import DamagedError

NAMED_SPLITS = 8  # in a message

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class _Version(NamedTuple):
    name: str
    text: bytes


class StreamMetadata:
    """The index.json and the length file of one stream; safe to pickle."""

    def __init__(
        self,
        location: StreamLocation,
        disk: LocalFilesystem,
        store: Downloader,
        verifier: FileVerifier,
    ) -> None:
        self.version = ""
        """The opened version of a remote stream's index.json, once it was read."""
        self.fetched: list[int] = []
        """Bytes of each index file and length file that this process fetched."""
        self._location = location
        self._disk = disk
        self._store = store
        self._verifier = verifier
        self._locks = FileLocks(location.folder, disk)
        self._remote_folder = location.remote_folder

    @property
    def length_path(self) -> Path:
        """The path of the length file in a cache, or next to a local stream's index.json."""
        if self._location.remote is None:
            return self._location.folder / LENGTH_FILE
        return self._location.folder / f"lengths.{self.version}.bin"

    def index_bytes(self) -> bytes:
        """Return the bytes of index.json, fetched on the first call on this node.

        A DataError says that there is none, or that the local folder belongs to another user.
        """
        path = self._location.folder / INDEX_FILE
        with as_data_error(path, is_retried=False):
            self.make_root_private()
            if self._location.remote is not None:
                self.version, text = self._current()
                return text
            if (local := self._disk.read(path)) is None:
                raise DataError(
                    f"{path}: does not exist; {self._split_hint()}give the folder of an MDS "
                    "stream as local=, set remote= to where it can be fetched, or name token "
                    "files in Stream(TokenFiles(files)); `streampack write` makes a stream of "
                    "text, rows or token ids"
                )
            return local

    def make_root_private(self) -> None:
        """Make the default folder private to this user; its name is predictable."""
        root = self._location.temporary_root
        if root is None:
            return
        try:
            self._disk.make_folder(root, is_private=True)
        except (PermissionError, FileExistsError) as error:
            raise DataError(
                f"{root}: is the default folder of streams without local=, but cannot be made "
                f"private to this user ({error}); set local= to another folder",
                uri=str(root),
            ) from error

    def _split_hint(self) -> str:
        folder, split = self._location.root, self._location.split
        if split and (folder / INDEX_FILE).exists():
            return f"omit split={split!r}, as {folder} has an index.json; or "
        splits = sorted(path.parent.name for path in folder.glob(f"*/{INDEX_FILE}"))
        options = " or ".join(f"split={name!r}" for name in splits[:NAMED_SPLITS])
        return f"set {options}, a subfolder that has one; or " if splits else ""

    def _current(self) -> _Version:
        """Return the remote's version where that is free or `check_remote` asks, else the last."""
        last = self._last()
        if self._remote_folder is not None:
            path = self._remote_folder / INDEX_FILE
            try:
                state, text = self._disk.state(path), self._disk.read(path)
            except OSError:
                state = text = None
            self._verifier.opened = None if state is None else (path, state)
            if last is not None and (text is None or _is_same(last, text, state)):
                return last  # without the remote, fetched files remain usable
            return self._fetch(state, lambda last: text is not None and _is_same(last, text, state))
        if last is None:
            return self._fetch(None, lambda _: True)
        if not self._location.check_remote:
            return last
        try:
            return self._fetch(None, lambda _: False)
        except (DataError, OSError) as error:
            logger.warning(
                "%s: check_remote cannot tell whether the store still has the version in %s, "
                "so the run continues with that version: %s",
                self._location.index_uri,
                self._location.folder,
                error,
            )
            return last

    def _last(self) -> _Version | None:
        folder = self._location.folder
        note = (self._disk.read(folder / NOTES_FOLDER / LAST) or b"").decode(errors="replace")
        version = note.partition(" ")[0]
        if not VERSION.fullmatch(version):  # none yet, or a partial one after a power loss
            return None
        path = folder / f"index.{version}.json"
        text = self._disk.read(path)
        if text is None or version[:8] == index_version(text, None):
            return None if text is None else _Version(version, text)
        logger.warning(
            "%s: is not what was fetched from %s; fetching it again", path, self._location.remote
        )
        return None

    def _fetch(self, state: FileState | None, is_enough: Callable[[_Version], bool]) -> _Version:
        """Fetch index.json and keep it as the last version.

        One that another process has fetched in the meantime is used if it `is_enough`.
        """
        location, uri = self._location, self._location.index_uri
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

        with self._locks.hold(INDEX_FILE, lock_s(location)):
            last = self._last()
            if last is not None and is_enough(last):
                return last
            with self._locks.temporary(INDEX_FILE) as temporary:
                self._store.fetch(location, INDEX_FILE, temporary, check=check)
                text = downloads[-1]
                self.fetched.append(len(text))
                are_hashed = all(shard.is_hashed for shard in parsed[-1].shards)
                version = index_version(text, None if are_hashed else state)
                self._disk.rename(temporary, location.folder / f"index.{version}.json")
                path = location.folder / NOTES_FOLDER / LAST
                note = f"{version} {remote_identity(location.remote or '')}"
                self._locks.replace(LAST, path, note.encode(errors="surrogateescape"))
        return _Version(version, text)

    def length_file_path(self) -> Path | None:
        """Return the path of the length file, fetched if the remote has one; None if there is none.

        A DataError says that the store neither returns it nor reports that it does not exist.
        """
        path = self.length_path
        with as_data_error(path, is_retried=False):
            if self._disk.state(path) is not None:
                return path
            if self._location.remote is None:
                return None
            fetch = partial(self._store.fetch_if_there, self._location, LENGTH_FILE)
            return path if self.fetch_once(path, fetch) else None

    def fetch_once(self, path: Path, fetch: Callable[[Path], object], num_bytes: int = 0) -> bool:
        """Fetch a file unless another process just did; return whether it exists."""
        locks = self._locks
        lock = locks.hold(path.name, lock_s(self._location, num_bytes))
        with lock, locks.temporary(path.name) as new:
            if self._disk.state(path) is None:
                if not fetch(new):
                    return False
                self.fetched.append(new.stat().st_size)
                self._disk.rename(new, path)
            return True

    def read_lengths(self, read: Callable[[], _T]) -> _T | None:
        """Return what `read` returns of the length file; None if it was deleted everywhere.

        If our copy was deleted, or is damaged, it is refetched first.
        """
        try:
            return read()
        except (DataError, OSError, RuntimeError) as failure:
            path = self.length_path
            with attach_uri(path), as_data_error(path):
                if isinstance(failure, DataError) and self._location.remote is not None:
                    with self._locks.hold(path.name, lock_s(self._location)):
                        try:
                            return read()  # another process may have replaced it
                        except (DataError, FileNotFoundError):
                            self._disk.remove(path)
                elif not isinstance(failure, FileNotFoundError):
                    raise
                return None if self.length_file_path() is None else read()


def _is_same(last: _Version, text: bytes, state: FileState | None) -> bool:
    names = (index_version(text, None), index_version(text, state))
    return last.text == text and last.name in names
