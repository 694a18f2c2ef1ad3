"""What `streampack index --out` found in a token file: its documents, their edges, and hashes.

::

    head        magic, version, eos_id + 1 or 0, bytes of tokens, num_shards, num_documents, dtype
    shards      num_shards    x (u64 first byte, u64 one past the last, u64 xxh3 of these bytes)
    documents   num_documents x (u64 first token, u32 tokens, u32 first id, u32 last id)

All little-endian. The file is in a folder of the user's choice, under the token file's name.

Cost: 20 bytes a document and 24 a virtual shard on disk; opening reads the shards.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from streampack.errors import DataError
from streampack.flat.mapped_tables import MAX_VALUE, Table
from streampack.flat.token_file import TokenFile
from streampack.mds.regular_files import open_file
from streampack.types import Int64Array

DOCUMENTS = ".documents"
HASH = "xxh3_64"
MAGIC = b"SPTOKENS"
VERSION = 2
HEAD = struct.Struct("<8sQQQQQ8s")
SHARD = "<u8,<u8,<u8"
DOCUMENT = "<u8,<u4,<u4,<u4"
DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class Documents:
    """Boundaries and edges in an index file."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.num_samples = len(table)

    def begins(self, samples: Int64Array) -> Int64Array:
        # Sums with larger ones would overflow; these are past the end of any file, too.
        return np.asarray(np.minimum(self._table.take(samples)["f0"], MAX_VALUE), np.int64)

    def lengths(self, samples: Int64Array) -> Int64Array:
        return np.asarray(self._table.take(samples)["f1"], np.int64)

    def neighbours(self, first: int, stop: int) -> Int64Array:
        return np.asarray(self._table.view(first, stop)["f1"], np.int64)

    def edges(self, samples: Int64Array) -> Int64Array:
        """Return the first and last token of documents, shape (n, 2)."""
        found = self._table.take(samples)
        return np.stack([found["f2"], found["f3"]], axis=1).astype(np.int64)


def open_documents(name: str, num_bytes: int, index: Path, *, split_at: int | None) -> TokenFile:
    """Open the index file of the tokens `name`, which have `num_bytes`, in the folder `index`.

    Raises:
        DataError: If it is missing or damaged, or of other tokens, or was not made for `split_at`.
    """
    path = index / f"{name}{DOCUMENTS}"
    way_out = f"rewrite it: streampack index FILES --out {index}"
    if split_at is not None:
        way_out += f" --eos-id {split_at}"
    try:
        with open_file(path) as file:
            head = file.read(HEAD.size).ljust(HEAD.size)
            magic, version, split, size, num_shards, num_documents, kind = HEAD.unpack(head)
            dtype = kind.rstrip(b"\0").decode(errors="replace")
            if magic != MAGIC or version != VERSION or dtype not in DTYPES:
                raise DataError(f"{path}: is not an index of tokens; {way_out}", uri=str(path))
            begin = HEAD.size + np.dtype(SHARD).itemsize * num_shards
            expected = begin + np.dtype(DOCUMENT).itemsize * num_documents
            found = path.stat().st_size
            if found != expected or not num_shards or not num_documents:
                raise DataError(
                    f"{path}: has {found} bytes, but {num_shards} shards and {num_documents} "
                    f"documents take {expected}, and one of each is needed; {way_out}",
                    uri=str(path),
                )
            shards = np.frombuffer(file.read(begin - HEAD.size), SHARD)
    except FileNotFoundError as error:
        raise DataError(f"{path}: does not exist, so {name} has no index; {way_out}") from error
    if size != num_bytes:
        raise DataError(
            f"{path}: was made for {size} bytes of tokens, but {name} has {num_bytes}; {way_out}"
        )
    if split_at is not None and split != split_at + 1:
        made = f"for eos_id={split - 1}" if split else "without an eos_id"
        raise DataError(f"{path}: was made {made}, but split_at={split_at}; {way_out}")
    table = Table(path=path, dtype=DOCUMENT, offset=begin, count=num_documents)
    return TokenFile(
        name=name,
        dtype=dtype,
        num_bytes=num_bytes,
        boundaries=Documents(table),
        hashes={(first, stop): f"{digest:016x}" for first, stop, digest in shards.tolist()},
    )
