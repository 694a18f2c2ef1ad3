"""A disk in memory that knows which actor uses it, can fail or kill at every use, and has no clock.

::

    disk.actor = "rank 1"          the current actor, which owns the locks it takes
    disk.on_use(kind, path)        called before every use; if it raises, nothing was done, and if
                                   it returns true, `open` and `map` give half of the file
    with disk.lock(path, 60)       another actor has it --> Waits: retry once it is free
                                   this actor has it    --> a real deadlock: AssertionError

An actor stopped halfway (`Waits`, `Killed`) has no further effect: none of its handlers or
`finally` blocks reach the disk, and its locks stay taken. A waiting actor gets them back when it is
restarted; `release` drops those of a dead one, as a kernel would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np

from streampack.storage.filesystem import FileState, LocalFilesystem, LockBusyError
from streampack.types import ByteArray


class Stopped(BaseException):
    """Stops the current actor here, without any of its clean-up."""


class Killed(Stopped):
    """The actor was killed."""


class Waits(Stopped):
    """The actor must be restarted as soon as `is_ready()` is true."""

    def __init__(self, why: str, is_ready: Callable[[], bool]) -> None:
        super().__init__(why)
        self.why = why
        self.is_ready = is_ready


@dataclass(slots=True)
class _File:
    content: bytes
    mtime_ns: int
    inode: int


@dataclass(slots=True, eq=False)
class _Lock:
    """The kernel lock of a lock file; removing the file does not take it from its owner."""

    owner: str
    is_kept: bool = False  # its owner was stopped and takes it up when restarted


class MemoryDisk(LocalFilesystem):
    def __init__(self, on_use: Callable[[str, Path], bool] | None = None) -> None:
        self.on_use = on_use or (lambda *_: False)
        self.actor = "none"
        self.now = 1.0
        self._folders: dict[str, dict[str, _File]] = {}
        self._locks: dict[str, _Lock] = {}
        self._stop: Stopped | None = None
        self._num_uses = 0

    # For tests.

    def begin(self, actor: str) -> None:
        self.actor = actor
        self._stop = None

    def stop(self, stop: Stopped) -> Stopped:
        """Return the exception to raise; until `begin`, every further use raises it too."""
        self._stop = stop
        return stop

    def release(self, actors: Iterable[str]) -> None:
        dead = set(actors)
        self._locks = {path: lock for path, lock in self._locks.items() if lock.owner not in dead}

    def held_by(self, actor: str) -> list[str]:
        return [path for path, lock in self._locks.items() if lock.owner == actor]

    def files_in(self, folder: Path) -> dict[str, bytes]:
        """Return all files below a folder, by their path in it."""
        root = f"{folder}/"
        return {
            f"{name}/{file}"[len(root) :]: found.content
            for name, files in self._folders.items()
            if f"{name}/".startswith(root)
            for file, found in files.items()
        }

    def lose(self, folder: Path) -> None:
        """Remove a folder and its contents; its lock files then only exist for their owners."""
        root = f"{folder}/"
        for name in [name for name in self._folders if f"{name}/".startswith(root)]:
            del self._folders[name]
        self._locks = {p: lock for p, lock in self._locks.items() if not p.startswith(root)}

    # For the shard cache.

    def state(self, path: Path) -> FileState | None:
        self._use("state", path)
        file = self._find(path)
        return None if file is None else FileState(len(file.content), file.mtime_ns, file.inode)

    def names(self, folder: Path) -> list[str]:
        self._use("names", folder)
        return list(self._folders.get(str(folder), ()))

    def open(self, path: Path) -> BinaryIO:
        return BytesIO(self._read("open", path))

    def map(self, path: Path) -> ByteArray:
        return np.frombuffer(self._read("map", path), np.uint8)

    def write(self, path: Path, pieces: Iterable[bytes]) -> None:
        self._use("create", path)
        files = self._folders.get(str(path.parent))
        if files is None:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        file = files[path.name] = _File(b"", self._time_ns(), self._num_uses)
        content = b""
        try:
            for piece in pieces:
                content += piece
        except Exception:
            file.content = content
            raise
        file.content = content[: len(content) // 2]
        self._use("write", path)
        file.content = content
        file.mtime_ns = self._time_ns()

    def rename(self, source: Path, target: Path) -> None:
        self._use("rename", source)
        self._add_folders(target.parent)
        file = self._existing(source)
        del self._folders[str(source.parent)][source.name]
        self._folders[str(target.parent)][target.name] = file

    def remove(self, path: Path) -> None:
        self._use("remove", path)
        self._folders.get(str(path.parent), {}).pop(path.name, None)

    def touch(self, path: Path, time_s: float) -> None:
        self._use("touch", path)
        file = self._find(path)
        if file is not None:
            file.mtime_ns = int(time_s * 1e9)

    def make_folder(self, folder: Path, *, is_private: bool = False) -> None:  # noqa: ARG002
        self._use("make_folder", folder)
        self._add_folders(folder)

    @contextmanager
    def lock(self, path: Path, timeout_s: float) -> Iterator[None]:
        self._use("lock", path)
        key, actor = str(path), self.actor
        lock = self._locks.get(key)
        is_ours_again = lock is not None and lock.owner == actor and lock.is_kept
        if lock is not None and timeout_s <= 0 and not is_ours_again:
            raise LockBusyError(key)
        if lock is not None and lock.owner != actor:
            raise self.stop(Waits(f"for the lock {key}", lambda: self._is_free(key, actor)))
        if lock is None:
            self._add_folders(path.parent)
            files = self._folders[str(path.parent)]
            files.setdefault(path.name, _File(b"", self._time_ns(), self._num_uses))
            lock = self._locks[key] = _Lock(actor)
        elif not lock.is_kept:
            raise AssertionError(f"{actor} waits forever for {key}, its own lock")
        lock.is_kept = False
        try:
            yield
        except Stopped:
            lock.is_kept = True
            raise
        except BaseException:
            self._release(key, lock)
            raise
        self._release(key, lock)

    def is_network(self, folder: Path) -> bool:  # noqa: ARG002
        return False

    def now_s(self) -> float:
        return self.now

    # Internals.

    def _read(self, kind: str, path: Path) -> bytes:
        is_short = self._use(kind, path)
        content = self._existing(path).content
        return content[: len(content) // 2] if is_short else content

    def _use(self, kind: str, path: Path) -> bool:
        if self._stop is not None:
            raise self._stop
        self._num_uses += 1
        return self.on_use(kind, path)

    def _time_ns(self) -> int:
        return int(self.now * 1e9) + self._num_uses  # no two versions of a file have the same

    def _find(self, path: Path) -> _File | None:
        return self._folders.get(str(path.parent), {}).get(path.name)

    def _existing(self, path: Path) -> _File:
        file = self._find(path)
        if file is None:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return file

    def _add_folders(self, folder: Path) -> None:
        while str(folder) not in self._folders:
            self._folders[str(folder)] = {}
            folder = folder.parent

    def _is_free(self, key: str, actor: str) -> bool:
        lock = self._locks.get(key)
        return lock is None or lock.owner == actor

    def _release(self, key: str, lock: _Lock) -> None:
        if self._locks.get(key) is lock:
            del self._locks[key]
