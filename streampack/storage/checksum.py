"""Hashes of files: which one to compare, and how to compute it as a file is written or read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from streampack.errors import DataError
from streampack.mds.codecs import HASHES
from streampack.mds.index import Shard, ShardFile
from streampack.storage.filesystem import LocalFilesystem, Piece

FAST_HASHES = ("xxh3_64", "xxh3_128", "xxh128", "xxh64", "xxh32", "sha1", "md5", "blake2b")


def expected_hash(file: ShardFile, validate_hash: str | None, uri: str) -> str:
    """Return the hash that a file must have, as "algorithm:digest"; empty if none is known.

    `file` is its entry in the index.json at `uri`. `validate_hash` is the one of its hashes
    to use, and a DataError if it has no such hash; by default the cheapest.

    >>> file = ShardFile(basename="a.mds", num_bytes=3, hashes={"md5": "0f", "xxh64": "AB"})
    >>> expected_hash(file, None, "index.json")
    'xxh64:ab'
    """
    known = sorted(HASHES.keys() & file.hashes)
    if validate_hash and validate_hash not in known:
        raise DataError(
            f"{uri}: {file.basename} has no {validate_hash!r} hash, only "
            f"{sorted(file.hashes)}; set validate_hash= to one of them, or to None"
        )
    cheapest = next((name for name in (*FAST_HASHES, *known) if name in known), None)
    algorithm = validate_hash or cheapest
    return f"{algorithm}:{file.hashes[algorithm].lower()}" if algorithm else ""


def is_hashed(shard: Shard) -> bool:
    """Return whether a known hash verifies a shard's file, or the file unpacked from it."""
    return not HASHES.keys().isdisjoint((*shard.stored.hashes, *shard.raw.hashes))


class Digest:
    """Incremental hash by the algorithm of "algorithm:digest"; if empty, nothing is hashed.

    >>> digest = Digest("md5:0f")
    >>> list(digest.of([b"a", b"bc"]))
    [b'a', b'bc']
    >>> digest.text
    'md5:900150983cd24fb0d6963f7d28e17f72'
    """

    def __init__(self, expected: str) -> None:
        self._algorithm = expected.partition(":")[0]
        self._hash = HASHES[self._algorithm]() if self._algorithm else None

    def of(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces unchanged, hashing each one."""
        for piece in pieces:
            if self._hash is not None:
                self._hash.update(piece)
            yield piece

    @property
    def text(self) -> str:
        """The hash so far, as "algorithm:digest"; empty if nothing is hashed."""
        return "" if self._hash is None else f"{self._algorithm}:{self._hash.hexdigest()}"


def file_digest(disk: LocalFilesystem, path: Path, expected: str) -> str:
    """Return a file's hash by the algorithm of `expected`; both are "algorithm:digest"."""
    algorithm = expected.partition(":")[0]
    with disk.open(path) as file:
        digest = hashlib.file_digest(file, HASHES[algorithm])
    return f"{algorithm}:{digest.hexdigest()}"
