"""The length file: the number of tokens of each sample of a stream, next to its index.json.

Little-endian; everything but the name starts at a multiple of 8 bytes::

    magic, version        8 + 8 bytes    b"SPLENGTH", 1 or 2
    num_samples, num_shards, num_tokens, min_tokens     u64 each
    digest of index.json  32 bytes       BLAKE2b-256; another index.json makes the file stale
    column                u64 + name     its length, UTF-8, zeros up to a multiple of 8 bytes
    shards                num_shards  x (u64 first sample, u64 tokens)
    lengths               num_samples x  u32 tokens
    edges                 num_samples x (u32 first token, u32 last token)    for bos_id and eos_id
    hashes                num_shards  x  u64 xxh64 of the decompressed shard      version 2 only

A stream may grow while it is read: a file that replaces this one begins with the same shards, and
each read looks up in its header where their parts are. The length file is written before
index.json, so a file with more shards than an index.json is opened as far as that goes.

Cost: 12 bytes per sample on disk. Opening reads the header and the hashes. A shard's lengths are
one slice.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack._paths import replaced
from streampack.errors import DataError
from streampack.mds.index import MdsIndex
from streampack.mds.regular_files import check_file, open_file
from streampack.types import Int64Array, UInt32Array

LENGTH_FILE = "lengths.bin"
NO_TOKEN = 2**32 - 1
"""Placeholder edge for a sample without tokens, or for a token id that does not fit."""

MAGIC = b"SPLENGTH"
VERSION = 1
VERSION_WITH_HASHES = 2
HEAD = struct.Struct("<8sQQQQQ32sQ")
PARTS = {"shards": (np.uint64, 2), "lengths": (np.uint32, 1), "edges": (np.uint32, 2)}
MAX_OFFSET = 2**62  # of a damaged header


def index_digest(text: bytes) -> bytes:
    """Return the 32-byte digest that identifies an index.json.

    >>> len(index_digest(b"{}"))
    32
    """
    return hashlib.blake2b(text, digest_size=32).digest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthFile:
    """An opened length file; its arrays are read on each access."""

    path: Path
    origin: str
    """Folder or URL of its stream, for messages."""
    column: str
    num_samples: int
    num_tokens: int
    min_tokens: int
    head_bytes: int
    """Byte offset of the shards' entries."""
    hashes: tuple[str, ...]
    """The xxh64 of each decompressed shard, in hex; empty if the file has none."""
    first_sample: Int64Array
    """The first sample of each shard in the file, and one past the last."""
    numbers: Int64Array
    """The shards that are meant, shape (num_shards,)."""

    def take(self, numbers: Int64Array) -> LengthFile:
        """Return the lengths of these shards alone, given by number in the file."""
        own = replace(
            self,
            num_samples=int(np.diff(self.first_sample)[numbers].sum()),
            hashes=tuple(self.hashes[n] for n in numbers.tolist()) if self.hashes else (),
            numbers=numbers,
        )
        return replace(own, num_tokens=int(own._entries()[:, 1].sum()))

    def _samples_of(self, shard: int) -> tuple[int, int, int]:
        """Return a shard's number in the file, its first sample there, and how many it has."""
        number = int(self.numbers[shard])
        first, last = self.first_sample[number : number + 2].tolist()
        return number, first, last - first

    def shard_lengths(self, shard: int) -> Int64Array:
        """Return the tokens of each sample of a shard, shape (num_samples_of_shard,).

        A DataError says that they do not add up to the shard's total in the file's header.
        """
        shard, first, count = self._samples_of(shard)
        lengths, entries = self._read(("lengths", first, count), ("shards", shard, 1))
        entry = entries[0].tolist()
        total = int(lengths.sum(dtype=np.int64))
        if entry != [first, total]:
            raise DataError(
                f"{self.path}: shard {shard} starts at sample {first} and its lengths add up to "
                f"{total} tokens, but the header says {entry[0]} and {entry[1]}; "
                f"{_way_out(self.origin)}"
            )
        return lengths.astype(np.int64)

    def shard_tokens(self) -> Int64Array:
        """Return the number of tokens of each shard, shape (num_shards,).

        A DataError says that they do not add up to the stream's total in the file's header.
        """
        tokens = self._entries()[:, 1].astype(np.int64)
        if int(tokens.sum()) != self.num_tokens or tokens.min() < 0:
            raise DataError(
                f"{self.path}: its shards' tokens add up to {tokens.sum()}, but its header says "
                f"{self.num_tokens}; {_way_out(self.origin)}"
            )
        return tokens

    def shard_edges(self, shard: int) -> Int64Array:
        """Return the first and last token of each sample of a shard, shape (n, 2)."""
        _, first, count = self._samples_of(shard)
        [edges] = self._read(("edges", first, count))
        return edges.astype(np.int64)

    def digest(self) -> str:
        """Return a 16-character digest of the token counts of all shards.

        Lengths of single samples are omitted: reading all of them takes 12 bytes a sample.
        """
        head = (self.column, self.num_samples, self.num_tokens, self.min_tokens)
        entries = self._entries()
        text = repr(head).encode() + entries.tobytes()
        return hashlib.blake2b(text, digest_size=8).hexdigest()

    def _entries(self) -> npt.NDArray[np.uint64]:
        """Return first sample and tokens of each shard, shape (num_shards, 2)."""
        [entries] = self._read(("shards", 0, int(self.numbers.max()) + 1))
        return entries[self.numbers]

    def _read(self, *wanted: tuple[str, int, int]) -> list[npt.NDArray[Any]]:
        """Return entries of parts, given as (part, first, count).

        They are of shape (count, 2), or (count,) of lengths.
        """
        # Read, not mapped: the data is small, may be on a network, and leaves no file open.
        read = []
        with open_file(self.path) as file:  # numpy.fromfile would take a second descriptor
            head = file.read(HEAD.size).ljust(HEAD.size)
            _, _, samples, shards, *_ = HEAD.unpack(head)
            lengths = self.head_bytes + 16 * shards
            begin = {"shards": self.head_bytes, "lengths": lengths, "edges": lengths + 4 * samples}
            for part, first, count in wanted:
                dtype, width = PARTS[part]
                values = np.empty(count * width, dtype)
                file.seek(min(begin[part] + values.itemsize * width * first, MAX_OFFSET))
                if file.readinto(values.view(np.uint8).data) != values.nbytes:
                    raise DataError(
                        f"{self.path}: was truncated after it was opened; {_way_out(self.origin)}"
                    )
                read.append(values.reshape(-1, 2) if width > 1 else values)
        return read


