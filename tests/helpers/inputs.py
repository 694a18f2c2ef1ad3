"""Files of rows for the tests of inputs, and the rows that their slices contain.

::

    write_rows(path, texts)   rows.jsonl | rows.jsonl.zst | rows.csv | rows.parquet | rows.arrow
    rows_of(parts)            [(row, text), ...] of all slices, and their bad rows
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import zstandard

from streampack.texts.inputs.listing import list_inputs
from streampack.texts.inputs.read import read_rows
from streampack.texts.inputs.slices import BadRow, InputSlice
from streampack.texts.inputs.values import RowSelection
from streampack.texts.units import uncounted_units

TEXT = RowSelection("text", "text")


def jsonl(texts: Iterable[str]) -> bytes:
    return "".join(f"{json.dumps({'text': text}, ensure_ascii=False)}\n" for text in texts).encode()


def csv_text(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def write_rows(path: Path, texts: Sequence[str], rows_per_piece: int = 3) -> Path:
    """Write a file of rows with these texts, in the format of its name."""
    if path.suffix in (".parquet", ".arrow"):
        return write_table(path, pa.table({"text": pa.array(texts, pa.string())}), rows_per_piece)
    is_csv = ".csv" in path.suffixes
    data = csv_text([["text"], *([text] for text in texts)]) if is_csv else jsonl(texts)
    path.write_bytes(packed(data, path.suffix))
    return path


def packed(data: bytes, suffix: str) -> bytes:
    """Return data in the form a file with this suffix would have."""
    if suffix == ".gz":
        return gzip.compress(data, mtime=0)
    return zstandard.ZstdCompressor().compress(data) if suffix == ".zst" else data


def write_table(path: Path, table: pa.Table, rows_per_piece: int) -> Path:
    """Write a table as Parquet, or as a stream of Arrow, which `datasets` writes."""
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=rows_per_piece)
        return path
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, rows_per_piece)
    return path


def split(path: Path | str, part_bytes: int = 1 << 40) -> list[InputSlice]:
    return list(chain.from_iterable(uncounted_units(list_inputs([str(path)]), TEXT, part_bytes)))


def rows_of(
    parts: Iterable[InputSlice], selection: RowSelection = TEXT, batch_rows: int = 256
) -> tuple[list[tuple[int, Any]], list[BadRow]]:
    """Return the numbers and values of the rows of slices, and their bad rows."""
    rows: list[tuple[int, Any]] = []
    bad: list[BadRow] = []
    for part in parts:
        for batch in read_rows(part, selection, batch_rows):
            assert len(batch.rows) == len(batch.values)
            assert len(batch.rows) + len(batch.bad) <= batch_rows
            assert all(len(values) == len(batch.rows) for values in batch.kept.values())
            rows += zip(batch.rows, batch.values, strict=True)
            bad += batch.bad
    return rows, bad


def texts_of(parts: Iterable[InputSlice]) -> list[Any]:
    rows, bad = rows_of(parts)
    assert bad == []
    return [value for _, value in rows]
