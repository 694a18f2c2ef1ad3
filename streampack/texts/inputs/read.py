"""Reading of a slice as batches of rows.

::

    InputSlice --> file --format--> RowBatch (256 rows) ... bad rows are listed in it

Small objects of a store are fetched whole, several at a time, because each takes a round trip.

Bad rows are never raised. A damaged file is, unless it may be skipped, and so is one that is no
longer the version that was listed. A file that is written to while it is read is noticed by its
time, not by its rows.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, BinaryIO

import zstandard

from streampack._paths import is_url
from streampack._threads import ordered_thread_map
from streampack.errors import DamagedInputError, DataError
from streampack.mds.codecs import CODECS, Codec
from streampack.texts.inputs.lines import (
    ALL,
    DELIMITERS,
    csv_ends,
    read_csv,
    read_jsonl,
    read_text,
)
from streampack.texts.inputs.shards import read_mds, shard_contents
from streampack.texts.inputs.slices import WHOLE, BadRow, Compression, InputSlice, RowBatch
from streampack.texts.inputs.sources import OpenInput, open_input, read_object
from streampack.texts.inputs.tables import read_arrow, read_parquet
from streampack.texts.inputs.values import RowSelection

SMALL_BYTES = 1 << 20  # of an object that is fetched whole
FETCHING_THREADS = 8  # with one more that reads ahead, fewer than the 10 connections of boto3
PIECE_BYTES = 1 << 20
PACKED_BYTES = 1 << 16  # per decompression step
FAMILIES: dict[Compression, str] = {"gz": "gz", "zst": "zstd"}

TABLE_READERS = {"parquet": read_parquet, "arrow": read_arrow, "mds": read_mds}
LINE_READERS = {
    "jsonl": read_jsonl,
    "text": read_text,
    **dict.fromkeys(DELIMITERS, read_csv),
}


def with_contents(slices: Sequence[InputSlice]) -> Iterator[tuple[InputSlice, bytes | None]]:
    """Yield slices in order, with the bytes of those that are small objects, for `read_rows`.

    Raises as `read_rows`, at the object that it is about.
    """
    if not any(map(_is_small_object, slices)):
        return zip(slices, repeat(None))

    def _contents(one: InputSlice) -> bytes | None:
        return read_object(one, 0, one.num_bytes) if _is_small_object(one) else None

    contents = ordered_thread_map(slices, _contents, 2 * FETCHING_THREADS, FETCHING_THREADS)
    return zip(slices, contents, strict=True)


def _is_small_object(slice_: InputSlice) -> bool:
    is_whole = slice_.start == 0 and slice_.stop == WHOLE
    is_small = slice_.num_bytes <= SMALL_BYTES and slice_.format != "mds"
    return is_whole and is_small and is_url(slice_.uri)


def read_rows(
    slice_: InputSlice,
    selection: RowSelection,
    batch_rows: int = 256,
    contents: bytes | None = None,
    *,
    skips_damage: bool = False,
    taken: range = ALL,
) -> Iterator[RowBatch]:
    """Yield the rows of a slice in order; a batch has at most `batch_rows`, bad ones included.

    `contents` are the bytes of the file, if they were read already. With `skips_damage`, the rest
    of a file that cannot be decoded is one bad row. Of the rows of the slice, from 0, only those
    that are `taken` are returned.

    A row without a selected column, or with a value of another type, is a bad row. A file that is
    damaged, cut short or has changed since it was listed is a DataError. It names the file, and the
    byte where there is one. Without pyarrow, a table is a ConfigError.

    >>> from pathlib import Path
    >>> from streampack.texts.inputs.listing import list_inputs
    >>> path = Path(getfixture("tmp_path"), "rows.jsonl")
    >>> _ = path.write_text('{"text": "one"}\\n{"text": 2}\\n{"text": "three"}\\n')
    >>> [slice_] = list_inputs([str(path)])
    >>> [batch] = read_rows(slice_, RowSelection("text", "text"))
    >>> batch.values, batch.rows
    (['one', 'three'], [0, 2])
    >>> [(bad.row, bad.reason.split(",")[0]) for bad in batch.bad]
    [(1, "column 'text' is of type int")]
    """
    is_lines = slice_.format in LINE_READERS
    if slice_.format == "mds":
        contents = shard_contents(slice_)
    with (
        open_input(slice_, is_sequential=is_lines)
        if contents is None
        else nullcontext(OpenInput(io.BytesIO(contents), lambda: None))
    ) as opened:
        file = opened.file
        if is_lines:
            pieces = read_pieces(file, slice_.uri, slice_.compression, slice_.num_bytes)
            if slice_.format in DELIMITERS and slice_.start:
                pieces = chain([_names_of(slice_)], pieces)
            batches = LINE_READERS[slice_.format](pieces, slice_, selection, batch_rows, taken)
        else:
            batches = TABLE_READERS[slice_.format](file, slice_, selection, batch_rows, taken)
        row = 0
        try:
            for batch in batches:
                if is_lines:
                    batch.num_bytes = min(file.tell() - slice_.start, slice_.num_bytes)
                opened.check()
                row = max([*batch.rows, *(bad.row for bad in batch.bad)], default=row - 1) + 1
                yield batch
        except DataError as error:
            opened.check()  # a change of the file is a better explanation than damage
            if not (skips_damage and isinstance(error, DamagedInputError)):
                raise
            reason = str(error).removeprefix(f"{slice_.uri}: ")
            unit = "file" if slice_.stop == WHOLE else "part"
            rest = BadRow(slice_.uri, row, f"the rest of the {unit} is omitted: {reason}")
            yield replace(RowBatch.of(selection), bad=[rest])


def _names_of(slice_: InputSlice) -> bytes:
    """Return the first row of a CSV file, which names the columns."""
    head = replace(slice_, start=0, stop=WHOLE, num_bytes=min(slice_.start, PIECE_BYTES))
    with open_input(head, is_sequential=True) as opened:
        data = opened.file.read(head.num_bytes)
    return data[: next(csv_ends([data], slice_))]


def read_pieces(
    file: BinaryIO, uri: str, compression: Compression | None, num_bytes: int
) -> Iterator[bytes]:
    """Yield the decompressed contents of a file, from its position on; `num_bytes` is at rest.

    Damaged or cut compressed data are a DataError, which names the byte of the compressed file.
    """
    if compression is None:
        while num_bytes > 0 and (piece := file.read(min(PIECE_BYTES, num_bytes))):
            num_bytes -= len(piece)
            yield piece
        return
    done = 0
    try:
        for piece in _decompressed(file, CODECS[FAMILIES[compression]]):
            done = file.tell()
            yield piece
    except EOFError as error:
        raise DamagedInputError(
            f"{uri}: ends at byte {file.tell()} within compressed data: it was cut short; make a "
            "new copy",
            uri=uri,
        ) from error
    except (zlib.error, zstandard.ZstdError) as error:
        raise DamagedInputError(
            f"{uri}: cannot be decompressed between byte {done} and byte {file.tell()} ({error}); "
            "make a new copy",
            uri=uri,
        ) from error


def _decompressed(file: BinaryIO, codec: Codec) -> Iterator[bytes]:
    """Yield the contents of all members of a file; raise EOFError if it ends within one."""
    member: Any = None
    while packed := file.read(PACKED_BYTES):
        while packed:
            if member is not None and member.eof:
                packed = packed.lstrip(b"\0")  # tapes and block devices pad with zeros, as gzip(1)
                if not packed:
                    break
                member = None
            member = member or codec.new_member()
            if piece := member.decompress(packed):
                yield piece
            packed = member.unused_data
    if member is None or not member.eof:
        raise EOFError
