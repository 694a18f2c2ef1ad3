"""The node's cache limit and its eviction order.

::

    shards of any version in the cache folders + incoming files > limit
        --> first those marked finished, then those planned longest ago
            |<- note's time 0 ->|<----------- oldest ... latest ---------------->|

All files in a cache folder are streampack's own. None is evicted while its lock is held. One lock
guards the limit for all streams of a dataset. A shard in transit counts in full, with its
compressed form if it has one. A process can keep reading a file that it has mapped; the disk space
is freed when the last mapping is closed.

Cost: two listings of each folder per fetched file; one `stat` for each file seen first, and two
`stat` and four system calls per evicted file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streampack.errors import DataError
from streampack.storage.filesystem import LocalFilesystem, LockBusyError
from streampack.storage.locks import NOTES_FOLDER, CacheEntry, FileLocks
from streampack.storage.names import SHARD

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

    def reserve(self, folder: Path, incoming: str, num_bytes: int) -> None:
        """Make room for a shard while it is fetched, and reserve it.

        The shard may not exist yet, and its lock must be held.
        """
        lock = self._folders[0] / NOTES_FOLDER / LIMIT_LOCK
        self._disk.make_folder(lock.parent)
        try:
            with self._disk.lock(lock, LIMIT_TIMEOUT_S):
                self._make_room(folder, incoming, num_bytes)
                locks = FileLocks(folder, self._disk)
                locks.write_entry(incoming, CacheEntry(num_bytes=num_bytes))
        except LockBusyError as error:
            raise DataError(
                f"{lock}: another process has held this lock for {LIMIT_TIMEOUT_S:.0f} s; "
                "check whether it hangs"
            ) from error

    def _make_room(self, folder: Path, incoming: str, num_bytes: int) -> None:
        cached = self._cached()
        cached.pop((folder, incoming), None)
        excess = num_bytes + sum(cached.values()) - self.num_bytes
        if excess <= 0:
            return
        for oldest in sorted(cached, key=lambda key: self._last_planned_ns(*key)):
            if self._evict(*oldest):
                excess -= cached[oldest]
            if excess <= 0:
                return
        # The remainder is in transit in other processes, one shard each; do not wait for them.

    def _cached(self) -> dict[tuple[Path, str], int]:
        """Return the bytes of the shards in all folders, and of those being fetched to them."""
        cached = {}
        for folder in self._folders:
            here = {*self._disk.names(folder)}
            noted = {
                name[:-5]
                for name in self._disk.names(folder / NOTES_FOLDER)
                if name.endswith(".json")
            }
            for name in filter(SHARD.fullmatch, here | noted):
                cached[folder, name] = self._num_bytes(folder, name, is_here=name in here)
        return cached

    def _num_bytes(self, folder: Path, name: str, *, is_here: bool) -> int:
        if not is_here:
            entry = FileLocks(folder, self._disk).read_entry(name)
            return 0 if entry is None else entry.num_bytes
        if (folder, name) not in self._sizes:
            if (state := self._disk.state(folder / name)) is None:
                return 0  # removed since it was listed
            self._sizes[folder, name] = state.num_bytes
        return self._sizes[folder, name]

    def _evict(self, folder: Path, name: str) -> bool:
        """Remove a shard unless a process is fetching it; return whether it did."""
        locks = FileLocks(folder, self._disk)
        with locks.try_hold(name) as is_held:
            if is_held:
                self._disk.remove(folder / name)
                locks.remove_entry(name)
            return is_held

    def _last_planned_ns(self, folder: Path, name: str) -> int:
        state = self._disk.state(FileLocks(folder, self._disk).entry_path(name))
        return 0 if state is None else state.mtime_ns
