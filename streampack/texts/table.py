"""The rows of texts as a table of text shards, before any of them is tokenized.

::

    files --list, count--> pieces: the rows of each 4 MiB of lines, row group, record batch, shard
                 '--cut--> text shards: runs of rows of about max(4 MiB, text / 65,536) of text

A shard lies in one unit, which is what can be decoded alone: a byte range of plain lines,
neighbouring row groups or record batches, an MDS shard, a compressed file. Files that are smaller
than a shard share one: its units are then those whole files, in order.

The cut is a function of the files alone: names, sizes, rows and bytes of text. It knows neither the
tokenizer nor the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streampack.texts.inputs.slices import InputSlice, RowBatch
from streampack.texts.inputs.values import RowSelection
from streampack.texts.transform import Transform
from streampack.types import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class TextShard:
    """A run of rows of one unit, or of several whole small files."""

    units: tuple[InputSlice, ...]
    """What is opened and decoded, in order; more than one are whole small files."""
    unit_rows: tuple[int, ...]
    """Rows of each unit: blank lines, bad rows and empty ones included."""
    first_row: int
    """Rows of the units before the first one of the shard."""
    num_rows: int
    """Its rows: each is a sample of the stream, some of length 0."""
    text_bytes: int
    """Estimate of its text in bytes: lines as they are, tables without compression."""
    file_row: int
    """Number of its first row in the file."""
    is_large: bool
    """Whether the unit is a row group or record batch above 64 MiB, which `decode_unit` writes
    into a file of the cache before its shards are read."""

    def place(self, row: int) -> tuple[str, int]:
        """Return the file of a row of the shard, and its number from 0 there."""
        raise NotImplementedError


class TextTable:
    """The text shards of a source: arrays, so that 200,000 take 20 MB; a value, safe to pickle."""

    files: tuple[InputSlice, ...]
    """The whole files, in the order of their rows."""
    names: tuple[str, ...]
    """Their names relative to the folder that they share; rows of memory have their digest."""
    shard_rows: Int64Array
    """Rows of each shard, shape (num_shards,)."""
    text_bytes: Int64Array
    """Estimate of the text of each shard in bytes, shape (num_shards,)."""
    first_sample: Int64Array
    """The first row of each shard among all, and their number; shape (num_shards + 1,)."""

    def __len__(self) -> int:
        """Return the number of shards."""
        raise NotImplementedError

    def shard(self, number: int) -> TextShard:
        """Return a shard."""
        raise NotImplementedError

    def digest(self) -> str:
        """Return a digest of names, sizes and the rows of each shard, for the fingerprint."""
        raise NotImplementedError


def open_table(
    files: Any, selection: RowSelection, cache: Path, *, index: str | None = None
) -> TextTable:
    """Return the table of files, or of rows in memory, which are written into the cache once.

    Args:
        files: Path, glob or URL, several of them, a list, a table of pandas or pyarrow, or a
            `datasets.Dataset`.
        selection: The column of the text, whose bytes the shards are cut by.
        cache: Folder of this node for counts and for rows of memory.
        index: Folder or URL with the counts that `streampack index` wrote.

    Raises:
        ConfigError: If lines of a store are not counted yet.
        DataError: If a file cannot be read, or has a unit that is too large.
    """
    raise NotImplementedError


def read_shard(
    shard: TextShard,
    selection: RowSelection,
    transform: Transform | None = None,
    *,
    decoded: Path | None = None,
) -> Iterator[RowBatch]:
    """Yield the rows of a shard in order; `rows` are numbered from 0 in the shard.

    Each row is good, or listed in `bad` (by file and row, as in messages; its number in the shard
    is among those that `rows` skips), or neither: a blank line, or left out by the transform. Both
    have length 0.

    Args:
        shard: A shard of a table.
        selection: The column of the value.
        transform: What is called with each row.
        decoded: The file that `decode_unit` wrote, for a shard that `is_large`.

    Raises:
        DataError: If the file is damaged, has changed, or has other rows than the table says.
    """
    raise NotImplementedError


def decode_unit(shard: TextShard, selection: RowSelection | None, path: Path) -> None:
    """Write the rows of the unit of a large shard as a file of Arrow IPC, which is mapped.

    All shards of the unit read the same file; `selection=None` keeps all columns, for a transform.
    """
    raise NotImplementedError
