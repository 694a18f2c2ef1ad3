"""Files that are made here and state their own hash, because no index.json knows their bytes.

::

    magic         8 bytes, of their format, which begin with "SP"
    xxh3_64       8 bytes, of all that follows

Cost: the hash of a file takes about 0.1 ms a MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xxhash

from streampack.storage.filesystem import LocalFilesystem, Piece

ALGORITHM = "xxh3_64"
PREFIX = b"SP"
MAGIC_BYTES = 8
SEAL_BYTES = 16  # the magic and the hash


def seal(magic: bytes, pieces: Sequence[Piece]) -> bytes:
    """Return what a file of these pieces begins with."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return magic + digest.digest()


def stated_hash(disk: LocalFilesystem, path: Path) -> str:
    """Return the hash that a file states for itself, as "algorithm:digest", or an empty text."""
    with disk.open(path) as file:
        head = file.read(SEAL_BYTES)
    return f"{ALGORITHM}:{head[MAGIC_BYTES:].hex()}" if head.startswith(PREFIX) else ""
