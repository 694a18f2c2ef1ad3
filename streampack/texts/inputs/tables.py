"""Rows of Parquet and Arrow files, through pyarrow.

::

    row groups [2, 5)  -->  256 rows, or 8 MiB  -->  texts as str, token lists as arrays

Token lists are views of pyarrow's memory. A value that is null, of another type or not UTF-8 makes
its row bad, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import chain, pairwise
from typing import Any, BinaryIO

import numpy as np

from streampack._extras import import_extra
from streampack._paths import is_url
from streampack.errors import DamagedInputError, DataError, StreampackError
from streampack.texts.inputs.lines import MAX_BATCH_BYTES, BatchCollector
from streampack.texts.inputs.slices import WHOLE, BadRow, InputSlice, RowBatch
from streampack.texts.inputs.values import BadValueError, RowSelection

FILE_MAGIC = b"ARROW1"  # of the file format of Arrow IPC, which has a footer
STREAM_END = b"\xff\xff\xff\xff" + bytes(4)  # optional, but every known writer ends with it
CONVERTED = {"text": str, "tokens": np.ndarray}  # values to keep as they are


def load_pyarrow(uri: str, name: str = "pyarrow") -> Any:
    """Return a module of pyarrow, or raise a ConfigError with the command that installs it."""
    return import_extra(name, "tables", f"{uri}: a Parquet or Arrow file")


def open_parquet(file: BinaryIO, uri: str) -> Any:
    """Return a Parquet file."""
    parquet = load_pyarrow(uri, "pyarrow.parquet")
    # Coalesced requests hold a row group in memory, which is worth it for a store only.
    open_file = partial(parquet.ParquetFile, pre_buffer=is_url(uri), buffer_size=1 << 20)
    return _opened(open_file, file, uri)


def _opened(open_file: Callable[[BinaryIO], Any], file: BinaryIO, uri: str) -> Any:
    where = f"has no valid footer before its end at byte {_size(file)}"
    return next(naming_damage(map(open_file, [file]), uri, where))


def read_parquet(
    file: BinaryIO, slice_: InputSlice, wanted: RowSelection, batch_rows: int
) -> Iterator[RowBatch]:
    """Yield the rows of row groups; a DataError names a damaged one and its first byte."""
    parquet = open_parquet(file, slice_.uri)
    metadata = parquet.metadata
    stop = metadata.num_row_groups if slice_.stop == WHOLE else slice_.stop
    columns = _columns_of(parquet.schema_arrow.names, wanted)
    counts = [metadata.row_group(group).num_rows for group in range(stop)]
    row = first = sum(counts[: slice_.start])
    num_rows = max(sum(counts[slice_.start :]), 1)
    for group in range(slice_.start, stop):
        described = metadata.row_group(group)
        most_rows = MAX_BATCH_BYTES * counts[group] // _raw_bytes(described, columns)
        size = max(1, min(batch_rows, most_rows))
        batches = parquet.iter_batches(size, [group], columns, use_threads=False)
        pages = ((c.dictionary_page_offset, c.data_page_offset) for c in column_chunks(described))
        first_byte = min(filter(None, chain.from_iterable(pages)))
        where = f"row group {group} cannot be read, from byte {first_byte}"
        for batch in naming_damage(batches, slice_.uri, where):
            for piece in pieces_of(batch, batch_rows):
                rows = convert_batch(piece, row, slice_.uri, wanted)
                row += piece.num_rows
                rows.num_bytes = slice_.num_bytes * (row - first) // num_rows  # for progress only
                yield rows


def read_arrow(
    file: BinaryIO, slice_: InputSlice, wanted: RowSelection, batch_rows: int
) -> Iterator[RowBatch]:
    """Yield the rows of a stream or a file of Arrow IPC, which is always read whole."""
    row, batches = 0, _record_batches(file, slice_.uri)
    for batch in naming_damage(batches, slice_.uri, "cannot be read, near byte", file):
        columns = _columns_of(batch.schema.names, wanted)
        for piece in pieces_of(batch if columns is None else batch.select(columns), batch_rows):
            yield convert_batch(piece, row, slice_.uri, wanted)
            row += piece.num_rows


def pieces_of(batch: Any, most_rows: int) -> Iterator[Any]:
    """Yield slices of a record batch, of up to a number of rows and 8 MiB, or one row."""
    for start in range(0, batch.num_rows, most_rows):
        piece = batch.slice(start, most_rows)
        if piece.num_rows > 1 and piece.nbytes > MAX_BATCH_BYTES:
            yield from pieces_of(piece, piece.num_rows // 2)
        else:
            yield piece


def _record_batches(file: BinaryIO, uri: str) -> Iterator[Any]:
    ipc = load_pyarrow(uri, "pyarrow.ipc")
    magic, size = file.read(len(FILE_MAGIC)), _size(file)
    if magic == FILE_MAGIC:
        reader = _opened(ipc.open_file, file, uri)
        yield from map(reader.get_batch, range(reader.num_record_batches))
        return
    file.seek(max(0, size - len(STREAM_END)))
    if file.read(len(STREAM_END)) != STREAM_END:  # it may be cut after a batch
        raise EOFError(f"ends at byte {size} without the mark of its end")
    file.seek(0)
    yield from ipc.open_stream(file)


def naming_damage(batches: Iterator[Any], uri: str, where: str, file: Any = None) -> Iterator[Any]:
    """Yield batches; raise pyarrow's errors as ones that name the file and the byte."""
    try:
        yield from batches
    except StreampackError:
        raise
    except EOFError as error:
        raise DamagedInputError(
            f"{uri}: {error}: it was cut short or damaged; make a new copy", uri=uri
        ) from error
    except Exception as error:  # ArrowInvalid, OSError and others
        byte = "" if file is None else f" {min(file.tell(), _size(file))} of {_size(file)}"
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        # pyarrow's error has a number only if the system failed.
        kind = DataError if getattr(error, "errno", None) else DamagedInputError
        raise kind(
            f"{uri}: {where}{byte} ({line}); it was cut short or damaged: make a new copy", uri=uri
        ) from error


