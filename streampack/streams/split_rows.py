"""Rows of joined documents as a stream of documents: `Shards(split_at=eos_id, index=folder)`.

::

    row 0   a a a 2 b b 2 c         row 1   c c 2 d 2         EOS is 2
            -------               samples   0: aaa2  1: bb2  2: c  3: cc2  4: d2

`streampack index --eos-id --out` learns the lengths of documents once, into a length file of a
folder. A document that a row cuts is two samples.

Cost: 12 bytes a document in the folder; about 20 ns a document when a shard is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from streampack._paths import local_path
from streampack.errors import DataError
from streampack.mds.columns import Spans
from streampack.mds.index import MdsIndex
from streampack.mds.length_file import LengthFile, open_length_file
from streampack.types import ByteArray, Int64Array

SPLIT_FILE = "documents-{eos_id}.bin"


def open_split(source: Any, text: bytes, rows: MdsIndex) -> tuple[MdsIndex, LengthFile]:
    """Return the index of a stream's documents, and their length file.

    Raises:
        DataError: If the folder has none for this stream and this EOS.
    """
    folder = local_path(source.index, "index")
    path = folder / SPLIT_FILE.format(eos_id=source.split_at)
    way_out = f"streampack index {Path(rows.uri).parent} --eos-id {source.split_at} --out {folder}"
    if not path.is_file():
        raise DataError(
            f"{path}: does not exist, so the documents of {rows.uri} are not known; run {way_out}"
        )
    found = open_length_file(path, text, rows, f"run {way_out}")
    index = with_counts(rows, np.diff(found.first_sample).tolist())
    return index.with_hashes("xxh64", found.hashes, path.name), found


def with_counts(rows: MdsIndex, counts: Sequence[int]) -> MdsIndex:
    """Return an index with other numbers of samples in its shards."""
    shards = zip(rows.shards, counts, strict=True)
    return replace(rows, shards=tuple(replace(shard, num_samples=count) for shard, count in shards))


def document_lengths(data: ByteArray, rows: Spans, eos_id: int) -> Int64Array:
    """Return the tokens of each document in a shard's rows, in order.

    >>> rows = Spans(begins=np.array([0, 4]), counts=np.array([4, 2]), dtype="uint8")
    >>> document_lengths(np.array([5, 2, 6, 6, 6, 2], np.uint8), rows, eos_id=2).tolist()
    [2, 2, 2]
    """
    tokens = np.concatenate([rows.read(data, row) for row in range(len(rows.counts))])
    ends = np.union1d(np.flatnonzero(tokens == eos_id) + 1, np.cumsum(rows.counts))
    return np.diff(ends[ends > 0], prepend=0)


def split_spans(rows: Spans, lengths: Int64Array, where: str) -> Spans:
    """Return the spans of documents of these lengths in a shard's rows.

    Raises:
        DataError: If a document would cross a row, or the lengths do not fill the rows.

    >>> rows = Spans(begins=np.array([0, 14]), counts=np.array([4, 2]), dtype="uint16")
    >>> split_spans(rows, np.array([1, 3, 2]), "here").begins.tolist()
    [0, 2, 14]
    """
    ends, row_ends = np.cumsum(lengths), np.cumsum(rows.counts)
    begins = ends - lengths
    row = np.searchsorted(row_ends, begins, "right")
    is_full = len(ends) and ends[-1] == row_ends[-1]
    if not is_full or (ends > row_ends[np.minimum(row, len(row_ends) - 1)]).any():
        raise DataError(
            f"{where}: its documents do not fill its rows; the shard is not the one that was "
            "indexed: rerun streampack index"
        )
    inside = begins - (row_ends - rows.counts)[row]
    return Spans(
        begins=rows.begins[row] + inside * np.dtype(rows.dtype).itemsize,
        counts=lengths,
        dtype=rows.dtype,
    )
