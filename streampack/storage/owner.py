"""The remote that the files in a local folder belong to.

::

    local/.streampack/.remote    {"remote": "s3://bucket/code", "digest": "9f31..."}

The note is written before index.json gets its final name. A folder without a note belongs to the
first remote that is used with it. Any other remote is refused, because equal names and sizes do not
imply equal bytes. "digest" is that of the fetched index.json; it is empty if streampack found an
index.json that it did not fetch.

Cost: one small file read at each opening and each fetch.
"""

from __future__ import annotations

import json
import logging
from typing import NamedTuple

from streampack.errors import DataError
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.locks import NOTES_FOLDER, FileLocks

OWNER_FILE = ".remote"  # no stream's file name starts with a dot
LOCK_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


class _Owner(NamedTuple):
    remote: str
    digest: str


class CacheOwner:
    """The owner of one stream's local folder; safe to pickle and to share between processes."""

    def __init__(self, location: StreamLocation, disk: LocalFilesystem) -> None:
        self._remote = location.owner
        self._folder = location.folder
        self._path = location.folder / NOTES_FOLDER / OWNER_FILE
        self._disk = disk
        self._locks = FileLocks(location.folder, disk)

    def claim(self, digest: str = "") -> bool:
        """Claim an unowned folder for this remote; return whether this remote owns it.

        A folder that is not writable stays unclaimed, and may be read. `digest` is that of an
        index.json that is about to be renamed into place.
        """
        if self._remote is None:
            return True
        owner = self._read()
        if owner is None or (owner.remote == self._remote and digest not in ("", owner.digest)):
            owner = self._write(_Owner(self._remote, digest))
        return owner.remote == self._remote

    def refuse_others(self) -> None:
        """Refuse the folder if it belongs to another remote, with a DataError that names both."""
        owner = self._read()
        if owner is not None and owner.remote != self._remote:
            raise DataError(
                f"{self._folder}: holds files of {owner.remote}, but {self._remote} was requested; "
                f"set local= to another folder, or delete {self._folder}; if both remotes hold "
                f"the same files, delete only {self._path}",
                uri=str(self._path),
            )

    @property
    def digest(self) -> str:
        """The digest of the fetched index.json; empty if unknown."""
        owner = self._read()
        return "" if owner is None else owner.digest

    def _read(self) -> _Owner | None:
        """Return the folder's owner; None if it has none, or this stream has no remote."""
        if self._remote is None:
            return None
        try:
            fields = json.loads(self._disk.read(self._path) or b"")
            owner = _Owner(fields["remote"], fields["digest"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None  # no note, or a partial one after a power loss: write it again
        return owner if all(isinstance(field, str) for field in owner) else None

    def _write(self, new: _Owner) -> _Owner:
        """Write the note unless it already names another remote; return the valid one."""
        try:
            # Nothing raises in here: a failure note would also reach this remote's processes.
            with self._locks.hold(OWNER_FILE, LOCK_TIMEOUT_S):
                current = self._read()
                if current is not None and current.remote != new.remote:
                    return current
                content = json.dumps(new._asdict()).encode()
                self._locks.replace(OWNER_FILE, self._path, content)
        except OSError as error:
            logger.debug("%s: cannot be written: %s", self._path, error)
        return new
