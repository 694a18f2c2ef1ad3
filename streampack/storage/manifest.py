"""The notes of a cache folder: which version of a file was verified, and what is being fetched.

::

    file --hash, once per (size, time, boot)--> .streampack/<name>.json

A note is written before its file is renamed to its final name, and again after each new
verification. Under a cache limit, a note without a time reserves room before the download. The
time of a note is when its file's next use was planned (eviction.py). Notes from before a reboot are
not trusted: a crash may lose writes made before it.

Cost: reading a note takes about 50 µs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from streampack.storage.filesystem import FileState, LocalFilesystem
from streampack.storage.locks import NOTES_FOLDER, FileLocks


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """The note of one file."""

    num_bytes: int
    """Its size."""
    mtime_ns: int = 0
    """Its modification time when it was verified; 0: it is being fetched."""
    hash: str = ""
    """The hash it had, as "algorithm:digest"; empty if it was not hashed."""
    boot_id: str = ""
    """The boot of this machine in which it was verified."""

    @classmethod
    def of(cls, state: FileState, hash_: str, boot_id: str) -> CacheEntry:
        return cls(num_bytes=state.num_bytes, mtime_ns=state.mtime_ns, hash=hash_, boot_id=boot_id)


class Manifest:
    """The notes of the files in one folder; safe to pickle."""

    def __init__(self, folder: Path, disk: LocalFilesystem) -> None:
        self._folder = folder / NOTES_FOLDER
        self._disk = disk
        self._locks = FileLocks(folder, disk)

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def read(self, name: str) -> CacheEntry | None:
        """Return a file's note; None if there is none, or it cannot be read."""
        try:
            entry = CacheEntry(**json.loads(self._disk.read(self.path(name)) or b""))
        except (ValueError, TypeError, RecursionError):
            return None
        return entry if isinstance(entry.num_bytes, int) else None

    def write(self, name: str, entry: CacheEntry) -> None:
        self._locks.replace(name, self.path(name), json.dumps(asdict(entry)).encode())

    def remove(self, name: str) -> None:
        self._disk.remove(self.path(name))
