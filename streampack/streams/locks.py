"""One lock per file that is being brought, notes of failures, and what dead processes left.

In the stream's folder, for its file `a/shard.mds`::

    .streampack/a_shard.mds.lock           held while the file is brought; freed by the kernel
    .streampack/a_shard.mds.<hex>.tmp      half a file, or a folder of them
    .streampack/a_shard.mds.failed         why the last holder gave up, and when
    .streampack/a_shard.mds.json           that we brought it (records.py)

Of several processes that wait for one file, each would try in turn what has just failed for
the first; so the first leaves a note, and all that waited since before then raise the same.

Cost: three system calls per lock; a sweep lists one folder.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from streampack.errors import DataError
from streampack.streams.disk import Disk, LockBusyError

__all__ = ["NOTES_FOLDER", "FileLocks", "note_name"]

NOTES_FOLDER = ".streampack"
"""Where locks, notes and temporary files lie, in the folder of the files that they are about."""

LEFTOVER = re.compile(r"(?P<name>.+)(\.[0-9a-f]{32}\.tmp.*|\.failed)", re.DOTALL)


def note_name(basename: str) -> str:
    """Return what a file's lock, notes and temporary names begin with.

    >>> note_name("00001/shard.00000.mds")
    '00001_shard.00000.mds'
    """
    return basename.replace("/", "_")


class FileLocks:
    """The locks of the files in one folder; safe to pickle.

    Args:
        folder: The folder.
        disk: What it lies on.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder / NOTES_FOLDER
        self._disk = disk

    def temporary(self, basename: str) -> Path:
        """Return a new temporary path for a file; its lock must be held to use it."""
        return self._folder / f"{note_name(basename)}.{uuid.uuid4().hex}.tmp"

    @contextmanager
    def hold(self, basename: str, timeout_s: float) -> Iterator[None]:
        """Hold a file's lock while it is brought; a failure is noted for those who wait.

        Args:
            basename: The file.
            timeout_s: How long one holder may take.

        Raises:
            DataError: If the lock cannot be had, or whoever held it meanwhile failed.
            OSError: If the folder cannot be written.
        """
        disk = self._disk
        since_s = disk.now_s()
        note = self._folder / f"{note_name(basename)}.failed"
        with self._lock(basename, timeout_s):
            self._raise_failure(note, since_s)
            try:
                yield
            except DataError as error:
                with suppress(OSError):  # without a note the others try for themselves
                    disk.write(note, [_failure_text(error, disk.now_s())])
                raise
            disk.remove(note)

    @contextmanager
    def try_hold(self, basename: str) -> Iterator[bool]:
        """Hold a file's lock if nobody else does; say whether it is held."""
        path = self._folder / f"{note_name(basename)}.lock"
        with ExitStack() as stack:
            try:
                stack.enter_context(self._disk.lock(path, 0))
                is_held = True
            except LockBusyError:
                is_held = False
            yield is_held

    @contextmanager
    def _lock(self, basename: str, timeout_s: float) -> Iterator[None]:
        disk = self._disk
        path = self._folder / f"{note_name(basename)}.lock"
        disk.make_folder(self._folder)
        with ExitStack() as stack:
            self._wait(stack, path, timeout_s)
            disk.touch(path, disk.now_s())
            yield

    def _wait(self, stack: ExitStack, path: Path, timeout_s: float) -> None:
        """Take a lock; each holder before us may have it for `timeout_s`."""
        disk = self._disk
        deadline_s = disk.now_s() + timeout_s
        while True:
            try:
                stack.enter_context(disk.lock(path, deadline_s - disk.now_s()))
                return
            except LockBusyError as error:
                # A holder says when it began: it may have been only just now.
                state = disk.state(path)
                next_s = timeout_s + (state.mtime_ns / 1e9 if state else 0)
                if next_s <= max(deadline_s, disk.now_s()):
                    raise DataError(
                        f"{path}: another process has held this lock for {timeout_s:.0f} s; see "
                        "whether it hangs, or raise download_timeout= if its downloads are only "
                        "slow"
                    ) from error
                deadline_s = next_s

    def _raise_failure(self, note: Path, since_s: float) -> None:
        state = self._disk.state(note)
        if state is None:
            return
        try:
            with self._disk.open(note) as file:
                failure = json.loads(file.read())
            if not float(failure["time_s"]) >= since_s:
                return
            text, known = str(failure["message"]), failure["known"]
            error = DataError(text, **{name: known.get(name) for name in ATTRIBUTES})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return  # half a note is no note
        raise error

    def remove_remains(self, basename: str) -> None:
        """Remove a file's temporary ones; its lock is held, so nobody needs them."""
        name = note_name(basename)
        for found in self._disk.names(self._folder):
            # Most names in the folder are other files': matching each would cost more than listing.
            if not found.startswith(name) or found.endswith(".failed"):
                continue
            match = LEFTOVER.fullmatch(found)
            if match and match["name"] == name:
                self._disk.remove(self._folder / found)

    def sweep(self) -> None:
        """Remove what dead processes left: all whose lock can be had without waiting."""
        by_name: dict[str, list[str]] = {}
        for found in self._disk.names(self._folder):
            if match := LEFTOVER.fullmatch(found):
                by_name.setdefault(match["name"], []).append(found)
        for name, leftovers in by_name.items():
            with suppress(OSError), self.try_hold(name) as is_held:
                for leftover in leftovers if is_held else ():
                    self._disk.remove(self._folder / leftover)


ATTRIBUTES = ("uri", "shard", "attempts", "elapsed_s")


def _failure_text(error: DataError, time_s: float) -> bytes:
    known = {name: getattr(error, name, None) for name in ATTRIBUTES}
    return json.dumps({"message": str(error), "time_s": time_s, "known": known}).encode()
