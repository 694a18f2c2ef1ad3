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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streampack.errors import DataError
from streampack.mds.index import Shard, ShardFile
from streampack.storage.filesystem import LocalFilesystem, LockBusyError
from streampack.storage.locks import NOTES_FOLDER, FileLocks
from streampack.storage.manifest import PENDING, Manifest

LIMIT_LOCK = ".cache-limit.lock"  # no stream's file name starts with a dot
LIMIT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _CachedFile:
    """A file that counts toward the limit."""

    folder: Path
    file: ShardFile
    lock: str  # basename of the file whose lock guards this one


class CacheLimit:
    """Limit on the bytes that cached files take on this node, over all streams of a dataset.

    `shards` holds those whose files may be in each folder; there is at least one folder.
    """

    def __init__(
        self, num_bytes: int, shards: Mapping[Path, Sequence[Shard]], disk: LocalFilesystem
    ) -> None:
        self.num_bytes = num_bytes
        self._shards = shards
        self._disk = disk
        # For each folder its possible files by the name of their manifest entries; built lazily.
        self._files: dict[Path, dict[str, _CachedFile]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def reserve(self, folder: Path, files: Sequence[ShardFile]) -> None:
        """Make room for a shard's files and reserve it; the shard's lock must be held.

        None of the files may exist yet: an entry marks a file as ours.
        """
        lock = next(iter(self._shards)) / NOTES_FOLDER / LIMIT_LOCK
        self._disk.make_folder(lock.parent)
        try:
            with self._disk.lock(lock, LIMIT_TIMEOUT_S):
                self._make_room(folder, files)
                for file in files:
                    Manifest(folder, self._disk).write(file.basename, PENDING)
        except LockBusyError as error:
            raise DataError(
                f"{lock}: another process has held this lock for {LIMIT_TIMEOUT_S:.0f} s; "
                "check whether it hangs"
            ) from error

    def _make_room(self, folder: Path, files: Sequence[ShardFile]) -> None:
        # An incoming file may have an old entry; count it once.
        incoming = {(folder, file.basename) for file in files}
        cached = [f for f in self._cached_files() if (f.folder, f.file.basename) not in incoming]
        num_bytes = sum(file.num_bytes for file in (*files, *(f.file for f in cached)))
        excess = num_bytes - self.num_bytes
        if excess <= 0:
            return
        for oldest in sorted(cached, key=self._last_planned_ns):
            if self._evict(oldest):
                excess -= oldest.file.num_bytes
            if excess <= 0:
                return
        # The remainder is in transit in other processes, one shard each; do not wait for them.

    def _cached_files(self) -> Iterator[_CachedFile]:
        if not self._files:
            self._files = {folder: self._possible_files(folder) for folder in self._shards}
        for folder, files in self._files.items():
            for name in self._disk.names(folder / NOTES_FOLDER):
                if name in files:
                    yield files[name]

    def _possible_files(self, folder: Path) -> dict[str, _CachedFile]:
        manifest = Manifest(folder, self._disk)
        return {
            manifest.path(file.basename).name: _CachedFile(
                folder=folder, file=file, lock=shard.raw.basename
            )
            for shard in self._shards[folder]
            for file in shard.files
        }

    def _last_planned_ns(self, cached: _CachedFile) -> int:
        state = self._disk.state(Manifest(cached.folder, self._disk).path(cached.file.basename))
        return 0 if state is None else state.mtime_ns

    def _evict(self, cached: _CachedFile) -> bool:
        """Remove a file if it is ours and no process is fetching it; return whether it is gone."""
        basename = cached.file.basename
        path = cached.folder / basename
        with FileLocks(cached.folder, self._disk).try_hold(cached.lock) as is_held:
            if not is_held:
                return False
            manifest = Manifest(cached.folder, self._disk)
            entry, state = manifest.read(basename), self._disk.state(path)
            if state is None or (entry is not None and entry.matches(state)):
                # In this order: a file without an entry would never be evicted.
                self._disk.remove(path)
            elif entry != PENDING:
                return False  # another program put this file here
            # If our fetch was killed, another program's file stays and does not count.
            manifest.remove(basename)
            return True
