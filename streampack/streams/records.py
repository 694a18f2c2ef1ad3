"""Which files are ours and were found whole: hashes, and the records that remember them.

::

    index.json's hashes --the cheapest known one, or validate_hash--> (algorithm, digest)
    file --hash, once per (size, time, boot)--> .streampack/<name>.json

A record exists for the files that streampack fetched or unpacked, and for no others: only those
may ever be replaced or evicted. It is written before its file gets its name, and again whenever the
file was checked anew. Under a cache limit it is there before the download, as a promise: a file
that lies beside one was put there by somebody else. After a restart of the machine nothing that it
says of the bytes is believed.

Cost: reading a record takes some 50 us, hashing 0.1 ms (xxhash) to 1 ms (sha1, md5) a MB.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from streampack.errors import DataError
from streampack.streams import mosaic
from streampack.streams.disk import Disk, FileState, Piece
from streampack.streams.index import Part
from streampack.streams.locks import NOTES_FOLDER, FileLocks, note_name

__all__ = ["Digest", "Record", "Records", "file_digest", "wanted_hash"]

FAST_HASHES = ("xxh3_64", "xxh3_128", "xxh128", "xxh64", "xxh32", "sha1", "md5", "blake2b")
PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is remembered of a file of ours."""

    num_bytes: int
    """Its size when it was last found whole; -1: it is being brought; -2: nobody can read it."""
    mtime_ns: int
    """Its time then."""
    hash: str
    """Which hash it had, as "algorithm:digest"; empty if index.json has none."""
    boot_id: str
    """The machine's boot since which that is known."""
    origin: str = ""
    """What it was made of, as "name:size:time" of a file in a remote folder; empty if a hash tells
    whether it still is the right one, or nothing can."""

    @property
    def is_promise(self) -> bool:
        """Whether the file was yet to come: whoever was to bring it was killed, or is at it."""
        return self == PROMISE

    def is_of(self, state: FileState) -> bool:
        """Return whether it speaks of this version of the file."""
        return (self.num_bytes, self.mtime_ns) == (state.num_bytes, state.mtime_ns)

    def says_of(self, state: FileState, wanted: str, boot_id: str) -> bool:
        """Return whether it says that this version of the file has this hash."""
        return self.is_of(state) and (self.hash, self.boot_id) == (wanted, boot_id)


PROMISE = Record(num_bytes=-1, mtime_ns=0, hash="", boot_id="")
UNREADABLE = Record(num_bytes=-2, mtime_ns=0, hash="", boot_id="")


class Records:
    """The records of the files in one folder; safe to pickle.

    Args:
        folder: The folder.
        disk: What it lies on.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder / NOTES_FOLDER
        self._disk = disk
        self._locks = FileLocks(folder, disk)

    def path(self, basename: str) -> Path:
        """Return where a file's record is."""
        return self._folder / f"{note_name(basename)}.json"

    def read(self, basename: str) -> Record | None:
        """Return a file's record; None if there is none."""
        try:
            with self._disk.open(self.path(basename)) as file:
                return _parse(file.read())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def has(self, basename: str) -> bool:
        """Return whether a file that lies there is ours."""
        record = self.read(basename)
        return record is not None and not record.is_promise

    def write(self, basename: str, record: Record) -> None:
        """Write a file's record, at once or not at all; its folder is made if need be.

        Raises:
            OSError: If it cannot be written.
        """
        self._disk.make_folder(self._folder)
        temporary = self._locks.temporary(basename)
        try:
            self._disk.write(temporary, [json.dumps(asdict(record)).encode()])
            self._disk.rename(temporary, self.path(basename))
        finally:
            self._disk.remove(temporary)

    def reserve(self, basename: str) -> None:
        """Say that a file of ours is about to be brought.

        Raises:
            OSError: If it cannot be written.
        """
        self.write(basename, PROMISE)

    def remember(
        self, basename: str, state: FileState, wanted: str, boot_id: str, origin: str = ""
    ) -> None:
        """Say that a file of ours was found whole.

        Raises:
            OSError: If it cannot be written.
        """
        self.write(
            basename,
            Record(
                num_bytes=state.num_bytes,
                mtime_ns=state.mtime_ns,
                hash=wanted,
                boot_id=boot_id,
                origin=origin,
            ),
        )

    def remove(self, basename: str) -> None:
        """Remove a file's record, if it has one."""
        self._disk.remove(self.path(basename))


