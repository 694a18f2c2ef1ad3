"""The local file system: the shard cache does all its disk access through `LocalFilesystem`.

::

    cache, locks and notes, eviction  --->  LocalFilesystem  --->  the operating system
                                             '--> in tests: one that fails, dies or is in memory

On a network file system shards are read into memory instead of being mapped: another node may
replace a file there, and reading its mapping would then kill the process with SIGBUS.

A mapping has no file descriptor. ``mmap.mmap`` and ``numpy.memmap`` duplicate theirs, and a
stream of many small shards would exceed the descriptor limit of the process.

Cost: one or two system calls per method. The mount table is read once per folder, about 0.1 ms.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import stat
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from filelock import FileLock, Timeout

from streampack._paths import real_path
from streampack.mds.regular_files import check_file
from streampack.types import ByteArray

Piece: TypeAlias = bytes | memoryview
"""Some bytes of a file; a memoryview is reused once the next piece is requested."""

# A huge page: on some file systems (ext4, xfs) Linux keeps one write as one piece of memory and
# maps it with one entry. On ext4 in a virtual machine this size wrote 5 GB/s; 64 KiB wrote 2.4 to
# 3, and 1 MiB 1 to 4.9. Reading the mapping then takes a tenth of the page faults.
WRITE_BYTES = 2**21

NETWORK_FAMILIES = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs2", "glusterfs", "gpfs", "lustre"),
    *("ncpfs", "nfs", "ocfs2", "orangefs", "panfs", "pvfs2", "smb", "wekafs"),
)
LOCAL_FUSE = ("fuseblk", "fuse.fuse-overlayfs", "fuse.portal", "fusectl")
MOUNTS = Path("/proc/self/mountinfo")
OCTAL = re.compile(r"\\([0-7]{3})")  # the escapes of spaces in mount point names


class LockBusyError(Exception):
    """Another process or thread has the lock."""


class FileState(NamedTuple):
    """Identifies one version of a file."""

    num_bytes: int
    mtime_ns: int
    inode: int
    """Inode number of the file; 0 on a network file system."""


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong)
_MAP_FAILED = ctypes.c_void_p(-1).value


# munmap as the callback of a weak reference, which is its last argument: C ignores it.
_unmap = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.py_object)(
    ("munmap", _libc)
)
_NOT_MAPPED = 1  # no page begins there, so unmapping it does nothing; numpy refuses 0


class _Mapped:
    """A file's mapped pages, unmapped once no array refers to them.

    A signal handler may raise between any two instructions of Python, also in a `__del__`. So the
    address is kept, and the pages are unmapped, by C functions alone.
    """

    def __init__(self, path: Path) -> None:
        self._path = os.fspath(path)
        self._address = address = ctypes.c_void_p(_NOT_MAPPED)
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            state = os.fstat(number)
            self._size, self._file = state.st_size, (state.st_dev, state.st_ino)
            self._end = weakref.ref(self, partial(_unmap, address, self._size))
            if self._size:
                keep = partial(setattr, address, "value")
                options = (None, self._size, mmap.PROT_READ, mmap.MAP_SHARED, number, 0)
                list(map(keep, map(_libc.mmap, *zip(options))))
            if address.value == _MAP_FAILED:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), self._path)
        finally:
            os.close(number)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = (self._address.value, True)
        return {"version": 3, "shape": (self._size,), "typestr": "|u1", "data": data}

    def is_cut(self) -> bool:
        try:
            state = os.stat(self._path)
        except OSError:
            return False  # removed or replaced: its pages remain valid
        return state.st_size < self._size and (state.st_dev, state.st_ino) == self._file


def map_file(path: Path) -> ByteArray:
    """Map a file read-only, without keeping a file descriptor; shape (num_bytes,)."""
    return np.asarray(_Mapped(path))


def is_cut(data: ByteArray) -> bool:
    """Return whether a mapped file was truncated, so that reading it would raise SIGBUS.

    Bytes that were read instead of mapped are never cut.
    """
    base = data.base.base if isinstance(data.base, np.ndarray) else data.base  # of a slice
    return isinstance(base, _Mapped) and base.is_cut()


class LocalFilesystem:
    """The local disk as seen by the shard cache; stateless and safe to pickle."""

    def state(self, path: Path) -> FileState | None:
        """Return a file's size, time and inode; None if it does not exist."""
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        # Some network file systems assign new inodes at each mount, or even sooner.
        is_network = _is_network(status.st_dev, os.path.dirname(path))
        return FileState(status.st_size, status.st_mtime_ns, 0 if is_network else status.st_ino)

    def names(self, folder: Path) -> list[str]:
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def open(self, path: Path) -> BufferedReader:
        """Open a file for reading; a DataError if it is a folder, a pipe or a device."""
        if not path.is_file() and path.exists():
            check_file(path)
        return path.open("rb")

    def read(self, path: Path) -> bytes | None:
        try:
            with self.open(path) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def map(self, path: Path) -> ByteArray:
        """Return a file's bytes, mapped where that is safe; shape (num_bytes,)."""
        if self.is_network(path.parent):
            return np.frombuffer(path.read_bytes(), np.uint8)  # fromfile: a second descriptor
        return map_file(path)

    def write(self, path: Path, pieces: Iterable[Piece]) -> None:
        """Write a new file in an existing folder; a failing piece leaves a partial file."""
        with path.open("wb") as file:
            for piece in pieces:
                view = memoryview(piece)
                for begin in range(0, len(view), WRITE_BYTES):
                    file.write(view[begin : begin + WRITE_BYTES])

    def rename(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder and its contents, if it exists."""
        try:
            path.unlink(missing_ok=True)
        except (IsADirectoryError, PermissionError):
            if not path.is_dir():
                raise
            shutil.rmtree(path, ignore_errors=True)

    def touch(self, path: Path, time_s: float) -> None:
        """Set a file's time, in seconds since 1970, if it exists."""
        with suppress(FileNotFoundError):
            os.utime(path, (time_s, time_s))

    def make_folder(self, folder: Path, *, is_private: bool = False) -> None:
        """Create a folder and its parents, if necessary; a private one is closed to other users.

        A PermissionError says that a private folder belongs to another user, or is a link.
        """
        folder.mkdir(mode=0o700 if is_private else 0o777, parents=True, exist_ok=True)
        if is_private:
            if not is_own_folder(folder):
                raise PermissionError(f"{folder} belongs to another user, or is a link")
            if os.lstat(folder).st_mode & 0o077:
                folder.chmod(0o700)

    @contextmanager
    def lock(self, path: Path, timeout_s: float) -> Iterator[None]:
        """Hold the kernel lock of a lock file; it is released if the process dies.

        A LockBusyError says that it cannot be acquired within `timeout_s`.
        """
        lock = FileLock(path, timeout=max(0.0, timeout_s))
        try:
            lock.acquire()
        except Timeout as error:
            raise LockBusyError(f"{path} is locked") from error
        try:
            yield
        finally:
            lock.release()

    def is_network(self, folder: Path) -> bool:
        """Return whether a folder is on a file system that other machines may write to."""
        device = None
        with suppress(OSError):
            device = os.stat(folder).st_dev
        return _is_network(device, str(folder))

    def now_s(self) -> float:
        """Return the clock used for file times, in seconds since 1970."""
        return time.time()


def is_own_folder(path: Path) -> bool:
    """Return whether a path is a folder of this user or does not exist; False for a link."""
    with suppress(FileNotFoundError):
        status = os.lstat(path)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return True


@lru_cache(4096)
def _is_network(device: int | None, folder: str) -> bool:  # noqa: ARG001 - it may be remounted
    kind = _kind_of(folder)
    return kind.startswith(NETWORK_FAMILIES) and kind not in LOCAL_FUSE


def _kind_of(folder: str) -> str:
    """Return the file system type of a folder, which need not exist; "" if unknown."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    path = real_path(folder)
    best, kind = "", ""
    for line in lines:
        fields, _, source = line.partition(" - ")
        point = OCTAL.sub(lambda match: chr(int(match[1], 8)), fields.split()[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # If two mounts share a mount point, the later one is visible.
        if inside and len(point) >= len(best):
            best, kind = point, source.split()[0]
    return kind
