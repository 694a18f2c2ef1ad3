"""Megatron's `.bin` and `.idx`: tokens back to back, and an index of sequences and documents.

::

    .idx   "MMIDIDX\\0\\0" | u64 version 1 | u8 dtype | u64 n | u64 d
           | i32 length[n] | i64 pointer[n] | i64 first sequence of each document [d]
           | i8 mode[n]: 0 text, 1 an image                     only if multimodal

    d is documents + 1; all little-endian

Written by Megatron-LM, NeMo, GPT-NeoX and others. A sample is a document, which may have several
sequences, or with `unit="sequence"` one of these. Pointers and lengths both count: an index may
leave sequences of its `.bin` out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from streampack.errors import DataError
from streampack.flat.file_checks import check_end
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

    @property
    def num_samples(self) -> int:
        edges = self.first_sequences
        return self.pointers.count if edges is None else edges.count - 1

    def begins(self, samples: Int64Array) -> Int64Array:
        if self.first_sequences is None:
            return self._tokens(samples)
        return self._tokens(self.first_sequences[samples])

    def lengths(self, samples: Int64Array) -> Int64Array:
        if self.first_sequences is None:
            return self.sequence_lengths[samples]
        firsts, stops = self.first_sequences[samples], self.first_sequences[samples + 1]
        self._check_documents(samples, firsts, stops)
        lasts = np.maximum(stops - 1, firsts)
        is_empty = firsts == stops
        lasts[is_empty] = 0  # any sequence: the last document may be empty, after all of them
        ends = self._tokens(lasts) + self.sequence_lengths[lasts]
        lengths: Int64Array = np.where(is_empty, 0, ends - self._tokens(firsts))
        return lengths

    def _check_documents(self, samples: Int64Array, firsts: Int64Array, stops: Int64Array) -> None:
        """Refuse documents whose sequences do not follow each other, in the index or in tokens."""
        bad = (firsts < 0) | (firsts > stops) | (stops > self.pointers.count)
        bad[1:] |= firsts[1:] < stops[:-1]
        reason = "has sequences of another one, or none of this index"
        # Each sequence but the last of its document, which the next one has to follow.
        counts = np.maximum(stops - firsts - 1, 0)
        if counts.any() and not bad.any():
            before = np.cumsum(counts) - counts
            inner = np.arange(int(counts.sum())) + np.repeat(firsts - before, counts)
            lengths = self.sequence_lengths[inner]
            is_apart = self._tokens(inner) + lengths != self._tokens(inner + 1)
            bad[np.repeat(np.arange(len(samples)), counts)[is_apart | (lengths < 0)]] = True
            reason = "has sequences that do not follow each other in the tokens"
        if bad.any():
            raise DataError(
                f"{self.path}: document {samples[bad.argmax()]} {reason}; read each sequence as a "
                "sample, with unit='sequence', or make a new copy",
                uri=str(self.path),
            )

    def neighbours(self, first: int, stop: int) -> Int64Array:
        lengths: Int64Array
        has_several = False
        if self.first_sequences is not None:
            edges = self.first_sequences.view(first, stop + 1)
            are_filled = (edges[1:] > edges[:-1]).all()
            is_damaged = edges[0] < 0 or (not are_filled and (edges[1:] < edges[:-1]).any())
            if is_damaged or edges[0] == edges[-1]:
                return self.lengths(np.arange(first, stop))
            has_several = not are_filled or edges[-1] - edges[0] > stop - first
            first, stop = edges[[0, -1]].tolist()
        lengths = self.sequence_lengths.view(first, stop).astype(np.int64)
        if has_several:
            before = np.concatenate([[0], np.cumsum(lengths)])
            lengths = np.diff(before[edges - first])
        return lengths

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
        if size not in (expected, expected + n) or not n:
            raise DataError(
                f"{path}: has {size} bytes, but {n} sequences and {d} - 1 documents take "
                f"{expected}, and at least one of each is needed; it is cut short or damaged: make "
                "a new copy"
            )
        if data[expected:].any():
            raise DataError(
                f"{path}: has sequences of mode {data[expected:].max()}, which are images, and "
                "their bytes would be read as tokens; write the text alone: streampack write"
            )
        lengths = Table(path=path, dtype="<i4", offset=HEAD.size, count=n)
        pointers = Table(path=path, dtype="<i8", offset=begin, count=n)
        documents = Table(path=path, dtype="<i8", offset=begin + 8 * n, count=d)
        if options.unit == "document":
            _check_closed(path, documents, n)
        itemsize, last = np.dtype(DTYPES[code]).itemsize, np.array([n - 1])
        end = int(pointers[last][0]) + itemsize * int(lengths[last][0])
        check_end(path, end, file, options)
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


def _check_closed(path: Path, documents: Table, num_sequences: int) -> None:
    """Refuse an index whose documents are not all of its sequences."""
    edges = documents[np.array([0, len(documents) - 1])].tolist() if len(documents) else []
    if len(documents) < 2 or edges != [0, num_sequences]:
        raise DataError(
            f"{path}: has {num_sequences} sequences, but the first and last of its "
            f"{max(len(documents) - 1, 0)} documents begin and end at {edges}, so they were not "
            "closed, or the index is damaged; read each sequence as a sample, with "
            "unit='sequence', or make a new copy"
        )
