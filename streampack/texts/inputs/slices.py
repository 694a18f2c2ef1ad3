"""What passes between splitting, reading and writing: slices of inputs, and batches of rows.

An `InputSlice` names its rows completely, on any machine and at any time. It has text and
integers only, so ``dataclasses.asdict`` makes JSON of it, and ``InputSlice(**fields)`` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Literal

from streampack.texts.inputs.values import RowSelection

Format = Literal["jsonl", "text", "csv", "tsv", "parquet", "arrow", "mds"]
Compression = Literal["gz", "zst"]
WHOLE = -1  # `stop` of a slice that ends with its file


@dataclass(frozen=True, slots=True)
class InputSlice:
    """A range of the rows of one version of a file."""

    uri: str
    """Path on this machine, or the URL of an object in a store."""
    version: str
    """Version of the file: "etag:..." from a store, else "size:...,mtime_ns:..."; of a shard of MDS
    or litData what its index.json states of it, such as a hash."""
    format: Format
    """Format of the decompressed file."""
    compression: Compression | None
    """Compression of the file; a compressed file is never cut."""
    start: int
    """First byte (JSONL, CSV, Arrow: of whole messages) or row group (Parquet); 0 in other formats,
    which are not cut."""
    stop: int
    """The one after the last; -1: the end of the file; of a shard of MDS its rows. A range of lines
    ends after a line feed."""
    num_bytes: int
    """Size at rest, for progress and an estimate of the time left."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that was skipped."""

    uri: str
    """Path or URL of its file."""
    row: int
    """Its number from 0 in the file; in the slice, for JSONL that is cut within a file."""
    reason: str
    """The problem and a way out; for JSONL also the byte that the line begins with."""


@dataclass(slots=True)
class RowBatch:
    """Rows in order; entry `i` of each list but `bad` belongs to the same row."""

    values: list[Any] = field(default_factory=list)
    """Texts, integer arrays of shape (num_tokens,), or the fields of conversations."""
    kept: dict[str, list[Any]] = field(default_factory=dict)
    """Values of the kept columns, by name."""
    types: dict[str, str] = field(default_factory=dict)
    """MDS encodings of those kept columns that have a type in a table, by name."""
    rows: list[int] = field(default_factory=list)
    """Numbers of the rows, counted as in `BadRow`."""
    bad: list[BadRow] = field(default_factory=list)
    """Rows of this range that were skipped."""
    num_bytes: int = 0
    """Bytes of the slice at rest that were read so far; 0 in Arrow."""

    @classmethod
    def of(cls, wanted: RowSelection) -> RowBatch:
        """Return a batch of no rows."""
        return cls(kept={name: [] for name in wanted.keep})

    def add(self, wanted: RowSelection, row: int, values: Any) -> None:
        """Add the wanted columns of a row, unless they are refused with a BadValueError."""
        value, kept = wanted.value_in(values), wanted.kept_in(values)
        self.add_value(row, value)
        for items, item in zip(self.kept.values(), kept, strict=True):
            items.append(item)

    def add_value(self, row: int, value: Any) -> None:
        self.rows.append(row)
        self.values.append(value)

    def refuse(self, uri: str, row: int, reason: object) -> None:
        self.bad.append(BadRow(uri, row, str(reason)))

    def take(self, are_taken: Iterable[bool]) -> RowBatch:
        """Return the batch with these of its rows alone, and all bad ones."""
        kept = {name: list(compress(values, are_taken)) for name, values in self.kept.items()}
        values, rows = compress(self.values, are_taken), compress(self.rows, are_taken)
        return replace(self, values=list(values), rows=list(rows), kept=kept)

    @property
    def num_rows(self) -> int:
        """Number of rows, bad ones included."""
        return len(self.rows) + len(self.bad)
