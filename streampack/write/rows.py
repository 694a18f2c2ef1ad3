"""Rows of text files and JSONL, and their tokens: the part that runs in several processes.

::

    paths --> list_files --> read_chunks --> Chunk (some hundred rows) --> encode_chunk --> tokens
              sorted          one process                                 any process

A text file is one sample; a line of JSONL is one. A name says which of them a file is, and one that
says neither is refused: a table or a page of settings would be trained on as it stands. Nothing
here imports `streaming`, so a process starts in a fraction of a second.

Cost: reading is some 200 MB/s; encoding is the tokenizer's, some 1 to 5 MB/s a process.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import zstandard

from streampack.errors import ConfigError, DataError, suggest
from streampack.types import IntArray

__all__ = [
    "Chunk",
    "RowFormat",
    "encode_chunk",
    "kind_of",
    "list_files",
    "load_tokenizer",
    "read_chunks",
]

CHUNK_ROWS = 512
CHUNK_BYTES = 1 << 20
TEXT = (".txt", ".text", ".md")
JSONL = (".jsonl", ".ndjson", ".json")
# How `datasets` reads what is not read here, to make JSON lines of it.
TABLES = {".csv": "csv({!r})", ".tsv": "csv({!r}, sep='\\t')", ".parquet": "parquet({!r})"}
DEFAULT_FIELD, OTHER_FIELD = "tokens", "input_ids"  # what `Stream` finds, too


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """What a row holds, and how it becomes tokens."""

    tokenizer: Path | None = None
    """A tokenizer file of the `tokenizers` library; None: rows hold token ids."""
    text_field: str = "text"
    """Field of the text in JSONL rows."""
    tokens_field: str = DEFAULT_FIELD
    """Field of the token ids in JSONL rows, without a tokenizer; as the default, "input_ids" is
    found too. A row may also be the list of ids itself."""
    extra_fields: tuple[str, ...] = ()
    """Fields of more integers, one for each token id, such as a loss mask; each a column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some rows that go to one process together."""

    path: Path
    """The file they come from."""
    rows: tuple[tuple[int, bytes], ...]
    """Line number, from 1 (0: the whole file is one row), and bytes of each."""
    num_bytes: int
    """Bytes of the file that they took, for the progress."""


def list_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files named by files and folders; a folder gives its files in sorted order.

    Raises:
        DataError: If a path is not there, a file is of no kind that is read, or there are no files
            at all.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file())
            files += [file for file in inside if not _is_hidden(file.relative_to(path))]
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"{path}: there is no such file or folder; check the path")
    if not files:
        raise DataError(f"{', '.join(map(str, paths))}: 0 files; name text or JSONL files")
    _check_kinds(files)
    return files


def kind_of(path: Path) -> str:
    """Return what a file's name says that it holds, whatever it is compressed with.

    >>> kind_of(Path("rows.JSONL.zst"))
    '.jsonl'
    """
    name = Path(path.stem) if path.suffix.lower() == ".zst" else path
    return name.suffix.lower()


def _check_kinds(files: Sequence[Path]) -> None:
    others = [file for file in files if kind_of(file) not in (*TEXT, *JSONL)]
    if others:
        path, more = others[0], f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        reader = TABLES.get(kind_of(path))
        way_out = "rename it if it is one of them"
        if reader:
            way_out = f"make JSON lines of it: {_to_jsonl(reader.format(str(path)))}"
        raise DataError(
            f"{path}{more}: is not read; what is read is text ({', '.join(TEXT)}) and JSON lines "
            f"({', '.join(JSONL)}), plain or .zst; {way_out}, or leave it out: of a folder, name "
            "the files that are to be read"
        )


def _to_jsonl(reader: str) -> str:
    return f"datasets.Dataset.from_{reader}.to_json('rows.jsonl')"


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def read_chunks(files: Sequence[Path]) -> Iterator[Chunk]:
    """Yield the rows of all files in order, some hundred at a time."""
    for path in files:
        is_packed = path.suffix.lower() == ".zst"
        with path.open("rb") as file:
            text: Any = file
            if is_packed:
                reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
                text = io.BufferedReader(reader, CHUNK_BYTES)
            try:
                yield from _chunks_of(path, file, text, kind_of(path) in JSONL)
            except zstandard.ZstdError as error:
                raise DataError(
                    f"{path}: cannot be decompressed ({error}); copy it anew"
                ) from error


def _chunks_of(path: Path, file: Any, text: Any, is_jsonl: bool) -> Iterator[Chunk]:
    if not is_jsonl:
        rows: list[tuple[int, bytes]] = [(0, text.read())]
        yield Chunk(path=path, rows=tuple(rows), num_bytes=file.tell())
        return
    rows, size, begin = [], 0, 0
    for number, line in enumerate(text, 1):
        if line.strip():
            rows.append((number, line))
            size += len(line)
        if len(rows) >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield Chunk(path=path, rows=tuple(rows), num_bytes=file.tell() - begin)
            rows, size, begin = [], 0, file.tell()
    yield Chunk(path=path, rows=tuple(rows), num_bytes=file.tell() - begin)


@lru_cache(maxsize=2)
def load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Load a tokenizer file, once in a process.

    Raises:
        ConfigError: If it is none.
    """
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(
            f"tokenizer={str(path)!r} cannot be loaded ({error}); give a tokenizer.json file"
        ) from error


