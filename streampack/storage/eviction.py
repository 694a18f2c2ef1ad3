"""The node's cache limit and its eviction order.

::

    shards of any version in the cache folders + incoming files > limit
        --> first those marked finished, then those that others may be made of, used longest ago
            first, then those planned longest ago
            |<- note's time 0 ->|<- half of the time ->|<----- oldest ... latest ----->|

All files in a cache folder are streampack's own. None is evicted while its lock is held. One lock
guards the limit for all streams of a dataset. A file in transit counts in full, and a compressed
one counts in addition to its raw one. A process can keep reading a file that it has mapped; the
disk space is freed when the last mapping is closed.

Cost: two listings of each folder per fetched file; one `stat` for each file seen first, and two
`stat` and four system calls per evicted file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from streampack.errors import DataError
from streampack.storage.filesystem import LocalFilesystem, LockBusyError
from streampack.storage.locks import NOTES_FOLDER, CacheEntry, FileLocks
from streampack.storage.names import PACKED, SHARD

LIMIT_LOCK = ".cache-limit.lock"
LIMIT_TIMEOUT_S = 60.0


class CacheLimit:
    """Limit on the bytes of the shards in these cache folders, at least one; safe to pickle."""

    def __init__(self, num_bytes: int, folders: Sequence[Path], disk: LocalFilesystem) -> None:
        self.num_bytes = num_bytes
        self._folders = folders
        self._disk = disk
        self._sizes: dict[tuple[Path, str], int] = {}  # a name identifies its bytes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sizes": {}}

    def reserve(self, folder: Path, incoming: Mapping[str, int]) -> None:
        """Make room for a shard's files, given as names and bytes, and reserve it.

        None of the files may exist yet, and the shard's lock must be held.
        """
        lock = self._folders[0] / NOTES_FOLDER / LIMIT_LOCK
        self._disk.make_folder(lock.parent)
        try:
            with self._disk.lock(lock, LIMIT_TIMEOUT_S):
                self._make_room(folder, incoming)
                for name, num_bytes in incoming.items():
                    FileLocks(folder, self._disk).write_entry(name, CacheEntry(num_bytes=num_bytes))
        except LockBusyError as error:
            raise DataError(
                f"{lock}: another process has held this lock for {LIMIT_TIMEOUT_S:.0f} s; "
                "check whether it hangs"
            ) from error

    def _make_room(self, folder: Path, incoming: Mapping[str, int]) -> None:
        cached = {
            (each, name): self._num_bytes(each, name)
            for each in self._folders
            for name in self._shards_in(each)
            if each != folder or name not in incoming
        }
        excess = sum(incoming.values()) + sum(cached.values()) - self.num_bytes
        if excess <= 0:
            return
        for oldest in sorted(cached, key=lambda key: self._last_planned_ns(*key)):
            if self._evict(*oldest):
                excess -= cached[oldest]
            if excess <= 0:
                return
        # The remainder is in transit in other processes, one shard each; do not wait for them.

    def _shards_in(self, folder: Path) -> Iterator[str]:
        """Yield the shards in a cache folder, and those being fetched to it, which have notes."""
        notes = self._disk.names(folder / NOTES_FOLDER)
        names = {name.removesuffix(".json") for name in notes if name.endswith(".json")}
        return filter(SHARD.fullmatch, names.union(self._disk.names(folder)))

    def _evict(self, folder: Path, name: str) -> bool:
        """Remove a shard unless a process is fetching it; return whether it did."""
        locks = FileLocks(folder, self._disk)
        with locks.try_hold(name.removesuffix(PACKED)) as is_held:
            if is_held:
                self._disk.remove(folder / name)
                locks.remove_entry(name)
            return is_held

    def _num_bytes(self, folder: Path, name: str) -> int:
        if (folder, name) not in self._sizes:
            state = self._disk.state(folder / name)
            if state is None:
                entry = FileLocks(folder, self._disk).read_entry(name)
                return 0 if entry is None else entry.num_bytes  # 0: removed since it was listed
            self._sizes[folder, name] = state.num_bytes
        return self._sizes[folder, name]

    def _last_planned_ns(self, folder: Path, name: str) -> int:
        state = self._disk.state(FileLocks(folder, self._disk).entry_path(name))
        return 0 if state is None else state.mtime_ns
