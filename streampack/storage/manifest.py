"""The manifest: which files are ours and were verified, and with which hash.

::

    index.json's hashes --the cheapest known one, or validate_hash--> (algorithm, digest)
    file --hash, once per (size, time, boot)--> .streampack/<name>.json

Only files that streampack fetched or unpacked have an entry, and only these may be replaced or
evicted. An entry is written before its file is renamed to its final name, and again after each new
verification. Under a cache limit a pending entry is written before the download. A file next to a
pending entry was put there by another program. Entries from before a reboot are not trusted.

Cost: reading an entry takes about 50 us; hashing takes 0.1 ms (xxhash) to 1 ms (sha1, md5) per MB.
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
from streampack.mds import mosaic
from streampack.mds.index import Part
from streampack.storage.filesystem import FileState, LocalFilesystem, Piece
from streampack.storage.locks import NOTES_FOLDER, FileLocks, note_name

FAST_HASHES = ("xxh3_64", "xxh3_128", "xxh128", "xxh64", "xxh32", "sha1", "md5", "blake2b")
PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """The manifest's entry for one of our files."""

    num_bytes: int
    """Its size at the last verification; -1: it is being fetched; -2: the entry is unreadable."""
    mtime_ns: int
    """Its modification time at that point."""
    hash: str
    """The hash it had, as "algorithm:digest"; empty if index.json has none."""
    boot_id: str
    """The boot of this machine in which it was verified."""
    origin: str = ""
    """Version of its source, as "name:size:time:inode"; no inode on a network file system.

    The source is a file in a remote folder, or a local stream's compressed file. Empty if a hash
    identifies the contents, or nothing can.
    """
    inode: int = 0
    """Its inode at that point; 0 on a network file system."""

    @property
    def is_promise(self) -> bool:
        """Whether the file was still to come: its fetch is in progress or was killed."""
        return self == PENDING

    def matches(self, state: FileState) -> bool:
        """Return whether the entry describes this version of the file."""
        return (self.num_bytes, self.mtime_ns) == (state.num_bytes, state.mtime_ns)

    def is_verified(self, state: FileState, wanted: str, boot_id: str) -> bool:
        """Return whether the entry vouches for this hash of this version of the file."""
        said = (self.inode, self.hash, self.boot_id)
        return self.matches(state) and said == (state.inode, wanted, boot_id)


PENDING = CacheEntry(num_bytes=-1, mtime_ns=0, hash="", boot_id="")
UNREADABLE = CacheEntry(num_bytes=-2, mtime_ns=0, hash="", boot_id="")


class Manifest:
    """The entries of the files in one folder; safe to pickle.

    Args:
        folder: The folder.
        disk: Its filesystem.
    """

    def __init__(self, folder: Path, disk: LocalFilesystem) -> None:
        self._folder = folder / NOTES_FOLDER
        self._disk = disk
        self._locks = FileLocks(folder, disk)

    def path(self, basename: str) -> Path:
        """Return the path of a file's entry."""
        return self._folder / f"{note_name(basename)}.json"

    def read(self, basename: str) -> CacheEntry | None:
        """Return a file's entry; None if there is none."""
        try:
            with self._disk.open(self.path(basename)) as file:
                return _parse(file.read())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def has(self, basename: str) -> bool:
        """Return whether an existing file is ours."""
        record = self.read(basename)
        return record is not None and not record.is_promise

    def write(self, basename: str, record: CacheEntry) -> None:
        """Write a file's entry atomically; its folder is created if necessary.

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
        """Write a pending entry for a file that is about to be fetched.

        Raises:
            OSError: If it cannot be written.
        """
        self.write(basename, PENDING)

    def remember(
        self, basename: str, state: FileState, wanted: str, boot_id: str, origin: str = ""
    ) -> None:
        """Write the entry of a verified file.

        Raises:
            OSError: If it cannot be written.
        """
        self.write(
            basename,
            CacheEntry(
                num_bytes=state.num_bytes,
                mtime_ns=state.mtime_ns,
                hash=wanted,
                boot_id=boot_id,
                origin=origin,
                inode=state.inode,
            ),
        )

    def remove(self, basename: str) -> None:
        """Remove a file's entry, if it has one."""
        self._disk.remove(self.path(basename))


def _parse(text: bytes) -> CacheEntry:
    # Only streampack writes entries: an unreadable one still marks the file as ours.
    try:
        fields = json.loads(text)
        record = CacheEntry(**fields)
    except (ValueError, TypeError, RecursionError):
        return UNREADABLE
    numbers = isinstance(record.num_bytes, int) and isinstance(record.mtime_ns, int)
    return record if numbers and isinstance(record.origin, str) else UNREADABLE


def wanted_hash(part: Part, validate_hash: str | None, uri: str) -> str:
    """Return the hash that a file must have, as "algorithm:digest"; empty if none is known.

    Args:
        part: The file's entry in index.json.
        validate_hash: Which of its hashes to use; None: the cheapest.
        uri: The index.json, for messages.

    Raises:
        DataError: If it has no such hash.

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
    """Incremental hash of a byte stream.

    Args:
        wanted: The expected hash, as "algorithm:digest"; empty: nothing is hashed.

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
        """Hash the next piece."""
        if self._hash is not None:
            self._hash.update(piece)

    def of(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces unchanged, hashing each one."""
        for piece in pieces:
            self.update(piece)
            yield piece

    @property
    def text(self) -> str:
        """The hash so far, as "algorithm:digest"; empty if nothing is hashed."""
        return "" if self._hash is None else f"{self._algorithm}:{self._hash.hexdigest()}"


def file_digest(disk: LocalFilesystem, path: Path, wanted: str) -> str:
    """Return a file's hash, as "algorithm:digest".

    Args:
        disk: Its filesystem.
        path: The file.
        wanted: A hash in the same form, which names the algorithm.

    Raises:
        OSError: If it cannot be read.
    """
    digest = Digest(wanted)
    buffer = memoryview(bytearray(PIECE_BYTES))
    with disk.open(path) as file:
        while filled := file.readinto(buffer):
            digest.update(buffer[:filled])
    return digest.text
