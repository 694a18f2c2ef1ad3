"""One lock and one note per file of a cache, and the leftovers of dead processes.

In the stream's folder, for its file `a/shard.mds`::

    .streampack/a_shard.mds.lock           held while the file is fetched; freed by the kernel
    .streampack/a_shard.mds.<hex>.tmp      a partial file, or a folder of them
    .streampack/a_shard.mds.json           which version of the file was verified

Under a cache limit, a note without a time reserves room before the download, and the time
of the note itself is when its file's next use was planned (eviction.py).

Cost: five system calls per lock, about 50 us per note; a sweep lists one folder.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from streampack.errors import DataError
from streampack.storage.filesystem import LocalFilesystem, LockBusyError

NOTES_FOLDER = ".streampack"
"""Subfolder for the locks, notes and temporary files of a folder's files."""

LEFTOVER = re.compile(r"(?P<name>.+)\.[0-9a-f]{32}\.tmp.*", re.DOTALL)


def note_name(basename: str) -> str:
    """Return the prefix of the names of a file's lock, notes and temporary files.

    >>> note_name("00001/shard.00000.mds")
    '00001_shard.00000.mds'
    """
    return basename.replace("/", "_")


class FileLocks:
    """The locks and notes of the files in one folder; safe to pickle."""

    def __init__(self, folder: Path, disk: LocalFilesystem) -> None:
        self._folder = folder / NOTES_FOLDER
        self._disk = disk

    @contextmanager
    def temporary(self, basename: str) -> Iterator[Path]:
        """Yield a new temporary path for a file with a held lock; removed at the end."""
        path = self._folder / f"{note_name(basename)}.{uuid.uuid4().hex}.tmp"
        try:
            yield path
        finally:
            with suppress(OSError):
                self._disk.remove(path)

    def replace(self, basename: str, path: Path, content: bytes) -> None:
        self._disk.make_folder(self._folder)
        with self.temporary(basename) as temporary:
            self._disk.write(temporary, [content])
            self._disk.rename(temporary, path)

    @contextmanager
    def hold(self, basename: str, timeout_s: float) -> Iterator[None]:
        """Hold a file's lock while it is fetched.

        Each earlier holder may take up to `timeout_s`; a DataError says that one took longer.
        """
        disk = self._disk
        path = self._folder / f"{note_name(basename)}.lock"
        disk.make_folder(self._folder)
        before = disk.state(path)
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(disk.lock(path, timeout_s))
                    break
                except LockBusyError as error:
                    # A holder sets the file's time when it starts: this one may be another.
                    state = disk.state(path)
                    if state == before:
                        raise DataError(
                            f"{path}: another process has held this lock for {timeout_s:.0f} s; "
                            "check whether it hangs, or raise Download(timeout=) if its downloads "
                            "are only slow"
                        ) from error
                    before = state
            disk.touch(path, disk.now_s())
            yield

    @contextmanager
    def try_hold(self, basename: str) -> Iterator[bool]:
        try:
            with self._disk.lock(self._folder / f"{note_name(basename)}.lock", 0):
                yield True
        except LockBusyError:
            yield False

    def entry_path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def read_entry(self, name: str) -> CacheEntry | None:
        """Return a file's note; None if there is none, or it cannot be read."""
        try:
            entry = CacheEntry(**json.loads(self._disk.read(self.entry_path(name)) or b""))
        except (ValueError, TypeError, RecursionError):
            return None
        return entry if isinstance(entry.num_bytes, int) else None

    def write_entry(self, name: str, entry: CacheEntry) -> None:
        self.replace(name, self.entry_path(name), json.dumps(asdict(entry)).encode())

    def remove_entry(self, name: str) -> None:
        self._disk.remove(self.entry_path(name))

    def remove_leftovers(self, basename: str) -> None:
        """Remove a file's temporary files; they are unused, because its lock is held."""
        for name in self._leftovers(note_name(basename)).get(note_name(basename), ()):
            self._disk.remove(self._folder / name)

    def sweep(self) -> None:
        """Remove leftovers of dead processes, which have released their locks."""
        for owner, names in self._leftovers().items():
            with suppress(OSError), self.try_hold(owner) as is_held:
                for name in names if is_held else ():
                    self._disk.remove(self._folder / name)

    def _leftovers(self, prefix: str = "") -> dict[str, list[str]]:
        by_owner: dict[str, list[str]] = {}
        for name in self._disk.names(self._folder):
            # Matching all names would cost more than listing them.
            match = LEFTOVER.fullmatch(name) if name.startswith(prefix) else None
            if match:
                by_owner.setdefault(match["name"], []).append(name)
        return by_owner


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """The note of one file."""

    num_bytes: int
    mtime_ns: int = 0
    """Its modification time when it was verified; 0: it is being fetched."""
    hash: str = ""
    """The hash it had, as "algorithm:digest"; empty if it was not hashed."""
