"""Megatron's `.bin` and `.idx`: tokens back to back, and an index of sequences and documents.

::

    .idx   "MMIDIDX\\0\\0" | u64 version 1 | u8 dtype | u64 n | u64 d
           | i32 length[n] | i64 pointer[n] | i64 first sequence of each document [d]

    d is documents + 1; all little-endian

Written by Megatron-LM, NeMo, GPT-NeoX and others. A sample is a document, which may have several
sequences, or with `unit="sequence"` one of these.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from streampack.errors import DataError
from streampack.flat.mapped_tables import Table, map_table
from streampack.flat.token_file import FoundFile, Options, TokenFile
from streampack.types import Int64Array

HEAD = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\0\0"
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
OTHER_DTYPES = {6: "float64", 7: "float32"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MegatronIndex:
    """The boundaries in an `.idx` file."""

    path: Path
    itemsize: int
    num_tokens: int
    sequence_lengths: Table
    pointers: Table
    first_sequences: Table | None
    """None: samples are sequences."""
    num_samples: int = field(init=False)

    def __post_init__(self) -> None:
        count = self.pointers.count
        if self.first_sequences is not None:
            count = self.first_sequences.count - 1
        object.__setattr__(self, "num_samples", count)

    def begins(self, samples: Int64Array) -> Int64Array:
        if self.first_sequences is None:
            return self._tokens(samples)
        return self._tokens(self.first_sequences[samples])

    def lengths(self, samples: Int64Array) -> Int64Array:
        if self.first_sequences is None:
            return self.sequence_lengths[samples]
        return self._tokens(self.first_sequences[samples + 1]) - self.begins(samples)

    def _tokens(self, sequences: Int64Array) -> Int64Array:
        """Return the first token of sequences; of the one after the last, the end."""
        is_end = sequences == self.pointers.count
        bytes_before = self.pointers[np.where(is_end, 0, sequences)]
        if (bytes_before % self.itemsize).any():
            raise DataError(
                f"{self.path}: a sequence begins at a byte that is not a multiple of the "
                f"{self.itemsize} bytes of a token; the index is damaged: make a new copy",
                uri=str(self.path),
            )
        return np.where(is_end, self.num_tokens, bytes_before // self.itemsize)


class Megatron:
    """`.bin` with `.idx`."""

    name, suffix = "megatron", ".bin"

    def open(self, file: FoundFile, options: Options) -> TokenFile:
        path = file.table(file.name.removesuffix(".bin") + ".idx")
        data = map_table(path)
        size, head = len(data), data[: HEAD.size].tobytes()
        if size < HEAD.size or not head.startswith(MAGIC):
            raise DataError(f"{path}: {size} bytes that are not a Megatron index; make a new copy")
        _, version, code, n, d = HEAD.unpack(head)
        if version != 1 or code not in DTYPES:
            shown = OTHER_DTYPES.get(code, f"code {code}")
            raise DataError(
                f"{path}: has version {version} and tokens of type {shown}, but only version 1 "
                f"and the types {', '.join(DTYPES.values())} can be read; rewrite it"
            )
        begin = HEAD.size + 4 * n
        expected = begin + 8 * n + 8 * d
        # Indexes of multimodal data have a byte more for each sequence.
        if size not in (expected, expected + n) or not n or d < 2:
            raise DataError(
                f"{path}: has {size} bytes, but {n} sequences and {d} - 1 documents take "
                f"{expected}, and at least one of each is needed; it is cut short or damaged: make "
                "a new copy"
            )
        itemsize = np.dtype(DTYPES[code]).itemsize
        lengths = Table(path=path, dtype="<i4", offset=HEAD.size, count=n)
        pointers = Table(path=path, dtype="<i8", offset=begin, count=n)
        documents = Table(path=path, dtype="<i8", offset=begin + 8 * n, count=d)
        end = int(pointers[np.array([n - 1])][0] + itemsize * lengths[np.array([n - 1])][0])
        edges = documents[np.array([0, d - 1])].tolist()
        if end != file.num_bytes or edges != [0, n]:
            raise DataError(
                f"{path}: its sequences end at byte {end} and its documents are sequences "
                f"{edges[0]} to {edges[1]} of {n}, but {file.name} has {file.num_bytes} bytes; "
                "they do not belong together, or one was cut short: copy both again"
            )
        boundaries = MegatronIndex(
            path=path,
            itemsize=itemsize,
            num_tokens=file.num_bytes // itemsize,
            sequence_lengths=lengths,
            pointers=pointers,
            first_sequences=documents if options.unit == "document" else None,
        )
        return TokenFile(
            name=file.name, dtype=DTYPES[code], num_bytes=file.num_bytes, boundaries=boundaries
        )
