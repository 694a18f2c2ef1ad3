"""The manifest: which files are ours and were verified, and with which hash.

::

    file --hash, once per (size, time, boot)--> .streampack/<name>.json

Only files that streampack fetched or unpacked have an entry, and only these may be replaced or
evicted. An entry is written before its file is renamed to its final name, and again after each new
verification. Under a cache limit a pending entry is written before the download. A file next to a
pending entry was put there by another program. Entries from before a reboot are not trusted.

Cost: reading an entry takes about 50 µs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from streampack.storage.filesystem import FileState, LocalFilesystem
from streampack.storage.locks import NOTES_FOLDER, FileLocks, note_name


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """The manifest's entry for one of our files."""

    num_bytes: int
    """Its size at the last verification; -1: it is being fetched; -2: the entry is unreadable."""
    mtime_ns: int
    """Its modification time at that point."""
    hash: str
    """The hash it had, as "algorithm:digest"; empty if index.json has none."""
    boot_id: str
    """The boot of this machine in which it was verified."""
    origin: str = ""
    """Version of its source, as "name:size:time:inode"; no inode on a network file system.

    The source is a file in a remote folder, or a local stream's compressed file. Empty if a hash
    identifies the contents, or nothing can.
    """
    inode: int = 0
    """Its inode at that point; 0 on a network file system."""

    @classmethod
    def of(cls, state: FileState, *, hash_: str, boot_id: str, origin: str) -> CacheEntry:
        """Return the entry of a file that was verified in this state."""
        return cls(**state._asdict(), hash=hash_, boot_id=boot_id, origin=origin)

    def matches(self, state: FileState) -> bool:
        """Return whether the entry describes this version of the file."""
        return (self.num_bytes, self.mtime_ns) == (state.num_bytes, state.mtime_ns)

    def is_verified(self, state: FileState, hash_: str, boot_id: str) -> bool:
        """Return whether the entry vouches for this hash of this version of the file."""
        vouched = (self.inode, self.hash, self.boot_id)
        return self.matches(state) and vouched == (state.inode, hash_, boot_id)


PENDING = CacheEntry(num_bytes=-1, mtime_ns=0, hash="", boot_id="")
"""The entry of a file that does not exist yet: its fetch is in progress or was killed."""
UNREADABLE = CacheEntry(num_bytes=-2, mtime_ns=0, hash="", boot_id="")


class Manifest:
    """The entries of the files in one folder; safe to pickle."""

    def __init__(self, folder: Path, disk: LocalFilesystem) -> None:
        self._folder = folder / NOTES_FOLDER
        self._disk = disk
        self._locks = FileLocks(folder, disk)

    def path(self, basename: str) -> Path:
        """Return the path of a file's entry."""
        return self._folder / f"{note_name(basename)}.json"

    def read(self, basename: str) -> CacheEntry | None:
        """Return a file's entry; None if there is none."""
        text = self._disk.read(self.path(basename))
        return None if text is None else _parse(text)

    def has(self, basename: str) -> bool:
        """Return whether an existing file is ours."""
        return self.read(basename) not in (None, PENDING)

    def write(self, basename: str, entry: CacheEntry) -> None:
        """Write a file's entry atomically; its folder is created if necessary."""
        content = json.dumps(asdict(entry)).encode()
        self._locks.replace(basename, self.path(basename), content)

    def remove(self, basename: str) -> None:
        """Remove a file's entry, if it has one."""
        self._disk.remove(self.path(basename))


def _parse(text: bytes) -> CacheEntry:
    # Only streampack writes entries: an unreadable one still marks the file as ours.
    try:
        entry = CacheEntry(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return UNREADABLE
    are_ints = isinstance(entry.num_bytes, int) and isinstance(entry.mtime_ns, int)
    return entry if are_ints and isinstance(entry.origin, str) else UNREADABLE
