"""A file of token ids with known documents, and the virtual shards it is cut into.

::

    tokens   | doc 0 | doc 1 ... | doc 2 .............................. | doc 3 | doc 4 ...
    cells    |-------------- 64 MiB --------------|-------------- 64 MiB --------------|
    shards   | 0: the documents that begin in cell 0 ................... | 1: those of cell 1 ...

A virtual shard is the documents that begin in one cell, so it depends on this file's table alone.
Order, lanes, cache, prefetch and eviction treat it as they treat a shard of MDS.

Cost: a search of the table for each cell, for all cells together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from streampack.errors import DataError
from streampack.flat.mapped_tables import Table, tables_mapped
from streampack.types import Int64Array

CELL_BYTES = 64 << 20
PLACES = 256
"""Places that a round of `bisect` looks at, for a few targets."""


class Boundaries(Protocol):
    """Where the documents of one file begin, in tokens from its first byte, and their lengths.

    Ours also have `neighbours(first, stop)`, the lengths of documents [first, stop), one or more,
    in a few ns each.
    """

    @property
    def num_samples(self) -> int:
        """Number of documents."""

    def begins(self, samples: Int64Array) -> Int64Array:
        """Return the first token of documents, in order for all documents; shape (n,)."""

    def lengths(self, samples: Int64Array) -> Int64Array:
        """Return the tokens of documents, shape (n,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFile:
    """The loss mask of a token file: a byte for each token, 1 if it is a target."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFile:
    """Token ids of one type, and where documents begin among them.

    >>> from streampack.flat.token_file import Ends
    >>> file = TokenFile(name="a.bin", dtype="uint16", num_bytes=12,
    ...     boundaries=Ends(np.array([2, 5, 6])))
    >>> file.spans(0, 3)
    (array([ 0,  4, 10]), array([2, 3, 1]))
    """

    name: str
    """Its path, below the folder of its stream if that has one."""
    dtype: str
    """The ids' type, little-endian, such as "uint16"."""
    num_bytes: int
    boundaries: Boundaries
    version: str | None = None
    """The version that was found, which is asked for when it is read."""
    mask: MaskFile | None = None
    columns: tuple[str, ...] = ()
    """The names of other columns, which are not read."""
    hashes: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """The xxh3 of virtual shards by their first and one past their last byte, as far as known."""

    def lengths(self, first: int, stop: int) -> Int64Array:
        """Return the tokens of documents [first, stop), one or more, shape (n,); raise as `spans`.

        That documents overlap is not noticed.
        """
        lengths: Int64Array
        if (neighbours := getattr(self.boundaries, "neighbours", None)) is not None:
            lengths = neighbours(first, stop)
        else:
            lengths = self.boundaries.lengths(np.arange(first, stop))
        return lengths if lengths.min() >= 0 else self.spans(first, stop)[1]

    def spans(self, first: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Return byte offsets and lengths in tokens of documents [first, stop), shape (n,) each.

        Raises:
            DataError: If documents overlap, have a negative length, or end outside of the file.
        """
        samples = np.arange(first, stop)
        with tables_mapped():
            begins, lengths = self.boundaries.begins(samples), self.boundaries.lengths(samples)
        ends = begins + lengths
        bad = (lengths < 0) | (begins < 0) | (begins > self.num_tokens) | (ends > self.num_tokens)
        bad[1:] |= begins[1:] < ends[:-1]
        if bad.any():
            sample = int(bad.argmax())
            raise DataError(
                f"{self.name}: document {first + sample} has {lengths[sample]} tokens from token "
                f"{begins[sample]} on, but must begin where the one before ends, or later, and end "
                f"inside the file's {self.num_tokens} tokens; its table is damaged, or belongs to "
                "another file: copy both again",
                uri=self.name,
            )
        return begins * self._itemsize, lengths

    @property
    def num_tokens(self) -> int:
        """Tokens that the file has room for."""
        return self.num_bytes // self._itemsize

    def mask_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first and one past the last byte of the mask of bytes of the tokens."""
        return start // self._itemsize, stop // self._itemsize

    @property
    def _itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def cut(self, first: int, stop: int) -> VirtualShards:
        """Return the virtual shards of documents [first, stop), with this file as number 0."""
        num, cell = self.boundaries.num_samples, CELL_BYTES // self._itemsize
        targets = np.arange(cell, self.num_tokens, cell)  # the borders between cells
        with tables_mapped():
            inner = np.clip(bisect(self.boundaries.begins, num, targets), first, stop)
            firsts = np.array(sorted({first, *inner.tolist(), stop}))
            last, num_shards = firsts[1:] - 1, len(firsts) - 1
            begins = self.boundaries.begins(np.append(firsts[:-1], last))
            ends = begins[num_shards:] + self.boundaries.lengths(last)
            begins = begins[:num_shards]
        if not ((begins >= 0) & (begins <= ends) & (ends <= self.num_tokens)).all():
            raise DataError(
                f"{self.name}: its table has documents up to token {ends.max()}, but the file has "
                f"{self.num_tokens}; it is cut short or belongs to another table: copy both again",
                uri=self.name,
            )
        if (begins[1:] < ends[:-1]).any():
            self.spans(first, stop)  # names the document
        extents = np.stack([begins, ends], axis=1) * self._itemsize
        return VirtualShards(
            file=np.zeros(num_shards, np.int64),
            first_document=firsts[:-1],
            extents=extents,
            first_sample=firsts - first,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a `Stream` says about its token files."""

    tokens: tuple[str, ...]
    """Names of the column of tokens, for formats with columns."""
    dtype: str | None
    """Type of the tokens, for formats that do not state it."""
    unit: str
    """"document" or "sequence"."""
    ignores_trailing: bool = False
    """Whether tokens after the last document may be any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """A token file, and the files that describe it."""

    name: str
    """Its path below the root."""
    num_bytes: int
    path_of: Callable[[str], Path | None]
    """Returns the path on this disk of another file below the root, which it fetches if necessary;
    None without one."""
    version: str | None = None

    def table(self, name: str, way_out: str = "copy it too") -> Path:
        """Return the path on this disk of a file that says where documents end.

        Raises:
            NoTableError: If there is none.
        """
        path = self.path_of(name)
        if path is None:
            raise NoTableError(
                f"{self.name}: has no {name}, which says where its documents end; {way_out}"
            )
        return path


class NoTableError(DataError):
    """The table of a token file is missing."""


class TokenFormat(Protocol):
    """A format of token files. Register one of your own as an entry point `streampack.formats`."""

    name: str
    suffix: str
    """The ending of files with tokens."""

    def open(self, file: FoundFile, options: Options) -> TokenFile:
        """Return the type of a file's tokens, and where its documents begin.

        Raises:
            DataError: If a table is missing or damaged.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VirtualShards:
    """The virtual shards of a stream, in order."""

    file: Int64Array
    """The number of each one's file, shape (n,)."""
    first_document: Int64Array
    """The first document of each in its file, shape (n,)."""
    extents: Int64Array
    """The first and one past the last byte of each in its file, shape (n, 2)."""
    first_sample: Int64Array
    """The first sample of each in the stream, and one past the last; shape (n + 1,)."""

    @classmethod
    def of(cls, files: Sequence[int], parts: Sequence[VirtualShards]) -> VirtualShards:
        """Return the shards of several files, given by number."""
        counts = np.concatenate([np.diff(part.first_sample) for part in parts])
        return cls(
            file=np.repeat(np.array(files), [len(part.file) for part in parts]),
            first_document=np.concatenate([part.first_document for part in parts]),
            extents=np.concatenate([part.extents for part in parts]),
            first_sample=np.concatenate([[0], np.cumsum(counts)]),
        )

    @property
    def cells(self) -> Int64Array:
        """The cell of its file in which the documents of each begin, shape (n,)."""
        cells: Int64Array = self.extents[:, 0] // CELL_BYTES
        return cells

    def take(self, numbers: Int64Array) -> VirtualShards:
        """Return these shards alone, shape (n,)."""
        counts = np.diff(self.first_sample)[numbers]
        return VirtualShards(
            file=self.file[numbers],
            first_document=self.first_document[numbers],
            extents=self.extents[numbers],
            first_sample=np.concatenate([[0], np.cumsum(counts)]),
        )


class Ends:
    """Boundaries of documents back to back, from their ends in tokens: an array, or a table."""

    def __init__(self, ends: Int64Array | Table) -> None:
        self._ends = ends if isinstance(ends, Table) else np.asarray(ends, np.int64)
        self.num_samples = len(ends)

    def begins(self, samples: Int64Array) -> Int64Array:
        return np.where(samples > 0, self._ends[np.maximum(samples - 1, 0)], 0)

    def lengths(self, samples: Int64Array) -> Int64Array:
        return self._ends[samples] - self.begins(samples)

    def neighbours(self, first: int, stop: int) -> Int64Array:
        table, before = self._ends, max(first - 1, 0)
        found = table.view(before, stop) if isinstance(table, Table) else table[before:stop]
        ends = found.astype(np.int64)
        return np.concatenate([ends[: 0 if first else 1], ends[1:] - ends[:-1]])


def bisect(
    value_of: Callable[[Int64Array], Int64Array], count: int, targets: Int64Array
) -> Int64Array:
    """Return for each target the first index of an ascending sequence with a value of it or more.

    All targets are searched together, and each round looks at several places of a range: calls of
    `value_of` cost more than its entries, unless there are many.

    >>> bisect(lambda index: index * 10, 5, np.array([0, 1, 40, 41])).tolist()
    [0, 1, 4, 5]
    """
    low, high = np.zeros(len(targets), np.int64), np.full(len(targets), count, np.int64)
    ways = max(PLACES // max(len(targets), 1), 8)
    row, parts = np.arange(len(targets)), np.arange(1, ways)
    while (is_open := low < high).any():
        places = np.minimum(low[:, None] + (high - low)[:, None] * parts // ways, count - 1)
        is_less = value_of(places.ravel()).reshape(places.shape) < targets[:, None]
        num_less = is_less.sum(axis=1)
        above = places[row, np.maximum(num_less - 1, 0)] + 1
        below = places[row, np.minimum(num_less, ways - 2)]
        low = np.where(is_open & (num_less > 0), above, low)
        high = np.where(is_open & (num_less < ways - 1), below, high)
    return low
