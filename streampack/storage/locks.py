"""One lock per file being fetched, failure notes, and the leftovers of dead processes.

In the stream's folder, for its file `a/shard.mds`::

    .streampack/a_shard.mds.lock           held while the file is fetched; freed by the kernel
    .streampack/a_shard.mds.<hex>.tmp      a partial file, or a folder of them
    .streampack/a_shard.mds.failed         why the last holder gave up
    .streampack/a_shard.mds.json           marks the file as ours (manifest.py)

When a download fails, the lock holder writes a failure note. A process that was already waiting
finds that the note has changed since it began to wait. It raises the same error instead of
retrying. Times are not compared, because machines that share a folder may have different clocks.

Cost: five system calls per lock; a sweep lists one folder.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from streampack.errors import DataError
from streampack.storage.filesystem import LocalFilesystem, LockBusyError

NOTES_FOLDER = ".streampack"
"""Subfolder for the locks, notes and temporary files of a folder's files."""

LEFTOVER = re.compile(r"(?P<name>.+)(\.[0-9a-f]{32}\.tmp.*|\.failed)", re.DOTALL)


def note_name(basename: str) -> str:
    """Return the prefix of the names of a file's lock, notes and temporary files.

    >>> note_name("00001/shard.00000.mds")
    '00001_shard.00000.mds'
    """
    return basename.replace("/", "_")


class FileLocks:
    """The locks of the files in one folder; safe to pickle.

    Args:
        folder: The folder.
        disk: Its filesystem.
    """

    def __init__(self, folder: Path, disk: LocalFilesystem) -> None:
        self._folder = folder / NOTES_FOLDER
        self._disk = disk

    def temporary(self, basename: str) -> Path:
        """Return a new temporary path for a file; its lock must be held to use it."""
        return self._folder / f"{note_name(basename)}.{uuid.uuid4().hex}.tmp"

    @contextmanager
    def hold(self, basename: str, timeout_s: float) -> Iterator[None]:
        """Hold a file's lock while it is fetched; write a failure note for waiting processes.

        Args:
            basename: The file.
            timeout_s: How long one holder may take.

        Raises:
            DataError: If the lock cannot be acquired, or a holder failed in the meantime.
            OSError: If the folder cannot be written.
        """
        disk = self._disk
        note = self._folder / f"{note_name(basename)}.failed"
        known = self._read(note)
        with self._lock(basename, timeout_s):
            text = self._read(note)
            if text is not None and text != known:
                _raise_failure(text)
            try:
                yield
            except DataError as error:
                with suppress(OSError):  # without a note the other processes try for themselves
                    disk.write(note, [_failure_text(error)])
                raise
            disk.remove(note)

    @contextmanager
    def try_hold(self, basename: str) -> Iterator[bool]:
        """Hold a file's lock if it is free; yield whether it is held."""
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
        """Acquire a lock; each earlier holder may keep it for `timeout_s`."""
        disk = self._disk
        begun = disk.state(path)
        while True:
            try:
                stack.enter_context(disk.lock(path, timeout_s))
                return
            except LockBusyError as error:
                # A holder sets the file's time when it starts, which may be very recent.
                state = disk.state(path)
                if state == begun:
                    raise DataError(
                        f"{path}: another process has held this lock for {timeout_s:.0f} s; see "
                        "whether it hangs, or raise download_timeout= if its downloads are only "
                        "slow"
                    ) from error
                begun = state

    def _read(self, note: Path) -> bytes | None:
        try:
            with self._disk.open(note) as file:
                return file.read()
        except OSError:
            return None  # usually because there is none

    def remove_remains(self, basename: str) -> None:
        """Remove a file's temporary files; they are unused, because its lock is held."""
        name = note_name(basename)
        for found in self._disk.names(self._folder):
            # Most names belong to other files: matching each of them would cost more than the
            # listing.
            if not found.startswith(name) or found.endswith(".failed"):
                continue
            match = LEFTOVER.fullmatch(found)
            if match and match["name"] == name:
                self._disk.remove(self._folder / found)

    def sweep(self) -> None:
        """Remove leftovers of dead processes: those whose lock is free."""
        by_name: dict[str, list[str]] = {}
        for found in self._disk.names(self._folder):
            if match := LEFTOVER.fullmatch(found):
                by_name.setdefault(match["name"], []).append(found)
        for name, leftovers in by_name.items():
            with suppress(OSError), self.try_hold(name) as is_held:
                for leftover in leftovers if is_held else ():
                    self._disk.remove(self._folder / leftover)


ATTRIBUTES = ("uri", "shard", "attempts", "elapsed_s")


def _failure_text(error: DataError) -> bytes:
    known = {name: getattr(error, name, None) for name in ATTRIBUTES}
    # The id makes a repeated failure a different note.
    note = {"message": str(error), "id": uuid.uuid4().hex, "known": known}
    return json.dumps(note).encode()


def _raise_failure(text: bytes) -> None:
    try:
        failure = json.loads(text)
        message, known = str(failure["message"]), failure["known"]
        error = DataError(message, **{name: known.get(name) for name in ATTRIBUTES})
    except (ValueError, KeyError, TypeError, AttributeError):
        return  # ignore a partial note
    raise error
