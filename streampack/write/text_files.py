"""The input files of `streampack write`: selection, and their rows as bytes.

::

    paths --> list_files --> read_chunks --> Chunk (a few hundred rows) --> ...
              sorted         .gz, .zst unpacked

A text file is one row; in JSONL each line is one. The suffix determines the kind of a file. Other
suffixes are refused: a table or a settings file would be trained on as plain text.

Cost: about 200 MB/s; memory for a text file, or a chunk of rows.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from streampack._paths import local_path
from streampack.errors import DataError

CHUNK_ROWS = 512
CHUNK_BYTES = 1 << 20
PACKED_BYTES = 1 << 16  # read per decompression step
TEXT = (".txt", ".text", ".md")
JSONL = (".jsonl", ".ndjson", ".json")
# Readers of `datasets` for unsupported kinds, to convert them to JSON lines.
TABLES = {".csv": "csv({!r})", ".tsv": "csv({!r}, sep='\\t')", ".parquet": "parquet({!r})"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows that go to one process together."""

    path: Path
    """Source file of the rows."""
    rows: tuple[tuple[int, bytes], ...]
    """Line number, from 1 (0: the whole file is one row), and bytes of each."""
    num_bytes: int
    """Bytes of the file that they took, for progress reports."""


def list_files(paths: Sequence[Path]) -> list[Path]:
    """Return the given files, and the files in the given folders in sorted order.

    All files of a folder except hidden ones are included, even a README.md, which may be data.

    Raises:
        DataError: If a path does not exist, a file has an unsupported kind, or there are no files.
    """
    files: list[Path] = []
    for path in (local_path(path, "paths") for path in paths):
        if path.is_dir():
            for file in sorted(file for file in path.rglob("*") if file.is_file()):
                if not any(part.startswith(".") for part in file.relative_to(path).parts):
                    files.append(file)
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"{path}: does not exist; check the path")
    if not files:
        raise DataError(f"{', '.join(map(str, paths))}: 0 files; name text or JSONL files")
    _check_kinds(files)
    return files


def kind_of(path: Path) -> str:
    """Return the suffix that determines a file's kind, without that of its compression.

    >>> kind_of(Path("rows.JSONL.zst"))
    '.jsonl'
    """
    name = Path(path.stem) if path.suffix.lower() in PACKED else path
    return name.suffix.lower()


def _check_kinds(files: Sequence[Path]) -> None:
    others = [file for file in files if kind_of(file) not in (*TEXT, *JSONL)]
    if others:
        path, more = others[0], f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        reader = TABLES.get(kind_of(path))
        way_out = "rename it if it is one of them"
        if reader:
            way_out = f"make JSON lines of it: {to_jsonl(reader.format(str(path)))}"
        raise DataError(
            f"{path}{more}: is not a supported file; supported are text ({', '.join(TEXT)}) "
            f"and JSON lines ({', '.join(JSONL)}), plain, .gz or .zst; {way_out}, or leave it out: "
            "name the files to read instead of their folder"
        )


def to_jsonl(reader: str) -> str:
    """Return the line of Python that converts the input of a `datasets` reader to JSON lines."""
    return f"datasets.Dataset.from_{reader}.to_json('rows.jsonl')"


class _ZstdBytes(io.RawIOBase):
    """The decompressed bytes of a .zst file.

    Raises EOFError if it ends within a frame, where zstandard's own reader stops silently.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame: Any = None
        self._packed = self._bytes = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._bytes:
            self._packed = self._packed or self._file.read(PACKED_BYTES)
            is_between = self._frame is None or self._frame.eof
            if not self._packed:
                if not is_between:
                    raise EOFError("it ends within a frame: it was cut short")
                return 0
            if is_between:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._bytes = self._frame.decompress(self._packed)
            self._packed = self._frame.unused_data
        num_bytes = min(len(buffer), len(self._bytes))
        buffer[:num_bytes] = self._bytes[:num_bytes]
        self._bytes = self._bytes[num_bytes:]
        return num_bytes


def _open_zstd(file: BinaryIO) -> Any:
    return io.BufferedReader(_ZstdBytes(file), CHUNK_BYTES)


def _open_gzip(file: BinaryIO) -> Any:
    return gzip.GzipFile(fileobj=file)


PACKED: dict[str, Callable[[BinaryIO], Any]] = {".gz": _open_gzip, ".zst": _open_zstd}


def read_chunks(files: Sequence[Path]) -> Iterator[Chunk]:
    """Yield the rows of all files in order, a few hundred at a time.

    Raises:
        DataError: If a compressed file is damaged or cut short.
    """
    for path in files:
        unpack = PACKED.get(path.suffix.lower())
        with path.open("rb") as file:
            text: Any = unpack(file) if unpack else file
            try:
                yield from _chunks_of(path, file, text, kind_of(path) in JSONL)
            except (zstandard.ZstdError, zlib.error, gzip.BadGzipFile, EOFError) as error:
                raise DataError(
                    f"{path}: cannot be decompressed ({error}); copy it again"
                ) from error


def _chunks_of(path: Path, file: Any, text: Any, is_jsonl: bool) -> Iterator[Chunk]:
    if not is_jsonl:
        row = text.read()
        yield Chunk(path=path, rows=((0, row),), num_bytes=file.tell())
        return
    rows: list[tuple[int, bytes]] = []
    size = begin = 0
    for number, line in enumerate(text, 1):
        if line.strip():
            rows.append((number, line))
            size += len(line)
        if len(rows) >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield Chunk(path=path, rows=tuple(rows), num_bytes=file.tell() - begin)
            rows, size, begin = [], 0, file.tell()
    yield Chunk(path=path, rows=tuple(rows), num_bytes=file.tell() - begin)