def encode_chunk(chunk: Chunk, rows: RowFormat, is_alone: bool = True) -> list[dict[str, IntArray]]:
    """Turn rows into samples: token ids under "tokens", and the extra fields under their names.

    Args:
        chunk: The rows.
        rows: What they hold.
        is_alone: Whether no other process tokenizes, so that the tokenizer may use all cores.

    Raises:
        DataError: Naming file and line, if a row is not what `rows` says.
    """
    if rows.tokenizer is None:
        return [
            _ids_of(_parse_json(chunk.path, *row), chunk.path, row[0], rows) for row in chunk.rows
        ]
    texts = [_text_of(chunk.path, *row, rows.text_field) for row in chunk.rows]
    # BOS and EOS are the packer's business (`bos_id`, `eos_id`), never stored.
    encode = load_tokenizer(rows.tokenizer).encode_batch_fast
    # The tokenizer spreads a batch over its own threads, and a batch of one over none.
    batches = [texts] if is_alone else [[text] for text in texts]
    encoded = [item for batch in batches for item in encode(batch, add_special_tokens=False)]
    return [{"tokens": np.array(item.ids, np.int64)} for item in encoded]


def _parse_json(path: Path, number: int, line: bytes) -> Any:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        # HF's `to_json` calls JSON lines .json, and so do others an array over many lines.
        way_out = _lines_of(path) if kind_of(path) == ".json" else "mend or remove the line"
        raise DataError(f"{path}:{number}: no JSON ({error}); {way_out}") from error
    if isinstance(row, list) and row and isinstance(row[0], dict):
        raise DataError(
            f"{path}:{number}: an array of objects, but a line must be one row; {_lines_of(path)}"
        )
    return row


def _lines_of(path: Path) -> str:
    return f"make lines of a JSON array: {_to_jsonl(f'json({str(path)!r})')}"


def _as_object(row: Any, where: str, way_out: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: {type(row).__name__}, but a row must be a JSON object{way_out}")
    return row


def _field(row: dict[str, Any], field: str, where: str, option: str) -> Any:
    if field not in row:
        raise DataError(
            f"{where}: no field {field!r}; the row has {', '.join(map(repr, row))}"
            f"{suggest(field, row)}; set {option} to one of them"
        )
    return row[field]


def _text_of(path: Path, number: int, line: bytes, text_field: str) -> str:
    if number == 0:
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: byte {error.start} is no UTF-8; name text files only"
            ) from error
    where = f"{path}:{number}"
    row = _as_object(_parse_json(path, number, line), where, "; leave out the tokenizer for ids")
    text = _field(row, text_field, where, "text_field")
    if not isinstance(text, str):
        raise DataError(
            f"{path}:{number}: field {text_field!r} is {type(text).__name__}, but must be text; "
            "set text_field to another, or leave out the tokenizer if these are token ids"
        )
    return text


def _ids_of(row: Any, path: Path, number: int, rows: RowFormat) -> dict[str, IntArray]:
    where = f"{path}:{number}"
    if isinstance(row, list) and not rows.extra_fields:
        return {"tokens": _integers(row, where)}
    row = _as_object(row, where, "" if rows.extra_fields else " or a list of token ids")
    tokens_field = rows.tokens_field
    if tokens_field == DEFAULT_FIELD and DEFAULT_FIELD not in row and OTHER_FIELD in row:
        tokens_field = OTHER_FIELD
    sample = {"tokens": _integers(_field(row, tokens_field, where, "tokens_field"), where)}
    for field in rows.extra_fields:
        values = _integers(_field(row, field, where, "extra_fields"), where)
        if len(values) != len(sample["tokens"]):
            raise DataError(
                f"{where}: {len(sample['tokens'])} tokens, but {len(values)} values in {field!r}; "
                "write one for each token"
            )
        sample[field] = values
    return sample


def _integers(values: Any, where: str) -> IntArray:
    if not isinstance(values, list) or not all(type(value) in (int, bool) for value in values):
        raise DataError(
            f"{where}: {repr(values)[:60]} is no list of integers; give a tokenizer for text"
        )
    return np.array(values, np.int64)
