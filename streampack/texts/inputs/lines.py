"""Rows of JSON lines, text files and CSV.

::

    pieces of any size --> blocks of whole lines --> orjson, one line at a time --> batches

A bad line is one bad row. A broken quote in CSV ends the file: it may hide where any later row
begins.

Cost: one core reads about 700 MB/s of JSON lines, and 500 MB/s where zstd has to be decompressed.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import orjson

from streampack.errors import DamagedInputError, DataError
from streampack.texts.inputs.slices import InputSlice, RowBatch
from streampack.texts.inputs.values import BadValueError, RowSelection, to_tokens

BOM = b"\xef\xbb\xbf"
ARRAY_OF_OBJECTS = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")
BLOCK_BYTES = 1 << 20
MAX_BATCH_BYTES = 8 << 20  # of rows at rest; a batch of long documents ends sooner
ALL = range(1 << 62)
DELIMITERS = {"csv": ",", "tsv": "\t"}  # of formats with a record below a header
MAX_CSV_VALUE = 16 << 20  # characters; a value that seems longer has a quote that is not closed


def line_blocks(pieces: Iterable[bytes], block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    r"""Yield the contents again in blocks of at least `block_bytes`, cut after line feeds.

    >>> list(line_blocks([b"a", b"b\nc\nd", b"\n", b"e"], 1))
    [b'ab\nc\n', b'd\n', b'e']
    """
    pending: list[bytes] = []
    num_bytes = 0
    try:
        for piece in pieces:
            num_bytes += len(piece)
            cut = piece.rfind(b"\n") + 1
            if cut and num_bytes >= block_bytes:
                yield b"".join((*pending, piece[:cut]))
                pending.clear()
                piece = piece[cut:]
                num_bytes = len(piece)
            if piece:
                pending.append(piece)
    except DamagedInputError:
        if whole := b"".join(pending).rpartition(b"\n")[0]:
            yield whole + b"\n"
        raise
    if pending:
        yield b"".join(pending)


def read_jsonl(
    pieces: Iterable[bytes],
    slice_: InputSlice,
    wanted: RowSelection,
    batch_rows: int,
    taken: range = ALL,
) -> Iterator[RowBatch]:
    """Yield the rows of JSON lines; lines of white space are no rows, but counted."""
    number, begin = 0, slice_.start
    for block in _checked_start(pieces, slice_):
        if number >= taken.stop:
            return
        lines = block.removesuffix(b"\n").split(b"\n")
        skipped = lines[: max(0, taken.start - number)]
        number += len(skipped)
        begin += sum(map(len, skipped)) + len(skipped)
        lines = lines[len(skipped) : len(skipped) + max(0, taken.stop - number)]
        for first in range(0, len(lines), batch_rows):
            some = lines[first : first + batch_rows]
            batch = _batch_without_bad_rows(some, number, wanted)
            if batch is None:
                batch = _batch_of_lines(some, number, begin, slice_, wanted)
            if batch.num_rows:
                yield batch
            number += len(some)
            begin += sum(map(len, some)) + len(some)


def _batch_without_bad_rows(
    lines: Sequence[bytes], first: int, wanted: RowSelection
) -> RowBatch | None:
    if wanted.option in ("chat", "row"):
        return None
    try:
        rows = list(map(orjson.loads, lines))
        name = wanted.column_in(rows[0])
        values = [row[name] for row in rows]
        kept = {each: [row[each] for row in rows] for each in wanted.keep}
        if wanted.option == "tokens":
            if any(map(wanted.may_pad, rows)):
                return None
            values = list(map(to_tokens, values))
        elif set(map(type, values)) != {str}:
            return None
    except (orjson.JSONDecodeError, BadValueError, KeyError, TypeError):
        return None
    return RowBatch(values, kept, rows=list(range(first, first + len(lines))))


def _batch_of_lines(
    lines: Sequence[bytes], first: int, begin: int, slice_: InputSlice, wanted: RowSelection
) -> RowBatch:
    """Return the rows of lines, of which any may be bad; `begin` is the byte of the first."""
    batch = RowBatch.of(wanted)
    for number, line in enumerate(lines, first):
        if line and not line.isspace():
            try:
                _add_line(batch, number, line, wanted)
            except BadValueError as error:
                # In a compressed file no byte can be looked up.
                where = "" if slice_.compression else f" (the line at byte {begin})"
                batch.refuse(slice_.uri, number, f"{error}{where}")
        begin += len(line) + 1
    return batch


def _checked_start(pieces: Iterable[bytes], slice_: InputSlice) -> Iterator[bytes]:
    if slice_.start:
        return line_blocks(pieces)
    rest = iter(pieces)
    first = next(rest, b"")
    # Within the piece: an array on one line would be read whole before its first block.
    refuse_array(first, slice_.uri)
    blocks = line_blocks(chain(iter([first]), rest))  # a list would be held to the end
    block = next(blocks, b"")
    if block.startswith(BOM):
        # White space in place of the mark, so that bytes are counted as in the file.
        block = b"   " + block[len(BOM) :]
    return chain(iter([block]), blocks)


def refuse_array(first: bytes, uri: str) -> None:
    """Refuse a file whose first bytes begin an array of objects, with a DataError."""
    if ARRAY_OF_OBJECTS.match(first):
        raise DataError(
            f"{uri}: is one JSON array, but each line must be one row; make lines of it: "
            f"datasets.Dataset.from_json({uri!r}).to_json('rows.jsonl')",
            uri=uri,
        )


def _add_line(batch: RowBatch, number: int, line: bytes, wanted: RowSelection) -> None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        row = _lenient_json(line, error)
    if type(row) is dict:
        batch.add(wanted, number, row)
    elif isinstance(row, list) and wanted.option == "tokens" and not wanted.keep:
        batch.add_value(number, to_tokens(row))
    elif isinstance(row, list) and not wanted.name:
        batch.add_value(number, {"tokens": row})
    else:
        also = " or a list of token ids" if wanted.option == "tokens" else ""
        raise BadValueError(f"{type(row).__name__}, but a row must be a JSON object{also}")


def _lenient_json(line: bytes, error: orjson.JSONDecodeError) -> Any:
    """Parse a line that contains NaN or Infinity, which Python writes, but JSON has not."""
    try:
        row = json.loads(line.decode())
        json.dumps(row, ensure_ascii=False).encode()  # refuses halves of surrogate pairs
    except (ValueError, RecursionError):
        raise BadValueError(f"not valid JSON ({error}); fix or remove the line") from error
    return row


def read_text(
    pieces: Iterable[bytes], slice_: InputSlice, wanted: RowSelection, _: int, _taken: range = ALL
) -> Iterator[RowBatch]:
    """Yield the one row of a text file, without a byte order mark."""
    batch = RowBatch.of(wanted)
    data = b"".join(pieces).removeprefix(BOM)
    try:
        if wanted.option not in ("text", "row") or wanted.keep:
            raise BadValueError(
                f"a text file is one text, and has no column {(*wanted.keep, wanted.name)[0]!r}; "
                "omit columns= and chat=, or name files of rows"
            )
        text = data.decode()
        batch.add_value(0, text if wanted.option == "text" else {"text": text})
    except UnicodeDecodeError as error:
        batch.refuse(slice_.uri, 0, f"byte {error.start} is not valid UTF-8; name text files only")
    except BadValueError as error:
        batch.refuse(slice_.uri, 0, error)
    yield batch


def read_csv(
    pieces: Iterable[bytes],
    slice_: InputSlice,
    wanted: RowSelection,
    batch_rows: int,
    taken: range = ALL,
) -> Iterator[RowBatch]:
    """Yield the rows of a CSV or TSV file. The first one names the columns; values are text.

    Of a slice that begins within the file, the pieces begin with the file's first row too.

    A DamagedInputError names the line of a row that cannot be parsed: where the next row begins is
    not known then.
    """
    parsed = _csv_rows(_csv_lines(pieces), slice_.uri, DELIMITERS[slice_.format])
    _, header = next(parsed, (0, []))
    batch, num_bytes = RowBatch.of(wanted), 0
    try:
        for number, (line, row) in enumerate(islice(parsed, taken.stop)):
            if number < taken.start:
                continue
            where = "" if slice_.start else f" (line {line})"  # is counted from its first line
            try:
                fields = _fields(header, row, wanted)
                num_bytes += len("".join(row).encode())
                batch.add(wanted, number, fields)
            except UnicodeEncodeError:
                batch.refuse(slice_.uri, number, f"not valid UTF-8{where}; fix or remove it")
            except BadValueError as error:
                batch.refuse(slice_.uri, number, f"{error}{where}")
            if batch.num_rows >= batch_rows or num_bytes >= MAX_BATCH_BYTES:
                yield batch
                batch, num_bytes = RowBatch.of(wanted), 0
    except DamagedInputError:
        if batch.num_rows:
            yield batch
        raise
    if batch.num_rows:
        yield batch


def _fields(header: list[str], row: list[str], wanted: RowSelection) -> dict[str, str]:
    if len(row) != len(header):
        raise BadValueError(f"{len(row)} values, but {len(header)} columns; fix it")
    fields = dict(zip(header, row, strict=True))
    if len(fields) < len(header):
        wanted.columns_in([name for name in header if name])  # refuses one that is there twice
    return fields


def csv_ends(pieces: Iterable[bytes], slice_: InputSlice) -> Iterator[int]:
    """Yield the byte at which each row of a CSV or TSV file ends, that of the names first."""
    num_bytes = 0

    def _counted(lines: Iterable[str]) -> Iterator[str]:
        nonlocal num_bytes
        for line in lines:
            num_bytes += len(line.encode(errors="surrogateescape"))
            yield line

    rest = iter(pieces)
    first = next(rest, b"")
    num_bytes += len(BOM) * first.startswith(BOM)
    lines = _counted(_csv_lines(chain(iter([first]), rest)))
    for _ in _csv_rows(lines, slice_.uri, DELIMITERS[slice_.format]):
        yield num_bytes


def _csv_rows(lines: Iterable[str], uri: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield rows, each with the number of its first line, from 1; blank lines are none."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_CSV_VALUE))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    num_columns = 0
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise DamagedInputError(
                f"{uri}: the row from line {line} on is not valid CSV ({error}); fix its quotes",
                uri=uri,
            ) from error
        if row is None:
            return
        num_columns = num_columns or len(row)
        if len(row) != num_columns and reader.line_num > line:
            raise DamagedInputError(
                f"{uri}: lines {line} to {reader.line_num} are one row of {len(row)} values, but "
                f"there are {num_columns} columns; fix its quotes",
                uri=uri,
            )
        if row:
            yield line, row


def _csv_lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield lines as text, in which bytes that are not UTF-8 are surrogates."""
    begin = BOM
    for block in line_blocks(pieces):
        data, begin = block.removeprefix(begin), b""
        yield from io.StringIO(data.decode(errors="surrogateescape"), newline="\n")
