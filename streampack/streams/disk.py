"""The one seam to the local disk: all that the shard cache does to files goes through a `Disk`.

::

    cache, locks, records, eviction  --->  Disk  --->  the file system
                                            '--> in tests: one that fails, dies or lies in memory

On a network file system shards are read into memory instead of being mapped: another node may
replace a file there, and a map of it would then end the process with SIGBUS.

Cost: a system call or two per method; the table of mounts is read once per folder.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import TypeAlias

import numpy as np
from filelock import FileLock, Timeout

from streampack.streams.mds import ByteArray

__all__ = ["WRITE_BYTES", "Disk", "FileState", "LockBusyError", "Piece"]

Piece: TypeAlias = bytes | memoryview
"""Some bytes of a file; a memoryview may be filled anew once the next piece is asked for."""

# A huge page: where the file system can (ext4, xfs), Linux keeps what is written at once as one
# piece of memory and maps it with one entry. On ext4 in a virtual machine that wrote 5 GB/s, 64 KiB
# at once 2.4 to 3, 1 MiB 1 to 4.9; and reading what is mapped takes a tenth of the page faults.
WRITE_BYTES = 2**21

NETWORK_FAMILIES = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs2", "glusterfs", "gpfs", "lustre"),
    *("ncpfs", "nfs", "ocfs2", "orangefs", "panfs", "pvfs2", "smb", "wekafs"),
)
LOCAL_FUSE = ("fuseblk", "fuse.fuse-overlayfs", "fuse.portal", "fusectl")
MOUNTS = Path("/proc/self/mountinfo")
OCTAL = re.compile(r"\\([0-7]{3})")  # how spaces in the names of mount points are written
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LockBusyError(Exception):
    """Another process or thread holds the lock."""


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells one version of a file from another."""

    num_bytes: int
    """Its size."""
    mtime_ns: int
    """When it was last written."""
    inode: int
    """Which file it is."""


class Disk:
    """The local disk, as the shard cache uses it; without state, and safe to pickle."""

    def state(self, path: Path) -> FileState | None:
        """Return a file's size, time and number; None if there is no such file."""
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return FileState(found.st_size, found.st_mtime_ns, found.st_ino)

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder; none if there is no such folder."""
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def open(self, path: Path) -> BufferedReader:
        """Open a file for reading."""
        return path.open("rb")

    def map(self, path: Path) -> ByteArray:
        """Return a file's bytes, mapped where that is safe; shape (num_bytes,)."""
        if self.is_network(path.parent):
            return np.fromfile(path, np.uint8)
        return np.asarray(np.memmap(path, np.uint8, "r"))

    def write(self, path: Path, pieces: Iterable[Piece]) -> None:
        """Write a new file, in an existing folder; what was written stays if a piece fails."""
        with path.open("wb") as file:
            for piece in pieces:
                view = memoryview(piece)
                for begin in range(0, len(view), WRITE_BYTES):
                    file.write(view[begin : begin + WRITE_BYTES])

    def rename(self, source: Path, target: Path) -> None:
        """Give a file its final name at once; the target's folder is made if need be."""
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with all that is in it, if it is there."""
        try:
            path.unlink(missing_ok=True)
        except (IsADirectoryError, PermissionError):
            if not path.is_dir():
                raise
            shutil.rmtree(path, ignore_errors=True)

    def touch(self, path: Path, time_s: float) -> None:
        """Set a file's time, in seconds since 1970; nothing if there is no such file."""
        try:
            os.utime(path, (time_s, time_s))
        except FileNotFoundError:
            return

    def make_folder(self, folder: Path, *, is_private: bool = False) -> None:
        """Make a folder and those above it, if need be.

        Args:
            folder: The folder.
            is_private: Whether it must be this user's own, closed to others.

        Raises:
            PermissionError: If a private one belongs to another user.
        """
        folder.mkdir(mode=0o700 if is_private else 0o777, parents=True, exist_ok=True)
        if is_private and os.lstat(folder).st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")

    @contextmanager
    def lock(self, path: Path, timeout_s: float) -> Iterator[None]:
        """Hold a lock file's kernel lock, which a process that dies gives back.

        Raises:
            LockBusyError: If it cannot be had within `timeout_s`.
        """
        lock = FileLock(path, timeout=max(0.0, timeout_s))
        try:
            lock.acquire()
        except Timeout as error:
            raise LockBusyError(str(path)) from error
        try:
            yield
        finally:
            lock.release()

    def is_network(self, folder: Path) -> bool:
        """Return whether a folder lies on a file system that other machines may write to."""
        try:
            device = os.stat(folder).st_dev
        except OSError:
            return _is_network(_kind_of(str(folder)))
        return _is_network(_kind_of_device(device, str(folder)))

    def now_s(self) -> float:
        """Return the time that files get, in seconds since 1970."""
        return time.time()

    def boot_id(self) -> str:
        """Return what changes when this machine starts anew: what was written may be lost then."""
        try:
            return BOOT_ID.read_text().strip()
        except OSError:
            return ""


def _is_network(kind: str) -> bool:
    return kind.startswith(NETWORK_FAMILIES) and kind not in LOCAL_FUSE


@lru_cache(256)
def _kind_of_device(device: int, folder: str) -> str:  # noqa: ARG001 - another device, another kind
    return _kind_of(folder)


def _kind_of(folder: str) -> str:
    """Return the kind of file system that a folder, there or not yet, lies on; "" if unknown."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    path = os.path.realpath(folder)
    best, kind = "", ""
    for line in lines:
        fields, _, source = line.partition(" - ")
        point = OCTAL.sub(lambda found: chr(int(found[1], 8)), fields.split()[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts on one place the later one is seen.
        if inside and len(point) >= len(best):
            best, kind = point, source.split()[0]
    return kind