def _parse(text: bytes) -> Record:
    # What lies there was written by us: if it cannot be read, the file is ours all the same.
    try:
        fields = json.loads(text)
        record = Record(**fields)
    except (ValueError, TypeError, RecursionError):
        return UNREADABLE
    numbers = isinstance(record.num_bytes, int) and isinstance(record.mtime_ns, int)
    return record if numbers and isinstance(record.origin, str) else UNREADABLE


def wanted_hash(part: Part, validate_hash: str | None, uri: str) -> str:
    """Return the hash that a file must have, as "algorithm:digest"; empty if none is known.

    Args:
        part: What index.json says of the file.
        validate_hash: Which of its hashes to use; None: the cheapest.
        uri: The index.json, for messages.

    Raises:
        DataError: If there is no such hash.

    >>> part = Part(basename="a.mds", num_bytes=3, hashes={"md5": "0f", "xxh64": "AB"})
    >>> wanted_hash(part, None, "index.json")
    'xxh64:ab'
    """
    known = {name: part.hashes[name] for name in part.hashes if name in mosaic.get_hashes()}
    if validate_hash and validate_hash not in known:
        raise DataError(
            f"{uri}: {part.basename} has no {validate_hash!r} hash, only "
            f"{sorted(part.hashes)}; set validate_hash= to one of them, or to None"
        )
    algorithm = validate_hash or _cheapest(known)
    return f"{algorithm}:{known[algorithm].lower()}" if algorithm else ""


def _cheapest(hashes: Mapping[str, str]) -> str | None:
    ranks = {name: rank for rank, name in enumerate(FAST_HASHES)}
    return min(sorted(hashes), key=lambda name: ranks.get(name, len(ranks)), default=None)


class Digest:
    """The hash of bytes as they pass.

    Args:
        wanted: The hash they should have, as "algorithm:digest"; empty: none is made.

    >>> digest = Digest("md5:0f")
    >>> digest.update(b"abc")
    >>> digest.text
    'md5:900150983cd24fb0d6963f7d28e17f72'
    """

    def __init__(self, wanted: str) -> None:
        self._algorithm = wanted.partition(":")[0]
        self._hash: Any = None
        if self._algorithm in xxhash.algorithms_available:
            self._hash = getattr(xxhash, self._algorithm)()
        elif self._algorithm:
            self._hash = hashlib.new(self._algorithm)

    def update(self, piece: Piece) -> None:
        """Hash what passes next."""
        if self._hash is not None:
            self._hash.update(piece)

    def of(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Pass pieces on, each one hashed."""
        for piece in pieces:
            self.update(piece)
            yield piece

    @property
    def text(self) -> str:
        """The hash of what has passed, as "algorithm:digest"; empty if none is made."""
        return "" if self._hash is None else f"{self._algorithm}:{self._hash.hexdigest()}"


def file_digest(disk: Disk, path: Path, wanted: str) -> str:
    """Return a file's hash, as "algorithm:digest".

    Args:
        disk: What it lies on.
        path: The file.
        wanted: A hash in that form, whose algorithm is to be used.

    Raises:
        OSError: If it cannot be read.
    """
    digest = Digest(wanted)
    buffer = memoryview(bytearray(PIECE_BYTES))
    with disk.open(path) as file:
        while filled := file.readinto(buffer):
            digest.update(buffer[:filled])
    return digest.text
