"""Splitting of inputs into slices of about equal size, in the order of the input.

::

    rows.jsonl       bytes, at the first line end at or after each multiple of part_bytes
    rows.parquet     row groups, until a slice has part_bytes
    others           one slice for each file

The slices depend on the files and `part_bytes` alone. A file of up to `part_bytes` is not opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import BinaryIO

from streampack._checks import read_count
from streampack.errors import DamagedInputError
from streampack.write.inputs.listing import list_inputs
from streampack.write.inputs.slices import InputSlice
from streampack.write.inputs.sources import open_input
from streampack.write.inputs.tables import columns_of, open_parquet

SCAN_BYTES = 1 << 16


def split_inputs(
    inputs: Sequence[str], part_bytes: int, *, skips_damage: bool = False
) -> list[InputSlice]:
    """Return the slices of the files that paths, globs and URLs name.

    A slice ends at the first row or row group after `part_bytes` bytes at rest. A DataError says
    that `list_inputs` refuses an input, a file is damaged, or it changed meanwhile. With
    `skips_damage`, a damaged file is one slice.
    """
    part_bytes = read_count("part_bytes", part_bytes, "write a number of bytes such as 268435456")
    slices: list[InputSlice] = []
    for file in list_inputs(inputs):
        try:
            slices += split_file(file, part_bytes)
        except DamagedInputError:
            if not skips_damage:
                raise
            slices.append(file)
    return slices


def split_file(file: InputSlice, part_bytes: int) -> list[InputSlice]:
    """Return the slices of one file."""
    sizes_of = SIZES.get(file.format)
    if file.compression or sizes_of is None or file.num_bytes <= part_bytes:
        return [file]
    with open_input(file, is_sequential=False) as opened:
        parts = list(_grouped(sizes_of(opened.file, file, part_bytes), part_bytes))
    if len(parts) < 2:
        return [file]
    return [
        replace(file, start=start, stop=stop, num_bytes=num_bytes)
        for start, stop, num_bytes in parts
    ]


def _grouped(sizes: Iterable[tuple[int, int]], part_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, stop and size of ranges of pieces, which have (end, size) each.

    >>> list(_grouped([(1, 60), (2, 60), (3, 10)], 100))
    [(0, 2, 120), (2, 3, 10)]
    """
    start = stop = num_bytes = 0
    for stop, size in sizes:
        num_bytes += size
        if num_bytes >= part_bytes:
            yield start, stop, num_bytes
            start, num_bytes = stop, 0
    if start < stop:
        yield start, stop, num_bytes


def _lines(file: BinaryIO, of: InputSlice, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (end, size) of pieces of lines, each the fewest that have part_bytes."""
    begin = 0
    while begin < of.num_bytes:
        end = _line_end(file, min(begin + part_bytes, of.num_bytes) - 1)
        yield end, end - begin
        begin = end


def _line_end(file: BinaryIO, position: int) -> int:
    """Return the byte after the first line feed at or after a position, or the end of the file."""
    file.seek(position)
    while piece := file.read(SCAN_BYTES):
        found = piece.find(b"\n")
        if found >= 0:
            return position + found + 1
        position += len(piece)
    return position


def _row_groups(file: BinaryIO, of: InputSlice, _: int) -> list[tuple[int, int]]:
    metadata = open_parquet(file, of.uri).metadata
    groups = enumerate(map(metadata.row_group, range(metadata.num_row_groups)), 1)
    return [(end, sum(c.total_compressed_size for c in columns_of(group))) for end, group in groups]


SIZES: dict[str, Callable[[BinaryIO, InputSlice, int], Iterable[tuple[int, int]]]] = {
    "jsonl": _lines,
    "parquet": _row_groups,
}
