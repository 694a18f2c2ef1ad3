"""Rows of Parquet and Arrow files, through pyarrow.

::

    row groups [2, 5)  -->  256 rows, or 8 MiB  -->  texts as str, token lists as arrays

Token lists are views of pyarrow's memory. A value that is null, of another type or not UTF-8 makes
its row bad, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import chain, pairwise
from struct import unpack_from
from typing import Any, BinaryIO

import numpy as np

from streampack._extras import import_extra
from streampack._paths import is_url
from streampack.errors import DamagedInputError, DataError, StreampackError
from streampack.padding import PADDING_MASK
from streampack.texts.inputs.lines import ALL, MAX_BATCH_BYTES
from streampack.texts.inputs.slices import WHOLE, InputSlice, RowBatch
from streampack.texts.inputs.values import BadValueError, RowSelection
from streampack.types import IntArray

FILE_MAGIC = b"ARROW1"  # of the file format of Arrow IPC, which has a footer
CONTINUATION = b"\xff\xff\xff\xff"  # before the size of a message
STREAM_END = CONTINUATION + bytes(4)  # optional, but every known writer ends with it
SCHEMA, DICTIONARY, RECORD_BATCH = 1, 2, 3  # kinds of messages
MANY_ROWS = 4096  # with fewer, a dictionary would save little
DICTIONARY_BYTES = 2 << 20  # most writers end one at 1 MiB
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
    file: BinaryIO,
    slice_: InputSlice,
    wanted: RowSelection,
    batch_rows: int,
    taken: range = ALL,
) -> Iterator[RowBatch]:
    """Yield the rows of row groups; a DataError names a damaged one and its first byte."""
    parquet = open_parquet(file, slice_.uri)
    metadata = parquet.metadata
    stop = metadata.num_row_groups if slice_.stop == WHOLE else slice_.stop
    columns = columns_to_read(parquet.schema_arrow.names, wanted)
    counts = [metadata.row_group(group).num_rows for group in range(stop)]
    first, at = sum(counts[: slice_.start]), 0
    num_rows = max(sum(counts[slice_.start :]), 1)
    for group in range(slice_.start, stop):
        begin, at = at, at + counts[group]
        if at <= taken.start or begin >= taken.stop:
            continue
        described = metadata.row_group(group)
        most_rows = MAX_BATCH_BYTES * counts[group] // _raw_bytes(described, columns)
        size = max(1, min(batch_rows, most_rows))
        batches = parquet.iter_batches(size, [group], columns, use_threads=False)
        pages = ((c.dictionary_page_offset, c.data_page_offset) for c in column_chunks(described))
        first_byte = min(filter(None, chain.from_iterable(pages)))
        where = f"row group {group} cannot be read, from byte {first_byte}"
        named = naming_damage(batches, slice_.uri, where)
        for row, batch in _taken_of(named, begin, taken):
            for start, piece in pieces_of(batch, batch_rows, row):
                rows = convert_batch(piece, first + start, slice_.uri, wanted)
                done = start + piece.num_rows
                rows.num_bytes = slice_.num_bytes * done // num_rows  # for progress only
                yield rows


def read_arrow(
    file: BinaryIO,
    slice_: InputSlice,
    wanted: RowSelection,
    batch_rows: int,
    taken: range = ALL,
) -> Iterator[RowBatch]:
    """Yield the rows of a stream or a file of Arrow IPC, or of the messages of a slice.

    They are numbered from 0 in the slice.
    """
    batches = _record_batches(file, slice_)
    named = naming_damage(batches, slice_.uri, "cannot be read, near byte", file)
    for row, batch in _taken_of(named, 0, taken):
        columns = columns_to_read(batch.schema.names, wanted)
        selected = batch if columns is None else batch.select(columns)
        for start, piece in pieces_of(selected, batch_rows, row):
            yield convert_batch(piece, start, slice_.uri, wanted)


def _taken_of(batches: Iterable[Any], row: int, taken: range) -> Iterator[tuple[int, Any]]:
    """Yield the taken rows of record batches, of which the first begins with a row's number."""
    for batch in batches:
        begin, row = row, row + batch.num_rows
        first, last = max(begin, taken.start), min(row, taken.stop)
        if first < last:
            yield first, batch.slice(first - begin, last - first)
        if row >= taken.stop:
            return


