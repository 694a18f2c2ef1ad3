"""How many bytes of a node fetched and unpacked files may take, and which of them go first.

::

    sum of the files that have a record + what comes > limit
        --> first those marked finished, then those whose use was planned longest ago
            |<- record's time 0 ->|<----------- oldest ... latest ---------------->|

Only files that streampack put there and that have not changed since are ever removed, never one
whose lock is held. Room is kept under one lock for all streams of a dataset, and a file that is
under way counts in full, a compressed one beside the raw one that is made of it. A file that a
process has mapped can be read on, and leaves the disk when the last one lets go.

Cost: one listing of each stream's notes per file that is brought; one `stat` and four system calls
per file that goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streampack.errors import DataError
from streampack.streams.disk import Disk, LockBusyError
from streampack.streams.index import Part, Shard
from streampack.streams.locks import NOTES_FOLDER, FileLocks
from streampack.streams.records import Records

__all__ = ["CacheLimit", "Home"]

LIMIT_LOCK = ".cache-limit.lock"  # no file of a stream has a name with a dot in front
LIMIT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Home:
    """A folder that holds files of ours."""

    folder: Path
    """The folder."""
    shards: Sequence[Shard]
    """What may lie there."""
    parts: dict[str, tuple[Part, str]] = field(default_factory=dict)
    """Each file by the name of its record, and the basename whose lock guards it; made lazily."""

    def table(self, records: Records) -> dict[str, tuple[Part, str]]:
        """Return `parts`, made at the first call."""
        if not self.parts:
            for shard in self.shards:
                for part in (shard.raw, shard.packed):
                    if part is not None:
                        name = records.path(part.basename).name
                        self.parts[name] = (part, shard.raw.basename)
        return self.parts

    def __reduce__(self) -> tuple[object, ...]:
        return _home, (self.folder, self.shards)


def _home(folder: Path, shards: Sequence[Shard]) -> Home:
    return Home(folder=folder, shards=shards)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entry:
    """A file of ours that takes room."""

    home: Home
    records: Records
    part: Part
    guarded_by: str


class CacheLimit:
    """Bytes of this node that files of ours may take, over all streams of a dataset.

    Args:
        num_bytes: The limit.
        homes: Where files of ours may lie; not empty.
        disk: What they lie on.
    """

    def __init__(self, num_bytes: int, homes: Sequence[Home], disk: Disk) -> None:
        self.num_bytes = num_bytes
        self._homes = tuple(homes)
        self._disk = disk

    def reserve(self, folder: Path, parts: Sequence[Part]) -> None:
        """Make room for a shard's files and note that they come; its lock must be held.

        Args:
            folder: Where they will lie.
            parts: The files, none of which lies there: a record makes a file ours.

        Raises:
            DataError: If other processes keep the limit's lock for themselves.
            OSError: If the folder cannot be written.
        """
        lock = self._homes[0].folder / NOTES_FOLDER / LIMIT_LOCK
        self._disk.make_folder(lock.parent)
        try:
            with self._disk.lock(lock, LIMIT_TIMEOUT_S):
                self._make_room(folder, parts)
                for part in parts:
                    Records(folder, self._disk).reserve(part.basename)
        except LockBusyError as error:
            raise DataError(
                f"{lock}: another process has held this lock for {LIMIT_TIMEOUT_S:.0f} s; "
                "see whether it hangs"
            ) from error

    def _make_room(self, folder: Path, parts: Sequence[Part]) -> None:
        # A file that comes may have a record from before: it is counted once.
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
        # What is left is under way in other processes, each one shard: they are not waited for.

    def _entries(self) -> Iterator[_Entry]:
        for home in self._homes:
            records = Records(home.folder, self._disk)
            table = home.table(records)
            for name in self._disk.names(home.folder / NOTES_FOLDER):
                if name in table:
                    part, guarded_by = table[name]
                    yield _Entry(home=home, records=records, part=part, guarded_by=guarded_by)

    def _last_planned_ns(self, entry: _Entry) -> int:
        state = self._disk.state(entry.records.path(entry.part.basename))
        return 0 if state is None else state.mtime_ns

    def _evict(self, entry: _Entry) -> bool:
        """Remove a file if nobody brings it just now and it is ours; return whether it is gone."""
        folder, basename = entry.home.folder, entry.part.basename
        with FileLocks(folder, self._disk).try_hold(entry.guarded_by) as is_held:
            if not is_held:
                return False
            record = entry.records.read(basename)
            state = self._disk.state(folder / basename)
            if state is not None and (record is None or not record.is_of(state)):
                # Somebody else put this one there; if whoever was to bring it was killed, it stays
                # without a record, and takes none of the room.
                if record is None or not record.is_promise:
                    return False
            else:
                # In this order: a file without a record would never be removed.
                self._disk.remove(folder / basename)
            entry.records.remove(basename)
            return True