def _columns_of(names: list[str], wanted: RowSelection) -> list[str] | None:
    """Return the columns to read, or None to read all; each row is then bad, as it lacks one."""
    try:
        return wanted.columns_in(names)
    except BadValueError:
        return None


def convert_batch(batch: Any, first: int, uri: str, wanted: RowSelection) -> RowBatch:
    """Return the rows of a record batch of pyarrow, numbered from `first` on."""
    num_rows = batch.num_rows
    try:
        names = wanted.columns_in(batch.schema.names)
    except BadValueError as error:
        bad = [BadRow(uri, first + row, str(error)) for row in range(num_rows)]
        return RowBatch(kept={each: [] for each in wanted.keep}, bad=bad)
    columns = {name: _values_of(batch.column(name)) for name in names}
    values, kept = columns[names[0]], {name: columns[name] for name in wanted.keep}
    encodings = {name: _encoding_of(batch.column(name)) for name in wanted.keep}
    types = {name: encoding for name, encoding in encodings.items() if encoding}
    are_usable = not any(BadValueError in map(type, column) for column in kept.values())
    if are_usable and set(map(type, values)) == {CONVERTED.get(wanted.option)}:
        return RowBatch(values, kept, types, list(range(first, first + num_rows)))
    rows = BatchCollector(uri, wanted)
    rows.batch.types = types
    for row in range(num_rows):
        try:
            found = {each: column[row] for each, column in columns.items()}
            for name, value in found.items():
                if isinstance(value, BadValueError):
                    raise BadValueError(f"column {name!r} {value}")
            rows.add(first + row, found)
        except BadValueError as error:
            rows.refuse(first + row, error)
    return rows.batch


def _values_of(column: Any) -> list[Any]:
    types = import_module("pyarrow.types")
    kind = column.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        if types.is_integer(kind.value_type) or types.is_boolean(kind.value_type):
            return _integer_lists(column)
    elif types.is_temporal(kind) or types.is_decimal(kind):
        column = column.cast("string")
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):  # a text that is not UTF-8, for example
        values = [_value_at(column, row) for row in range(len(column))]
    return values


def _encoding_of(column: Any) -> str | None:
    types, kind = import_module("pyarrow.types"), column.type
    if types.is_uint64(kind):
        return "uint64"
    if types.is_integer(kind):
        return "int"
    return "float64" if types.is_floating(kind) else None


def _value_at(column: Any, row: int) -> Any:
    try:
        return column[row].as_py()
    except UnicodeDecodeError as error:
        return BadValueError(f"is not valid UTF-8 at its byte {error.start}")
    except (ValueError, OverflowError) as error:
        return BadValueError(f"cannot be converted ({error})")


def _integer_lists(column: Any) -> list[Any]:
    """Return the lists of a column as views of one array; None where a list is null."""
    pyarrow = import_module("pyarrow")
    types = import_module("pyarrow.types")
    if types.is_fixed_size_list(column.type):
        column = column.cast(pyarrow.large_list(column.type.value_type))
    items = column.values
    offsets = column.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    used = items.slice(first, last - first)
    if used.null_count:
        return [_value_at(column, row) for row in range(len(column))]
    numbers = used.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind == "b":
        numbers = numbers.astype(np.uint8)
    edges = (offsets - first).tolist()
    lists: list[Any] = [numbers[begin:end] for begin, end in pairwise(edges)]
    if column.null_count:
        for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)):
            lists[int(row)] = None
    return lists


def _raw_bytes(group: Any, columns: list[str] | None) -> int:
    """Return the bytes of a row group's columns without compression; at least 1."""
    return 1 + sum(
        int(column.total_uncompressed_size)
        for column in column_chunks(group)
        if columns is None or column.path_in_schema.partition(".")[0] in columns
    )


def column_chunks(group: Any) -> Iterator[Any]:
    """Yield the metadata of a row group's columns."""
    return map(group.column, range(group.num_columns))


def _size(file: BinaryIO) -> int:
    position = file.tell()
    size = file.seek(0, 2)
    file.seek(position)
    return size


READERS: dict[str, Callable[[BinaryIO, InputSlice, RowSelection, int], Iterator[RowBatch]]] = {
    "parquet": read_parquet,
    "arrow": read_arrow,
}
