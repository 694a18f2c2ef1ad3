"""The first row of a file, as it is: for messages that propose columns."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, BinaryIO

import orjson

from streampack.write.inputs.arrow_stream import is_arrow_file
from streampack.write.inputs.decompress import read_pieces
from streampack.write.inputs.lines import line_blocks
from streampack.write.inputs.locate import place_of
from streampack.write.inputs.slices import WHOLE, InputFile
from streampack.write.inputs.tables import load_pyarrow, open_parquet


def first_row(file: InputFile) -> dict[str, Any]:
    """Return the first row of a file of rows; empty for text, and if it has no row by name.

    Raises:
        ConfigError: If pyarrow is needed and not installed.
        DataError: If the file is damaged, or cannot be read.
    """
    place, path = place_of(file.uri)
    with place.open(path, file.version, WHOLE, is_sequential=False) as opened:
        if file.format in TABLES:
            return TABLES[file.format](opened.file, file.uri)
        pieces = read_pieces(opened.file, file.uri, file.compression, file.num_bytes)
        lines = chain.from_iterable(block.splitlines() for block in line_blocks(pieces))
        return LINES.get(file.format, _no_row)(lines, file.uri)


def _no_row(lines: Iterable[bytes], uri: str) -> dict[str, Any]:  # noqa: ARG001
    return {}


def _jsonl_row(lines: Iterable[bytes], uri: str) -> dict[str, Any]:  # noqa: ARG001
    for line in lines:
        if line.strip():
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(row, dict):
                return row
    return {}


def _csv_row(lines: Iterable[bytes], uri: str) -> dict[str, Any]:
    text = (line.decode("utf-8-sig", errors="replace") for line in lines)
    rows = csv.reader(text, delimiter="\t" if ".tsv" in uri.lower() else ",")
    return dict(zip(next(rows, []), next(rows, []), strict=False))


def _parquet_row(file: BinaryIO, uri: str) -> dict[str, Any]:
    parquet = open_parquet(file, uri, is_remote=False)
    batch = next(parquet.iter_batches(1), None)
    return {} if batch is None else batch.slice(0, 1).to_pylist()[0]


def _arrow_row(file: BinaryIO, uri: str) -> dict[str, Any]:
    ipc = load_pyarrow(uri, "pyarrow.ipc")
    if is_arrow_file(file):
        reader = ipc.open_file(file)
        batches = [reader.get_batch(0)] if reader.num_record_batches else []
    else:
        batches = ipc.open_stream(file)
    for batch in batches:
        if batch.num_rows:
            return dict(batch.slice(0, 1).to_pylist()[0])
    return {}


LINES: dict[str, Callable[[Iterable[bytes], str], dict[str, Any]]] = {
    "jsonl": _jsonl_row,
    "csv": _csv_row,
}
TABLES: dict[str, Callable[[BinaryIO, str], dict[str, Any]]] = {
    "parquet": _parquet_row,
    "arrow": _arrow_row,
}
