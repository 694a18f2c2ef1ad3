"""The node's cache limit and its eviction order.

::

    sum of the files that have an entry + incoming files > limit
        --> first those marked finished, then those whose use was planned longest ago
            |<- entry's time 0 ->|<----------- oldest ... latest ---------------->|

Only files that streampack created and that have not changed since are evicted, and never one whose
lock is held. One lock guards the limit for all streams of a dataset. A file in transit counts in
full, and a compressed one counts in addition to its raw one. A process can keep reading a file that
it has mapped; the disk space is freed when the last mapping is closed.

Cost: one listing of each stream's notes per fetched file; one `stat` and four system calls per
evicted file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streampack.errors import DataError
from streampack.mds.index import Part, Shard
from streampack.storage.filesystem import LocalFilesystem, LockBusyError
from streampack.storage.locks import NOTES_FOLDER, FileLocks
from streampack.storage.manifest import Manifest

LIMIT_LOCK = ".cache-limit.lock"  # no stream's file name starts with a dot
LIMIT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheFolder:
    """A folder that holds cached files."""

    folder: Path
    """The folder."""
    shards: Sequence[Shard]
    """The shards whose files it may hold."""
    parts: dict[str, tuple[Part, str]] = field(default_factory=dict)
    """Each file by its entry's name, with the basename whose lock guards it; built lazily."""

    def table(self, records: Manifest) -> dict[str, tuple[Part, str]]:
        """Return `parts`, built on the first call."""
        if not self.parts:
            for shard in self.shards:
                for part in (shard.raw, shard.packed):
                    if part is not None:
                        name = records.path(part.basename).name
                        self.parts[name] = (part, shard.raw.basename)
        return self.parts

    def __reduce__(self) -> tuple[object, ...]:
        return _home, (self.folder, self.shards)


def _home(folder: Path, shards: Sequence[Shard]) -> CacheFolder:
    return CacheFolder(folder=folder, shards=shards)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entry:
    """A cached file that counts toward the limit."""

    home: CacheFolder
    records: Manifest
    part: Part
    guarded_by: str


class CacheLimit:
    """Limit on the bytes that cached files take on this node, over all streams of a dataset.

    Args:
        num_bytes: The limit.
        homes: Folders that may hold cached files; not empty.
        disk: Filesystem of these folders.
    """

    def __init__(self, num_bytes: int, homes: Sequence[CacheFolder], disk: LocalFilesystem) -> None:
        self.num_bytes = num_bytes
        self._homes = tuple(homes)
        self._disk = disk

    def reserve(self, folder: Path, parts: Sequence[Part]) -> None:
        """Make room for a shard's files and reserve it; the shard's lock must be held.

        Args:
            folder: Destination of the files.
            parts: The files, none of which exists there yet: an entry marks a file as ours.

        Raises:
            DataError: If other processes do not release the limit's lock.
            OSError: If the folder cannot be written.
        """
        lock = self._homes[0].folder / NOTES_FOLDER / LIMIT_LOCK
        self._disk.make_folder(lock.parent)
        try:
            with self._disk.lock(lock, LIMIT_TIMEOUT_S):
                self._make_room(folder, parts)
                for part in parts:
                    Manifest(folder, self._disk).reserve(part.basename)
        except LockBusyError as error:
            raise DataError(
                f"{lock}: another process has held this lock for {LIMIT_TIMEOUT_S:.0f} s; "
                "see whether it hangs"
            ) from error

    def _make_room(self, folder: Path, parts: Sequence[Part]) -> None:
        # An incoming file may have an old entry; count it once.
        coming = {(folder, part.basename) for part in parts}
        entries = [
            entry
            for entry in self._entries()
            if (entry.home.folder, entry.part.basename) not in coming
        ]
        num_bytes = sum(part.num_bytes for part in (*parts, *(entry.part for entry in entries)))
        excess = num_bytes - self.num_bytes
        if excess <= 0:
            return
        for entry in sorted(entries, key=self._last_planned_ns):
            if self._evict(entry):
                excess -= entry.part.num_bytes
            if excess <= 0:
                return
        # The remainder is in transit in other processes, one shard each; do not wait for them.

    def _entries(self) -> Iterator[_Entry]:
        for home in self._homes:
            records = Manifest(home.folder, self._disk)
            table = home.table(records)
            for name in self._disk.names(home.folder / NOTES_FOLDER):
                if name in table:
                    part, guarded_by = table[name]
                    yield _Entry(home=home, records=records, part=part, guarded_by=guarded_by)

    def _last_planned_ns(self, entry: _Entry) -> int:
        state = self._disk.state(entry.records.path(entry.part.basename))
        return 0 if state is None else state.mtime_ns

    def _evict(self, entry: _Entry) -> bool:
        """Remove a file if it is ours and no process is fetching it; return whether it is gone."""
        folder, basename = entry.home.folder, entry.part.basename
        with FileLocks(folder, self._disk).try_hold(entry.guarded_by) as is_held:
            if not is_held:
                return False
            record = entry.records.read(basename)
            state = self._disk.state(folder / basename)
            if state is not None and (record is None or not record.matches(state)):
                # Another program put this file here. If our fetching process was killed, drop
                # its pending entry; the file stays and does not count toward the limit.
                if record is None or not record.is_promise:
                    return False
            else:
                # In this order: a file without an entry would never be evicted.
                self._disk.remove(folder / basename)
            entry.records.remove(basename)
            return True
