"""Whether a file that lies here is what index.json says: its size always, a hash if there is one.

::

    stat --same as last time in this process--> whole
         --size of index.json--> record says so of this very version --> whole
                                 else hash it --> whole, remembered | damaged
                                 no hash: still the one in the remote folder?

Cost: one `stat`; at a file's first use in a process a record is read, and at its first use on a
node, or after a restart of the machine, the file. Where no hash tells, one `stat` in the remote
folder, if it is one of this machine's.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from streampack.errors import DataError
from streampack.streams.disk import Disk, FileState
from streampack.streams.files import StreamFiles
from streampack.streams.index import Part, Shard
from streampack.streams.records import Record, Records, file_digest, wanted_hash

__all__ = ["CheckedFiles", "naming", "typed_errors"]


@contextmanager
def naming(uri: str | Path, shard: str | None = None) -> Iterator[None]:
    """Give a DataError that names no file this one.

    Args:
        uri: Where the file is.
        shard: Its path under the stream's folder, if it is one of a shard.
    """
    try:
        yield
    except DataError as error:
        if error.uri is None:
            error.uri, error.shard = str(uri), error.shard or shard
        raise


@contextmanager
def typed_errors(path: Path, num_bytes: int = 0, *, is_tried_again: bool = True) -> Iterator[None]:
    """Make a DataError of what the system says of a file.

    Args:
        path: The file.
        num_bytes: What it needs if it is to be written; 0: little.
        is_tried_again: Whether the caller begins again where a file is missing, which may have
            been removed meanwhile: FileNotFoundError passes as it is.
    """
    try:
        yield
    except OSError as error:
        if is_tried_again and isinstance(error, FileNotFoundError):
            raise
        if num_bytes:
            text = (
                f"cannot be written ({error}); {num_bytes} bytes are needed: free them, or set "
                "local= to a folder that can be written"
            )
        else:
            text = (
                f"cannot be read or written ({error}); see what ails the disk, or the rights to "
                "the folder"
            )
        raise DataError(f"{path}: {text}", uri=str(path), shard=path.name) from error


class CheckedFiles:
    """The files of one stream that lie here, compared with index.json; safe to pickle.

    Args:
        files: Where the stream's files are.
        disk: What they lie on.
        uri: The stream's index.json, for messages.
    """

    def __init__(self, files: StreamFiles, disk: Disk, uri: str) -> None:
        self._validate_hash: str | None = files.stream.validate_hash or None
        self._remote_folder = files.remote_folder
        self._disk = disk
        self._uri = uri
        self._whole: dict[Path, FileState] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_whole": {}}

    def wanted(self, part: Part, *, is_asked: bool = False) -> str:
        """Return the hash that a file must have, as "algorithm:digest"; empty if none is known.

        Args:
            part: What index.json says of the file.
            is_asked: Whether it must be the one that `validate_hash` names.

        Raises:
            DataError: If it must be, and there is no such hash.
        """
        # A shard's two files need not have the same hashes; the one that is fetched has to.
        use = self._validate_hash if is_asked or self._validate_hash in part.hashes else None
        return wanted_hash(part, use, self._uri)

    def is_whole(self, home: Path, part: Part) -> bool:
        """Return whether a file is here, and is what index.json says.

        A file of ours that was hashed for that is remembered on disk; any other in this process.
        """
        path = home / part.basename
        try:
            state = self._disk.state(path)
            if state is None or state.num_bytes != part.num_bytes:
                return False
            if self._whole.get(path) == state:
                return True
            records = Records(home, self._disk)
            record, wanted = records.read(part.basename), self.wanted(part)
            boot_id = self.boot_id(home)
            is_known = record is not None and record.says_of(state, wanted, boot_id)
            if wanted and not is_known and file_digest(self._disk, path, wanted) != wanted:
                return False
            if record is not None and self._is_replaced(record):
                return False
            if record is not None and not record.is_promise and not is_known:
                with suppress(OSError):  # only a speed-up
                    records.remember(part.basename, state, wanted, boot_id, record.origin)
        except OSError:
            return False
        self._whole[path] = state
        return True

    def origin(self, shard: Shard) -> str:
        """Return what a shard's files are made of now, as records say it; empty if a hash tells."""
        part = shard.packed or shard.raw
        return "" if self.wanted(part) or self.wanted(shard.raw) else self._version(part.basename)

    def _version(self, basename: str) -> str:
        """Return which version of a file the remote folder holds; empty if that cannot be seen."""
        if self._remote_folder is not None:
            with suppress(OSError):
                state = self._disk.state(self._remote_folder / basename)
                if state is not None:
                    return f"{basename}:{state.num_bytes}:{state.mtime_ns}"
        return ""

    def _is_replaced(self, record: Record) -> bool:
        """Return whether a file is of another version than the remote folder holds by now."""
        basename = record.origin.partition(":")[0]  # no name of index.json holds a colon
        return bool(basename) and self._version(basename) not in ("", record.origin)

    def boot_id(self, home: Path) -> str:
        """Return the boot that a record speaks of; none where several machines share the files."""
        return "" if self._disk.is_network(home) else self._disk.boot_id()

    def problem(self, path: Path, part: Part, found: str | None = None) -> str | None:
        """Return what is wrong with a file's bytes; None if nothing is.

        Args:
            path: The file.
            part: What index.json says of it.
            found: Its hash, as "algorithm:digest", where it was made while the file was written;
                None: it is read.

        Raises:
            OSError: If it cannot be read.
        """
        state = self._disk.state(path)
        if state is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path))
        if state.num_bytes != part.num_bytes:
            return f"has {state.num_bytes} bytes, but index.json says {part.num_bytes}"
        wanted = self.wanted(part)
        if found is None:
            found = file_digest(self._disk, path, wanted) if wanted else ""
        if found == wanted:
            return None
        algorithm, _, digest = wanted.partition(":")
        return f"its {algorithm} is {found.partition(':')[2]}, but index.json says {digest}"

    def refuse(self, path: Path, part: Part, where: str = "") -> None:
        """Raise what is wrong with a file that is not ours to replace; nothing if it is whole.

        Args:
            path: The file.
            part: What index.json says of it.
            where: The field of index.json that says so, for messages.

        Raises:
            DataError: Naming the file and what it should be.
        """
        with typed_errors(path):
            try:
                problem = self.problem(path, part)
            except FileNotFoundError as error:
                raise DataError(
                    f"{path}: there is no such file, but index.json names it, and there is no "
                    f"other form of it here; copy the shard there, or set remote={where}",
                    uri=str(path),
                    shard=part.basename,
                ) from error
        if problem is not None:
            raise DataError(
                f"{path}: {problem}; the shard was cut short, damaged or changed: copy or write it "
                f"anew, or, if it is a cached copy, delete it{where}",
                uri=str(path),
                shard=part.basename,
            )