def pieces_of(batch: Any, most_rows: int, row: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield slices of a record batch, of up to a number of rows and 8 MiB, or one row.

    Each comes after the number of its first row; `row` is that of the batch.
    """
    for start in range(0, batch.num_rows, most_rows):
        piece = batch.slice(start, most_rows)
        if piece.num_rows > 1 and piece.nbytes > MAX_BATCH_BYTES:
            yield from pieces_of(piece, piece.num_rows // 2, row + start)
        else:
            yield row + start, piece


def group_sizes(
    file: BinaryIO, uri: str, wanted: RowSelection
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield number, end, rows, bytes of the wanted columns, and bytes at rest of row groups.

    Repeated values may be kept as a dictionary and its indices: a group that is small enough for
    that is decoded, since its metadata has no other size.
    """
    parquet = open_parquet(file, uri)
    columns = columns_to_read(parquet.schema_arrow.names, wanted)
    if wanted.checks_padding:  # its mask is looked at, but adds nothing to the rows
        columns = columns and [name for name in columns if name != PADDING_MASK]
    for number in range(parquet.metadata.num_row_groups):
        group = parquet.metadata.row_group(number)
        at_rest = sum(chunk.total_compressed_size for chunk in column_chunks(group))
        raw = _raw_bytes(group, columns)
        if group.num_rows >= MANY_ROWS and raw <= DICTIONARY_BYTES + 4 * group.num_rows:
            encoded = parquet.iter_batches(256, [number], columns, use_threads=False)
            decoded = map(_without_dictionaries, encoded)
            named = naming_damage(decoded, uri, "cannot be read, near byte", file)
            raw = max(raw, sum(batch.nbytes for batch in named))
        yield number, number + 1, group.num_rows, raw, at_rest


def batch_sizes(file: BinaryIO, uri: str) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield first byte, end, rows, and bytes twice of the record batches of Arrow IPC.

    A file with dictionaries, which any later batch may need, is one piece up to its end.
    """
    where = "cannot be read, near byte"
    messages = list(naming_damage(arrow_messages(file), uri, where, file))
    batches = [message[1:] for message in messages if message[0] == RECORD_BATCH]
    if any(kind == DICTIONARY for kind, *_ in messages):
        size = _size(file)
        yield 0, WHOLE, sum(rows for *_, rows in batches), size, size
        return
    for begin, end, rows in batches:
        yield begin, end, rows, end - begin, end - begin


def unit_batches(
    file: BinaryIO, slice_: InputSlice, wanted: RowSelection, batch_rows: int
) -> Iterator[Any]:
    """Yield record batches of a slice with the wanted columns, without dictionaries."""
    if slice_.format == "parquet":
        parquet = open_parquet(file, slice_.uri)
        columns = columns_to_read(parquet.schema_arrow.names, wanted)
        stop = parquet.metadata.num_row_groups if slice_.stop == WHOLE else slice_.stop
        groups = list(range(slice_.start, stop))
        batches = parquet.iter_batches(batch_rows, groups, columns, use_threads=False)
    else:
        batches = _record_batches(file, slice_)

    def _plain(batch: Any) -> Any:
        columns = columns_to_read(batch.schema.names, wanted)
        return _without_dictionaries(batch if columns is None else batch.select(columns))

    for plain in naming_damage(map(_plain, batches), slice_.uri, "cannot be read, near byte", file):
        yield from (plain.slice(at, batch_rows) for at in range(0, plain.num_rows, batch_rows))


def _without_dictionaries(batch: Any) -> Any:
    """Return a record batch with values in place of dictionaries, also within lists and structs."""
    pyarrow = import_module("pyarrow")

    def _plain(array: Any) -> Any:
        plain = _plain_type(array.type)
        if plain == array.type:
            return array
        # pyarrow 26 casts list views of dictionaries to invalid arrays.
        has_views = "list_view<" in str(array.type)
        return pyarrow.array(array.to_pylist(), plain) if has_views else array.cast(plain)

    return pyarrow.RecordBatch.from_arrays([*map(_plain, batch.columns)], batch.schema.names)


def _plain_type(kind: Any) -> Any:
    pyarrow = import_module("pyarrow")
    types = pyarrow.types
    if types.is_dictionary(kind):
        return kind.value_type
    fields = [kind.field(number) for number in range(kind.num_fields)]
    plain = [field.with_type(_plain_type(field.type)) for field in fields]
    if plain == fields:
        return kind
    if types.is_struct(kind):
        return pyarrow.struct(plain)
    if types.is_map(kind):
        return pyarrow.map_(*plain[0].type)
    is_list = len(plain) == 1 and not types.is_union(kind)
    return pyarrow.large_list(*plain) if is_list else kind  # others cannot be converted


def arrow_messages(file: BinaryIO) -> Iterator[tuple[int, int, int, int]]:
    """Yield kind, first byte, end and rows of each message of a stream or file of Arrow IPC.

    The kind is `SCHEMA`, `DICTIONARY` or `RECORD_BATCH`. Bodies are not read.
    """
    begin = 8 if file.read(len(FILE_MAGIC)) == FILE_MAGIC else 0
    while True:
        file.seek(begin)
        head = file.read(8)
        if len(head) < 8:
            raise EOFError(f"ends at byte {begin + len(head)} without the mark of its end")
        if head[:4] == CONTINUATION:
            head = head[4:]
        else:
            file.seek(begin + 4)  # as pyarrow wrote before 0.15
        (size,) = unpack_from("<i", head)
        if size == 0:
            return
        metadata = file.read(size)
        message = unpack_from("<I", metadata)[0]
        kind = unpack_from("<B", metadata, _field(metadata, message, 1))[0]
        body = _field(metadata, message, 3)
        end = file.tell() + (unpack_from("<q", metadata, body)[0] if body else 0)
        rows = 0
        if kind == RECORD_BATCH:
            header = _field(metadata, message, 2)
            table = header + unpack_from("<I", metadata, header)[0]
            length = _field(metadata, table, 0)
            rows = unpack_from("<q", metadata, length)[0] if length else 0
        yield kind, begin, end, rows
        begin = end


def _field(data: bytes, table: int, number: int) -> int:
    """Return the position of a field of a flatbuffer's table; 0 if it has its default."""
    fields = table - unpack_from("<i", data, table)[0]
    position = 4 + 2 * number
    if position >= unpack_from("<H", data, fields)[0]:
        return 0
    offset: int = unpack_from("<H", data, fields + position)[0]
    return table + offset if offset else 0


def _record_batches(file: BinaryIO, slice_: InputSlice) -> Iterator[Any]:
    uri = slice_.uri
    ipc = load_pyarrow(uri, "pyarrow.ipc")
    if slice_.stop != WHOLE:
        _, begin, end, _ = next(arrow_messages(file))
        file.seek(begin)
        schema = file.read(end - begin)
        file.seek(slice_.start)
        yield from ipc.open_stream(schema + file.read(slice_.stop - slice_.start) + STREAM_END)
        return
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


def columns_to_read(names: Sequence[str], wanted: RowSelection) -> list[str] | None:
    """Return the columns to read, or None to read all; each row is then bad, as it lacks one."""
    try:
        return _with_padding_mask(wanted.columns_in(names), names, wanted)
    except BadValueError:
        return None


def _with_padding_mask(columns: list[str], names: Sequence[str], wanted: RowSelection) -> list[str]:
    is_checked = wanted.checks_padding and PADDING_MASK in names
    return [*columns, PADDING_MASK] if is_checked else columns


def convert_batch(batch: Any, first: int, uri: str, wanted: RowSelection) -> RowBatch:
    """Return the rows of a record batch of pyarrow, numbered from `first` on."""
    num_rows, rows = batch.num_rows, RowBatch.of(wanted)
    try:
        names = _with_padding_mask(
            wanted.columns_in(batch.schema.names), batch.schema.names, wanted
        )
    except BadValueError as error:
        for row in range(num_rows):
            rows.refuse(uri, first + row, error)
        return rows
    columns = {name: _values_of(batch.column(name)) for name in names}
    masks = columns.get(PADDING_MASK, ())
    values, kept = columns[names[0]], {name: columns[name] for name in wanted.keep}
    encodings = {name: _encoding_of(batch.column(name)) for name in wanted.keep}
    types = {name: encoding for name, encoding in encodings.items() if encoding}
    are_usable = not any(BadValueError in map(type, column) for column in kept.values())
    are_usable &= not any(wanted.may_pad({PADDING_MASK: mask}) for mask in masks)
    if are_usable and set(map(type, values)) == {CONVERTED.get(wanted.option)}:
        return RowBatch(values, kept, types, list(range(first, first + num_rows)))
    rows.types = types
    for row in range(num_rows):
        try:
            found = {each: column[row] for each, column in columns.items()}
            for name, value in found.items():
                if isinstance(value, BadValueError):
                    raise BadValueError(f"column {name!r} {value}")
            rows.add(wanted, first + row, found)
        except BadValueError as error:
            rows.refuse(uri, first + row, error)
    return rows


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
    offsets = _numbers_of(column.offsets)
    first, last = int(offsets[0]), int(offsets[-1])
    used = items.slice(first, last - first)
    if used.null_count:
        return [_value_at(column, row) for row in range(len(column))]
    numbers, edges = _numbers_of(used), (offsets - first).tolist()
    lists: list[Any] = [numbers[begin:end] for begin, end in pairwise(edges)]
    if column.null_count:
        for row in np.flatnonzero(_numbers_of(column.is_null())).tolist():
            lists[row] = None
    return lists


def _numbers_of(array: Any) -> IntArray:
    """Return the integers or bools of an array without nulls."""
    # `to_numpy` imports pandas, which takes a worker longer than all else that it imports.
    is_boolean = import_module("pyarrow.types").is_boolean(array.type)
    numbers: Any = np.from_dlpack(array.cast("uint8") if is_boolean else array)
    found: IntArray = numbers
    return found


def _raw_bytes(group: Any, columns: list[str] | None) -> int:
    """Return the bytes of a row group's columns without compression; at least 1."""
    return 1 + sum(
        int(column.total_uncompressed_size)
        for column in column_chunks(group)
        if columns is None or any(f"{column.path_in_schema}.".startswith(f"{n}.") for n in columns)
    )


def column_chunks(group: Any) -> Iterator[Any]:
    """Yield the metadata of a row group's columns."""
    return map(group.column, range(group.num_columns))


def _size(file: BinaryIO) -> int:
    position = file.tell()
    size = file.seek(0, 2)
    file.seek(position)
    return size
