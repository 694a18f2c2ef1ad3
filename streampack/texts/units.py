"""Pieces of files, and their cut into text shards.

::

    rows.jsonl, .csv    lines up to the first end at or after each multiple of 4 MiB
    rows.parquet        row groups              rows.arrow    record batches
    shard.00000.mds     the shard               a.txt         the file

Pieces do not depend on the cut. With text shards of S bytes, neighbouring pieces that begin in the
same S bytes of text are a unit; so are neighbouring files that are smaller than S. A unit of a
table, or a shard of MDS, is cut further, into shards of equal numbers of rows. `streampack write`
takes units whose rows are not counted, so that no line is read before it is written.

Cost: lines are counted once, at 1 to 2 GB/s; of tables, headers alone are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np

from streampack._paths import is_url
from streampack._threads import ordered_thread_map
from streampack.errors import DamagedInputError, DataError
from streampack.texts.inputs.lines import DELIMITERS, csv_ends, refuse_array
from streampack.texts.inputs.read import read_pieces
from streampack.texts.inputs.shards import is_compressed_shard, raw_bytes_of
from streampack.texts.inputs.slices import InputSlice
from streampack.texts.inputs.sources import open_input
from streampack.texts.inputs.tables import batch_sizes, group_sizes
from streampack.texts.inputs.values import RowSelection
from streampack.types import BoolArray, Int64Array

ROWS, TEXT, AT_REST = range(2, 5)
"""Columns of pieces, after begin and end as in an `InputSlice`: rows, bytes of text and at rest."""
SHARD_BYTES = 4 << 20
MAX_SHARDS = 1 << 16  # about; each has at least 4 MiB
UNIT_BYTES = 64 << 20
SCAN_BYTES = 1 << 16  # for the end of a line
THREADS = 8  # reading and decompression take most of the time, and run in parallel
HEAD_BYTES = 4096  # of a decoded unit beside its rows, in Arrow IPC
LINES = ("jsonl", *DELIMITERS)
TABLES = ("parquet", "arrow")
Piece = tuple[int, int, int, int, int]


def is_counted(file: InputSlice) -> bool:
    """Return whether the pieces of a file are in it; else its slice says its rows."""
    return file.format in (*LINES, *TABLES)


def join_pieces(
    files: Sequence[InputSlice], known: Mapping[str, Int64Array]
) -> tuple[Int64Array, Int64Array]:
    """Return the pieces of all files, shape (num_pieces, 5), and the number of each file's.

    `known` has those of files that are not one piece, by name.
    """
    # An array for each of 200,000 shards would take as long as all else that is done with them.
    whole = np.array([_whole_piece(f) for f in files if f.uri not in known], np.int64)
    each = iter(whole.reshape(-1, 1, 5))
    pieces = [known[f.uri] if f.uri in known else next(each) for f in files]
    return np.concatenate(pieces), np.array(list(map(len, pieces)), np.int64)


def _whole_piece(file: InputSlice) -> Piece:
    is_shard = file.format == "mds"
    rows, text = (file.stop, raw_bytes_of(file)) if is_shard else (1, file.num_bytes)
    return 0, file.stop, rows, text, file.num_bytes


def count_file(
    file: InputSlice,
    wanted: RowSelection,
    show: Callable[[int], object] = int,
) -> Int64Array:
    """Return the pieces of a file of lines or of a table, shape (num_pieces, 5).

    `show` is called with the number of bytes that were read.

    Raises:
        DataError: If it cannot be read, is damaged or changes meanwhile.
    """
    with open_input(file, is_sequential=file.format in LINES) as opened:
        if file.format == "parquet":
            found = group_sizes(opened.file, file.uri, wanted)
        elif file.format == "arrow":
            found = batch_sizes(opened.file, file.uri)
        else:
            chunks = read_pieces(opened.file, file.uri, file.compression, file.num_bytes)
            counted = _csv_pieces if file.format in DELIMITERS else _line_pieces
            found = counted(_shown(chunks, opened.file, show), file)
        pieces = np.array(list(found), np.int64).reshape(-1, 5)
        opened.check()
    return pieces


def _shown(
    chunks: Iterable[bytes], file: BinaryIO, show: Callable[[int], object]
) -> Iterator[bytes]:
    position = file.tell()
    for chunk in chunks:
        yield chunk
        show(file.tell() - position)
        position = file.tell()


def _line_pieces(chunks: Iterable[bytes], file: InputSlice) -> Iterator[Piece]:
    start = position = 0
    rows, last = 0, b""
    for chunk in chunks:
        if position == 0:
            refuse_array(chunk, file.uri)
        done = 0
        while True:
            end = _next_multiple(start, SHARD_BYTES)
            found = chunk.find(b"\n", max(end - 1 - position, done)) + 1
            rows += chunk.count(b"\n", done, found or len(chunk))
            if not found:
                break
            done = found
            yield start, position + done, rows, position + done - start, position + done - start
            start, rows = position + done, 0
        position += len(chunk)
        last = chunk[-1:]
    if position > start:
        yield start, position, rows + (last != b"\n"), position - start, position - start


def _csv_pieces(chunks: Iterable[bytes], file: InputSlice) -> Iterator[Piece]:
    ends = csv_ends(chunks, file)
    end = next(ends, 0)  # of the names, which are in the first piece
    start = rows = 0
    for end in ends:
        rows += 1
        if end >= _next_multiple(start, SHARD_BYTES):
            yield start, end, rows, end - start, end - start
            start, rows = end, 0
    if rows:
        yield start, end, rows, end - start, end - start


def _next_multiple(position: int, of: int) -> int:
    return (position // of + 1) * of


def uncounted_units(
    files: Sequence[InputSlice], wanted: RowSelection, size: int, *, skips_damage: bool = False
) -> list[tuple[InputSlice, ...]]:
    """Return units of about `size` bytes of text, of which no row is counted.

    JSON lines are cut without reading them, Parquet by its footer. Other files, compressed ones and
    those of up to `size` bytes are not opened. With `skips_damage`, a damaged one is not cut.

    Raises:
        DataError: If a file cannot be read, is damaged or changes meanwhile.
    """
    large = [f for f in files if f.num_bytes > size and f.compression is None]
    cut = [file for file in large if file.format in ("jsonl", "parquet")]

    def pieces_of(file: InputSlice) -> Int64Array:
        whole = np.array([_whole_piece(file)], np.int64)
        try:
            is_lines = file.format == "jsonl"
            found = _uncounted(file, size) if is_lines else count_file(file, wanted)
        except DamagedInputError:
            if not skips_damage:
                raise
            return whole
        return found if len(found) else whole

    found = ordered_thread_map(cut, pieces_of, 2 * THREADS, THREADS)
    known = dict(zip((file.uri for file in cut), found, strict=True))
    units = join_units(files, *join_pieces(files, known), size)
    return [units.slices(unit) for unit in range(len(units.begins) - 1)]


def _uncounted(file: InputSlice, size: int) -> Int64Array:
    """Return the pieces of lines up to the first end at or after each multiple of `size` bytes."""
    pieces, start = [], 0
    with open_input(file, is_sequential=False) as opened:
        while start < file.num_bytes:
            opened.file.seek(min(_next_multiple(start, size), file.num_bytes) - 1)
            while (read := opened.file.readline(SCAN_BYTES)) and not read.endswith(b"\n"):
                pass
            stop = opened.file.tell()
            pieces.append((start, stop, 0, stop - start, stop - start))
            start = stop
    return np.array(pieces, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """What is read alone, as pieces of files."""

    files: Sequence[InputSlice]
    pieces: Int64Array
    """Shape (num_pieces, 5)."""
    of_file: Int64Array
    """The first piece of each file, and their number; shape (num_files + 1,)."""
    begins: Int64Array
    """The first piece of each unit, and their number; shape (num_units + 1,)."""
    of_unit: Int64Array
    """The first file of each unit, and one past the last; shape (num_units, 2)."""

    def slices(self, unit: int) -> tuple[InputSlice, ...]:
        """Return the slices of files that a unit has, in order."""
        begin, end = self.begins[unit : unit + 2].tolist()
        first, stop = self.of_unit[unit].tolist()
        files = tuple(self.files[first:stop])
        is_all = self.of_file[first] == begin and self.of_file[stop] == end
        if is_all or not is_seekable(files[0]):
            return files
        starts, stops, *_, at_rest = zip(*self.pieces[begin:end].tolist(), strict=True)
        return (replace(files[0], start=starts[0], stop=stops[-1], num_bytes=sum(at_rest)),)


def is_seekable(file: InputSlice) -> bool:
    """Return whether pieces of a file are read without those before them."""
    return file.compression is None and file.format in (*TABLES, *LINES)


def join_units(
    files: Sequence[InputSlice], pieces: Int64Array, num_pieces: Int64Array, size: int
) -> Units:
    """Return the units of files, whose pieces are known, of about `size` bytes of text.

    Neighbouring pieces that begin in the same `size` bytes are one, and so are small files. A piece
    of a table that is larger than a unit may be is alone.
    """
    owner = np.repeat(np.arange(len(files)), num_pieces)
    text = pieces[:, TEXT]
    is_small = (np.bincount(owner, text, len(files)) < size)[owner]
    is_large = (text > max(UNIT_BYTES, size)) & _are_of(files, TABLES)[owner]
    is_next = np.diff(owner, prepend=-1) > 0
    is_alone = is_next & ~(is_small & np.roll(is_small, 1)) | is_large | np.roll(is_large, 1)
    is_alone[0] = True
    first = np.maximum.accumulate(np.where(is_alone, np.arange(len(owner)), 0))
    before = np.cumsum(text) - text
    of_file = np.append(0, np.cumsum(num_pieces))
    begin = np.where(is_small, before[of_file[owner]], before)  # a small file is not cut
    is_begin = is_alone | (np.diff((begin - before[first]) // size, prepend=0) != 0)
    begins = np.append(np.flatnonzero(is_begin), len(owner))
    of_unit = np.stack([owner[begins[:-1]], owner[begins[1:] - 1] + 1], 1)
    return Units(files=files, pieces=pieces, of_file=of_file, begins=begins, of_unit=of_unit)


def _are_of(files: Sequence[InputSlice], formats: Sequence[str]) -> BoolArray:
    return np.array([file.format in formats for file in files])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """Text shards: each unit is one, or several of equal numbers of rows."""

    units: Units
    unit: Int64Array
    """The unit of each shard, shape (num_shards,), as are the others."""
    first_row: Int64Array
    """Rows of the unit before the shard."""
    rows: Int64Array
    text: Int64Array
    """Estimate of its text in bytes: lines as they are, tables without compression."""
    decoded: Int64Array
    """Bytes of text that are decoded once for it and other shards, else 0."""


def shard_bytes(text_bytes: int) -> int:
    """Return the bytes of text of a shard, for a source that has so many.

    >>> [shard_bytes(size) >> 20 for size in (0, 256 << 30, (256 << 30) + 1)]
    [4, 4, 8]
    """
    least = -(-text_bytes // MAX_SHARDS)
    return max(SHARD_BYTES, 1 << (least - 1).bit_length() if least else 0)


def cut_pieces(files: Sequence[InputSlice], pieces: Int64Array, num_pieces: Int64Array) -> Cut:
    """Cut files, whose pieces are known, into text shards.

    Raises:
        DataError: If there are 0 rows, or a compressed file of lines is too large.
    """
    if not pieces[:, ROWS].sum():
        names = ", ".join(file.uri for file in files[:3])
        raise DataError(f"{names}: 0 rows; name files of rows, or omit the source")
    size = shard_bytes(int(pieces[:, TEXT].sum()))
    limit = max(UNIT_BYTES, size)
    owner = np.repeat(np.arange(len(files)), num_pieces)
    _refuse_large(files, np.bincount(owner, pieces[:, TEXT], len(files)), limit)
    units = join_units(files, pieces, num_pieces, size)
    first, file = units.begins[:-1], units.of_unit[:, 0]
    rows, text = np.add.reduceat(pieces, first)[:, [ROWS, TEXT]].T
    is_one = units.of_unit[:, 1] == file + 1
    # A unit is cut by rows where they are counted before they are read.
    is_cut = _are_of(files, (*TABLES, "mds"))[file] & is_one
    num = np.where(is_cut, np.clip(text // size, 1, np.maximum(rows, 1)), 1)
    num[rows == 0] = 0
    unit = np.repeat(np.arange(len(first)), num)
    part = np.arange(len(unit)) - np.repeat(np.cumsum(num) - num, num)

    def edge(values: Int64Array, ahead: int) -> Int64Array:
        cut: Int64Array = values[unit] * (part + ahead) // num[unit]
        return cut

    num_rows, num_bytes = (edge(each, 1) - edge(each, 0) for each in (rows, text))
    # Neighbours that read the same, which is decoded once unless that would save nothing.
    is_whole = ~np.array([is_seekable(each) for each in files])[file] & is_one
    is_next = np.where(is_whole, np.diff(file, prepend=-1) > 0, True)
    shared = (np.cumsum(is_next) - 1)[unit]
    is_large = _are_of(files, TABLES)[file] & (pieces[first, TEXT] > limit)
    is_decoded = is_one & ~_are_direct(files)[file] | is_large
    total = np.bincount(shared, num_bytes + 8 * num_rows) + HEAD_BYTES
    total[np.bincount(shared) < 2] = 0
    return Cut(
        units=units,
        unit=unit,
        first_row=edge(rows, 0),
        rows=num_rows,
        text=num_bytes,
        decoded=np.where(is_decoded[unit], total.astype(np.int64)[shared], 0),
    )


def _are_direct(files: Sequence[InputSlice]) -> BoolArray:
    """Return of which files each shard reads its rows as cheaply as from a decoded copy."""
    return np.array(
        [
            not is_url(file.uri)
            and file.compression is None
            and (file.format == "arrow" or (file.format == "mds" and not is_compressed_shard(file)))
            for file in files
        ]
    )


def _refuse_large(files: Sequence[InputSlice], file_text: Int64Array, limit: int) -> None:
    for number in np.flatnonzero(file_text > limit).tolist():
        if files[number].compression is not None and files[number].format in LINES:
            raise DataError(
                f"{files[number].uri}: has {int(file_text[number]) >> 20} MiB of lines, which "
                f"are read from the start every time, so {limit >> 20} MiB are the limit; "
                "decompress it, or write it as several files or as Parquet",
                uri=files[number].uri,
            )
