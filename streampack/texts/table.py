"""The rows of texts as a table of text shards, before any of them is tokenized.

::

    files --list, count--> pieces: the rows of each 4 MiB of lines, row group, record batch, shard
                 '--cut--> text shards: runs of rows of about max(4 MiB, text / 65,536) of text

A shard is inside one unit, which is what can be decoded alone: a byte range of plain lines,
neighbouring row groups or record batches, an MDS shard, a compressed file. Files that are smaller
than a shard share one: its units are then those whole files, in order.

The cut is a function of the files alone: sizes, rows and bytes of text. It knows neither the
tokenizer nor the machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from streampack._paths import absolute_path, folder_of, shown_path
from streampack.errors import DataError
from streampack.texts.counts import count_files
from streampack.texts.inputs.listing import list_inputs
from streampack.texts.inputs.read import read_pieces, read_rows, with_contents
from streampack.texts.inputs.shards import shard_contents, unpacked
from streampack.texts.inputs.slices import BadRow, InputSlice, RowBatch
from streampack.texts.inputs.sources import file_version, open_input
from streampack.texts.inputs.tables import (
    RECORD_BATCH,
    arrow_messages,
    load_pyarrow,
    unit_batches,
)
from streampack.texts.inputs.values import RowSelection
from streampack.texts.memory import mapped_files, write_memory
from streampack.texts.transform import Transform
from streampack.texts.units import (
    ROWS,
    SHARD_BYTES,
    TABLES,
    Cut,
    cut_pieces,
    is_counted,
    join_pieces,
)
from streampack.types import Int64Array

MEMORY = "rows"  # what messages call rows in memory


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
    file_row: int
    """Number of its first row in the file."""
    decoded_bytes: int
    """About the bytes of the file of the cache that `decode_unit` writes of the unit, before its
    shards are read; 0 if they read the unit itself."""
    is_memory: bool = False
    """Whether the rows were in memory."""

    def place(self, row: int) -> tuple[str, int]:
        """Return the file of a row of the shard, and its number from 0 there."""
        if len(self.units) == 1:
            return MEMORY if self.is_memory else self.units[0].uri, self.file_row + row
        ends, row = np.cumsum(self.unit_rows), row + self.first_row
        number = int(np.searchsorted(ends, row, "right"))
        return self.units[number].uri, row - int(ends[number]) + self.unit_rows[number]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextTable:
    """The text shards of a source: arrays, so that 200,000 take 20 MB; a value, safe to pickle."""

    cut: Cut
    memory: str | None = None
    """The digest of rows that were in memory."""
    first_sample: Int64Array = field(init=False)
    """The first row of each shard among all, and their number; shape (num_shards + 1,)."""
    before: Int64Array = field(init=False)
    """Rows before each piece of files, and their number; shape (num_pieces + 1,)."""

    def __post_init__(self) -> None:
        for name, rows in (
            ("first_sample", self.cut.rows),
            ("before", self.cut.units.pieces[:, ROWS]),
        ):
            object.__setattr__(self, name, np.append(0, np.cumsum(rows)))

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.cut.rows)

    def shard(self, number: int) -> TextShard:
        """Return a shard."""
        cut, units, unit = self.cut, self.cut.units, int(self.cut.unit[number])
        slices, skipped = units.slices(unit), int(cut.first_row[number])
        first, stop = units.of_unit[unit].tolist()
        ends = self.before[units.of_file[first : stop + 1]].tolist()
        begin, end = self.before[units.begins[unit : unit + 2]].tolist()
        file_row = begin - ends[0] + skipped
        is_cut = slices[0].stop != units.files[first].stop
        return TextShard(
            units=slices,
            unit_rows=(end - begin,) if is_cut else tuple(b - a for a, b in pairwise(ends)),
            first_row=skipped if is_cut else file_row,
            num_rows=int(cut.rows[number]),
            file_row=file_row,
            decoded_bytes=int(cut.decoded[number]),
            is_memory=self.memory is not None,
        )

    def digest(self) -> str:
        """Return a digest of names, sizes and the rows of each shard, for the fingerprint.

        Names are relative to the folder that the files share.
        """
        inputs = self.cut.units.files
        shared = os.path.commonprefix([file.uri for file in inputs])  # noqa: RUF071
        below = shared.rfind("/") + 1
        files: list[object] = [(file.uri[below:], file.num_bytes) for file in inputs]
        digest = hashlib.blake2b(json.dumps(self.memory or files).encode(), digest_size=16)
        digest.update(self.cut.rows.tobytes())
        return digest.hexdigest()


def open_table(
    files: Any,
    selection: RowSelection,
    cache: Path,
    *,
    transform: Transform | None = None,
    index: str | os.PathLike[str] | None = None,
) -> TextTable:
    """Return the table of files, or of rows in memory, which are written into the cache once.

    Args:
        files: Path, glob or URL, a list of rows, a table of pandas or pyarrow, or a
            `datasets.Dataset`. The items of a list are rows, also where they are strings.
        selection: The column of the text, whose bytes the shards are cut by.
        cache: Folder of this node for counts and for rows of memory.
        transform: What will be called with each row; it needs all columns.
        index: Folder or URL with the counts that `streampack index` wrote.

    Raises:
        ConfigError: If lines of a store are not counted yet, or rows cannot be read twice.
        DataError: If a file cannot be read, or is too large to be read from its beginning.

    >>> from pathlib import Path
    >>> folder = Path(getfixture("tmp_path"))
    >>> _ = (folder / "a.jsonl").write_text('{"text": "one"}\\n\\n{"text": "two"}\\n')
    >>> table = open_table(folder / "a.jsonl", RowSelection("text", "text"), folder)
    >>> len(table), table.cut.rows.tolist(), table.shard(0).place(2)[1]
    (1, [3], 2)
    """
    wanted = selection if transform is None else RowSelection("row", selection.name)
    is_path = isinstance(files, str | os.PathLike)
    inputs = [shown_path(files)] if is_path else mapped_files(files)
    memory = None
    if inputs is None:
        path, memory = write_memory(files, wanted, cache)
        inputs = [str(path)]
    listed = list_inputs(inputs)
    folders = map(folder_of, inputs)
    named = [
        each if path is None else os.path.normpath(absolute_path(path))
        for each, path in zip(inputs, folders, strict=True)
    ]
    known = count_files(named, list(filter(is_counted, listed)), wanted, cache, index)
    return TextTable(cut=cut_pieces(listed, *join_pieces(listed, known)), memory=memory)


def read_shard(
    shard: TextShard,
    selection: RowSelection,
    transform: Transform | None = None,
    *,
    decoded: Path | None = None,
) -> Iterator[RowBatch]:
    """Yield the rows of a shard in order; `rows` are numbered from 0 in the shard.

    Each row is good, or listed in `bad` (by file and row, as in messages; its number in the shard
    is among those that `rows` skips), or neither: a blank line, or omitted by the transform. Both
    have length 0.

    Args:
        shard: A shard of a table.
        selection: The column of the value.
        transform: What is called with each row.
        decoded: The file that `decode_unit` wrote, for a shard with `decoded_bytes`.

    Raises:
        DataError: If a file is damaged, or has changed since the table was opened.
    """
    wanted = selection if transform is None else RowSelection("row", selection.name)
    stop_row, before = shard.first_row + shard.num_rows, 0
    opened = with_contents(shard.units) if decoded is None else [(shard.units[0], None)]
    for (unit, contents), num_rows in zip(opened, shard.unit_rows, strict=True):
        taken = range(max(shard.first_row - before, 0), min(stop_row - before, num_rows))
        skipped = 0
        if decoded is not None:
            unit, skipped = _decoded(unit, decoded, taken)
        own = range(taken.start - skipped, taken.stop - skipped)
        # Rows of Parquet are numbered in the file.
        first = shard.file_row if unit.format == "parquet" else shard.first_row
        first -= before + skipped
        for batch in read_rows(unit, wanted, contents=contents, taken=own) if taken else ():
            if transform is not None:
                batch = transform.apply(batch, selection, unit.uri)
            yield replace(
                batch,
                rows=[row - first for row in batch.rows],
                bad=[BadRow(*shard.place(bad.row - first), bad.reason) for bad in batch.bad],
            )
        before += num_rows


def read_whole_row(shard: TextShard, row: int) -> dict[str, Any]:
    """Return all columns of a row of a shard, as its file has them; a blank line has none.

    Raises:
        DataError: If the row cannot be read, or the file has changed since the table was opened.
    """
    before, of_file = shard.first_row + row, shard.file_row + row
    one = replace(shard, first_row=before, file_row=of_file, num_rows=1)
    found: dict[str, Any] = {}
    for batch in read_shard(one, RowSelection("row", "")):
        for bad in batch.bad:
            raise DataError(f"{bad.uri}, row {bad.row}: {bad.reason}; fix the row", uri=bad.uri)
        [found] = batch.values
    return found


def decode_unit(shard: TextShard, selection: RowSelection, path: Path) -> None:
    """Fetch and decode the unit of a shard into a file: of a table, Arrow IPC with the columns.

    All shards of the unit read the same file, which the caller puts in its place. With a transform,
    `selection` is one of whole rows: `RowSelection("row", name)`.

    Raises:
        DataError: If the unit cannot be read.
    """
    [unit], [num_rows] = shard.units, shard.unit_rows
    if unit.format == "mds":
        path.write_bytes(shard_contents(unit))
        return
    if unit.format not in TABLES:
        with open_input(unit, is_sequential=True) as opened, path.open("wb") as file:
            file.writelines(read_pieces(opened.file, unit.uri, unit.compression, unit.num_bytes))
            opened.check()
        return
    ipc = load_pyarrow(unit.uri, "pyarrow.ipc")
    batch_rows = max(1, num_rows // max(1, shard.decoded_bytes // SHARD_BYTES))
    with open_input(unit, is_sequential=False) as opened:
        batches = unit_batches(opened.file, unit, selection, batch_rows)
        first = next(batches)
        with ipc.new_file(str(path), first.schema) as writer:
            for batch in chain([first], batches):
                writer.write_batch(batch)
        opened.check()


def _decoded(unit: InputSlice, path: Path, taken: range) -> tuple[InputSlice, int]:
    """Return the slice of a decoded unit that has some rows, and the unit's rows before it."""
    if unit.format == "mds":
        return unpacked(unit, path), 0
    status, row = path.stat(), 0
    at: dict[str, Any] = {"uri": str(path), "version": file_version(status), "compression": None}
    if unit.format not in TABLES:
        return replace(unit, **at, num_bytes=status.st_size), 0
    found: list[tuple[int, int, int]] = []
    with path.open("rb") as file:
        for kind, begin, end, rows in arrow_messages(file):
            if kind == RECORD_BATCH:
                if row < taken.stop and row + rows > taken.start:
                    found.append((begin, end, row))
                row += rows
    start, stop = found[0][0], found[-1][1]
    slice_ = replace(unit, **at, format="arrow", start=start, stop=stop, num_bytes=stop - start)
    return slice_, found[0][2]
