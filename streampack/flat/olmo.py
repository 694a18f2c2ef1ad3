"""OLMo's and Dolma's `.npy` files: raw tokens without a numpy header, and a table for each.

::

    part-0.npy       u16 or u32 tokens, back to back; the type is in neither file
    part-0.csv.gz    start,end,...     in tokens, a line for each document

Without the table, documents end at the tokenizer's EOS, and `streampack index --eos-id` finds them
once. Tokens after the last document are not read, as in OLMo.

Cost: 3 us a document to parse a table, and 16 bytes of memory. An index takes neither.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from streampack.errors import ConfigError, DataError
from streampack.flat.file_checks import is_small
from streampack.flat.token_file import FoundFile, Options, TokenFile
from streampack.types import Int64Array

MAX_LINE = 65_536
TYPES = {1: "uint8", 2: "uint16", 4: "uint32", 8: "int64"}
INDEX_IT = (
    "find the ends once with `streampack index FILES --eos-id ID --dtype TYPE "
    "--out FOLDER`, and set TokenFiles(files, index=FOLDER)"
)


class DocumentTable:
    """Boundaries from the starts and ends of all documents."""

    def __init__(self, starts: Int64Array, ends: Int64Array) -> None:
        self._starts, self._ends = starts, ends
        self.num_samples = len(starts)

    def begins(self, samples: Int64Array) -> Int64Array:
        return self._starts[samples]

    def lengths(self, samples: Int64Array) -> Int64Array:
        return self._ends[samples] - self._starts[samples]


class Olmo:
    """`.npy` without a header, with `.csv.gz`."""

    name, suffix = "olmo", ".npy"

    def open(self, file: FoundFile, options: Options) -> TokenFile:
        if options.dtype is None:
            raise ConfigError(
                f"{file.name}: the type of its tokens is in no file; set dtype='uint16' or "
                "'uint32', as in the config that wrote it"
            )
        stem, itemsize = file.name.removesuffix(".npy"), np.dtype(options.dtype).itemsize
        table = file.path_of(f"{file.name}.csv.gz") or file.table(f"{stem}.csv.gz", INDEX_IT)
        starts, ends = _read_table(table)
        _check_type(table, int(ends[-1]) if len(ends) else 0, itemsize, file, options)
        if (ends < starts).any() or (starts[1:] < ends[:-1]).any() or starts[0] < 0:
            raise DataError(f"{table}: its documents overlap or are not in order; make a new copy")
        return TokenFile(
            name=file.name,
            dtype=options.dtype,
            num_bytes=file.num_bytes,
            boundaries=DocumentTable(starts, ends),
        )


def _check_type(
    table: Path, num_tokens: int, itemsize: int, file: FoundFile, options: Options
) -> None:
    """Refuse a type of tokens in which the documents end outside of the file, or far inside."""
    left = {size: file.num_bytes - num_tokens * size for size in (itemsize, *TYPES)}
    others = [TYPES[size] for size in TYPES if size != itemsize and left[size] == 0]
    if not options.ignores_trailing and not is_small(left[itemsize], file.num_bytes):
        fitting = (size for size in TYPES if is_small(left[size], file.num_bytes))
        others = others or [TYPES[size] for size in fitting]
    if num_tokens <= 0 or left[itemsize] < 0 or file.num_bytes % itemsize or others:
        way_out = (
            f"set dtype={others[0]!r}, in which they end with the file"
            if others
            else "set dtype= to the type that the tokenizer's ids were written in"
        )
        raise DataError(
            f"{table}: has documents up to token {num_tokens}, but {file.name} has "
            f"{file.num_bytes} bytes, {file.num_bytes / itemsize:g} tokens of {options.dtype}; "
            f"{way_out}"
        )


def _read_table(path: Path) -> tuple[Int64Array, Int64Array]:
    numbers: list[tuple[int, int]] = []
    try:
        with gzip.open(path, "rb") as file:
            while line := file.readline(MAX_LINE):
                start, end, *_ = line.split(b",", 2)
                numbers.append((int(start), int(end)))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(
            f"{path}: line {len(numbers) + 1} is not start,end,... of a document ({error}); copy "
            "it again"
        ) from error
    try:
        table = np.array(numbers, np.int64).reshape(-1, 2)
    except OverflowError as error:
        raise DataError(f"{path}: a number in it is too large; make a new copy") from error
    return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])
