"""The first row of a file, as it is: for messages that propose columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, BinaryIO

import orjson

from streampack.write.inputs.decompress import read_pieces
from streampack.write.inputs.lines import CsvRows, line_blocks
from streampack.write.inputs.locate import place_of
from streampack.write.inputs.slices import WHOLE, InputSlice
from streampack.write.inputs.tables import READERS, naming_damage, open_parquet, record_batches


def first_row(file: InputSlice) -> dict[str, Any]:
    """Return the first row of a file of rows; empty for text, and if it has no row by name.

    A damaged file is a DataError; without pyarrow, a table is a ConfigError.
    """
    place, path = place_of(file.uri)
    with place.open(path, file.version, WHOLE, is_sequential=False) as opened:
        if file.format in READERS:
            rows = _table_rows(opened.file, file)
            return next(naming_damage(rows, file.uri, "its first row cannot be read"), {})
        pieces = read_pieces(opened.file, file.uri, file.compression, file.num_bytes)
        if file.format == "jsonl":
            return _jsonl_row(pieces)
        return _csv_row(pieces, file.uri) if file.format == "csv" else {}


def _jsonl_row(pieces: Iterable[bytes]) -> dict[str, Any]:
    for line in chain.from_iterable(block.splitlines() for block in line_blocks(pieces)):
        if line.strip():
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(row, dict):
                return row
    return {}


def _csv_row(pieces: Iterable[bytes], uri: str) -> dict[str, Any]:
    rows = CsvRows(pieces, uri)
    header, row = rows.next(), rows.next()
    if isinstance(header, list) and isinstance(row, list):
        return dict(zip(header, row, strict=False))
    return {}


def _table_rows(file: BinaryIO, of: InputSlice) -> Iterator[dict[str, Any]]:
    """Yield the first row of each record batch."""
    if of.format == "parquet":
        batches = open_parquet(file, of.uri).iter_batches(1)
    else:
        batches = record_batches(file, of)
    for batch in batches:
        yield from batch.slice(0, 1).to_pylist()