def write_length_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a length file of `length_file_pieces` atomically."""
    with suppress(FileNotFoundError):
        check_file(path)
    with replaced(path) as temporary, temporary.open("wb") as out:
        out.writelines(pieces)


def length_file_pieces(
    text: bytes,
    index: MdsIndex,
    column: str,
    lengths: UInt32Array,
    edges: UInt32Array,
    hashes: Sequence[int] = (),
) -> Iterator[bytes | memoryview]:
    """Yield the parts of a length file in order.

    It belongs next to an index.json of the bytes `text`, parsed as `index`. `lengths` contains the
    tokens per sample in `column`, shape (num_samples,), and `edges` their first and last token,
    shape (num_samples, 2). `hashes` contains the xxh64 of each decompressed shard; empty: none are
    stored.
    """
    sums = np.concatenate([[0], np.cumsum(lengths, dtype=np.uint64)])
    shards = np.zeros((len(index.shards), 2), np.uint64)
    shards[:, 0] = index.first_sample[:-1]
    shards[:, 1] = np.diff(sums[index.first_sample])
    name = column.encode()
    yield HEAD.pack(
        MAGIC,
        VERSION_WITH_HASHES if len(hashes) else VERSION,
        len(lengths),
        len(shards),
        int(sums[-1]),
        int(lengths.min()),
        index_digest(text),
        len(name),
    )
    yield name.ljust(_padded(len(name)), b"\0")
    for part in (shards, lengths, edges, np.array(hashes, np.uint64)):
        yield np.ascontiguousarray(part).data


def _way_out(origin: str) -> str:
    return f"rewrite it: streampack index {origin}"


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def open_length_file(path: Path, text: bytes, index: MdsIndex, way_out: str = "") -> LengthFile:
    """Open a length file; refuse one that is truncated or not of an index.json of bytes `text`.

    One with more shards after those of the index.json is not refused. With a `way_out`, how to make
    the file again, its samples are documents in the index.json's rows, and it has their numbers.
    """
    has_documents, origin = bool(way_out), os.path.dirname(index.uri)
    way_out = way_out or _way_out(origin)
    with open_file(path) as file:
        head = file.read(HEAD.size)
        file_bytes = os.fstat(file.fileno()).st_size
        if len(head) < HEAD.size or head[: len(MAGIC)] != MAGIC:
            raise DataError(f"{path}: {file_bytes} bytes that are not a length file; {way_out}")
        _, version, samples, shards, tokens, shortest, digest, name_bytes = HEAD.unpack(head)
        if version not in (VERSION, VERSION_WITH_HASHES):
            raise DataError(f"{path}: has version {version}, but only 1 and 2 are known; {way_out}")
        head_bytes = HEAD.size + _padded(name_bytes)
        hashes_begin = head_bytes + 16 * shards + 12 * samples
        expected = hashes_begin + 8 * shards * (version == VERSION_WITH_HASHES)
        if file_bytes != expected:
            raise DataError(
                f"{path}: has {file_bytes} bytes, but should have {expected}; {way_out}"
            )
        name = file.read(name_bytes)
        # Not numpy.fromfile, which needs a second descriptor and leaks its file without one.
        file.seek(head_bytes)
        entries = np.frombuffer(file.read(16 * shards), "<i8")
        file.seek(hashes_begin)
        hashes = np.frombuffer(file.read(), "<u8")
    opened = LengthFile(
        path=path,
        origin=origin,
        column=name.decode(errors="replace"),
        num_samples=samples,
        num_tokens=tokens,
        min_tokens=shortest,
        head_bytes=head_bytes,
        hashes=tuple(f"{value:016x}" for value in hashes.tolist()),
        first_sample=np.append(entries[::2], np.int64(samples)),
        numbers=np.arange(shards),
    )
    count = len(index.shards)
    firsts = opened.first_sample[: count + 1]
    is_same = digest == index_digest(text) and shards == count
    if has_documents:
        is_ours = is_same and not firsts[0] and bool((np.diff(firsts) > 0).all())
    else:
        is_ours = (is_same or shards > count) and np.array_equal(firsts, index.first_sample)
    if not is_ours:
        raise DataError(
            f"{path}: is stale or damaged: it describes {samples} samples in {shards} shards of "
            f"another index.json than {index.uri} ({index.num_samples} in {count}); {way_out}"
        )
    if shards == count:
        return opened
    first = opened.take(np.arange(count))
    return replace(first, min_tokens=int(first._read(("lengths", 0, first.num_samples))[0].min()))
