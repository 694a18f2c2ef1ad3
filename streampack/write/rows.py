"""Rows of text files and JSONL, and their tokens: the part that runs in several processes.

::

    text_files.py --> Chunk (a few hundred rows) --> encode_chunk --> tokens
    one process                                      any process

This module does not import `streaming`, so a process starts in a fraction of a second.

Cost: the tokenizer's, about 1 to 5 MB/s per process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from streampack._paths import local_path
from streampack.errors import ConfigError, DataError, suggest
from streampack.types import IntArray
from streampack.write.text_files import Chunk, kind_of, to_jsonl

DEFAULT_FIELD, OTHER_FIELD = "tokens", "input_ids"  # names that `Stream` accepts by default


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """The contents of a row, and its conversion to tokens."""

    tokenizer: Path | None = None
    """A tokenizer file of the `tokenizers` library; None: rows hold token ids."""
    text_field: str = "text"
    """Field of the text in JSONL rows."""
    tokens_field: str = DEFAULT_FIELD
    """Field of the token ids in JSONL rows, without a tokenizer. For the default, "input_ids" is
    accepted too. A row may also be the list of ids itself.
    """
    extra_fields: tuple[str, ...] = ()
    """Fields with one more integer per token, such as a loss mask; each becomes a column."""


@lru_cache(maxsize=2)
def load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Load a tokenizer file, once per process.

    Raises:
        ConfigError: If it cannot be loaded.
    """
    file = local_path(path, "tokenizer")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(
            f"tokenizer={str(path)!r} cannot be loaded ({error}); give a tokenizer.json file"
        ) from error


def encode_chunk(chunk: Chunk, rows: RowFormat, is_alone: bool = True) -> list[dict[str, IntArray]]:
    """Convert rows to samples: token ids under "tokens", and the extra fields under their names.

    `is_alone` means that no other process tokenizes, so that the tokenizer may use all cores.

    Raises:
        DataError: Naming file and line, if a row does not match `rows`.
    """
    if rows.tokenizer is None:
        return [
            _ids_of(_parse_json(chunk.path, *row), chunk.path, row[0], rows) for row in chunk.rows
        ]
    texts = [_text_of(chunk.path, *row, rows.text_field) for row in chunk.rows]
    # BOS and EOS are added by the packer (`bos_id`, `eos_id`) and never stored.
    encode = load_tokenizer(rows.tokenizer).encode_batch_fast
    # The tokenizer spreads a batch over its own threads; a batch of one uses no threads.
    batches = [texts] if is_alone else [[text] for text in texts]
    encoded = [item for batch in batches for item in encode(batch, add_special_tokens=False)]
    return [{"tokens": np.array(item.ids, np.int64)} for item in encoded]


def _parse_json(path: Path, number: int, line: bytes) -> Any:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        # HF's `to_json` names JSON lines .json; others use it for an array over many lines.
        way_out = _array_to_lines(path) if kind_of(path) == ".json" else "fix or remove the line"
        raise DataError(f"{path}:{number}: not valid JSON ({error}); {way_out}") from error
    if isinstance(row, list) and row and isinstance(row[0], dict):
        raise DataError(
            f"{path}:{number}: an array of objects, but a line must be one row; "
            f"{_array_to_lines(path)}"
        )
    return row


def _array_to_lines(path: Path) -> str:
    return f"make lines of a JSON array: {to_jsonl(f'json({str(path)!r})')}"


def _as_object(row: Any, where: str, way_out: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: {type(row).__name__}, but a row must be a JSON object{way_out}")
    return row


def _field(row: dict[str, Any], field: str, where: str, option: str) -> Any:
    if field not in row:
        text = next((name for name, value in row.items() if isinstance(value, str)), None)
        has_no_ids = option == "tokens_field" and text is not None
        raise DataError(
            f"{where}: no field {field!r}; the row has {', '.join(map(repr, row))}"
            f"{suggest(field, row)}; set {option}= to one of them"
            f"{f', or tokenizer= if {text!r} is text' if has_no_ids else ''}"
        )
    return row[field]


def _text_of(path: Path, number: int, line: bytes, text_field: str) -> str:
    if number == 0:
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: byte {error.start} is not valid UTF-8; name text files only"
            ) from error
    where = f"{path}:{number}"
    row = _as_object(_parse_json(path, number, line), where, "; leave out tokenizer= for token ids")
    text = _field(row, text_field, where, "text_field")
    if not isinstance(text, str):
        raise DataError(
            f"{where}: field {text_field!r} is {type(text).__name__}, but must be text; "
            "set text_field= to another, or leave out tokenizer= if these are token ids"
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
            f"{where}: {repr(values)[:60]} is not a list of integers; set tokenizer= for text"
        )
    return np.array(values, np.int64)
