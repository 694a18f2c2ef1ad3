"""The `streampack write` command that fits a file or a folder, by its first row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from streampack.write.inputs.listing import COMPRESSIONS, FORMATS, list_inputs
from streampack.write.inputs.peek import first_row

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"  # in the folder that save_pretrained() writes


def write_arguments(path: str) -> list[str]:
    """Return the arguments of `streampack write` that read a path, without those of the output.

    A StreampackError says that the path names no file of rows, or that none can be read.
    """
    row = first_row(list_inputs([path])[0])
    ids, chat = _column_of(row, _is_ids), _column_of(row, _is_chat)
    if ids is not None:
        return [path, *([] if ids in ("tokens", "input_ids") else ["--tokens", ids])]
    if chat is not None:
        return [path, "--chat", chat, "--tokenizer", tokenizer_near(path, is_for_chat=True)]
    texts = {name: len(value) for name, value in row.items() if isinstance(value, str)}
    # Without the column that is the default: the one with the longest text.
    named = [] if not texts or "text" in texts else ["--text", max(texts, key=texts.__getitem__)]
    return [path, *named, "--tokenizer", tokenizer_near(path)]


def _column_of(row: Mapping[str, Any], fits: Callable[[Any], bool]) -> str | None:
    return next((name for name, value in row.items() if fits(value)), None)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def tokenizer_near(path: str, *, is_for_chat: bool = False) -> str:
    """Return a tokenizer in this folder or beside a path; its usual name if there is none.

    For chat, it is a tokenizer's folder, which has a chat template.
    """
    if is_for_chat:
        folders = sorted(file.parent for file in Path().glob(f"*/{TOKENIZER_CONFIG}"))
        return str(folders[0]) if folders else "TOKENIZER_FOLDER"
    for folder in (Path(), Path(path), Path(path).parent):
        if (folder / TOKENIZER).exists():
            return str(folder / TOKENIZER)
    for file in sorted(Path().glob("*.json")):
        with suppress(ValueError, OSError):
            document = json.loads(file.read_bytes())
            if isinstance(document, dict) and "model" in document:
                return str(file)
    return TOKENIZER


def name_for(path: str, folder: str = "") -> str:
    """Return a free name for the stream of a path, in a folder.

    >>> name_for("s3://bucket/no-such-folder/rows.jsonl.zst")
    'rows'
    """
    stem = Path(path.rstrip("/")).name
    while Path(stem).suffix.lower() in FORMATS | COMPRESSIONS:
        stem = Path(stem).stem
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(str(Path(folder, name)) for name in names if not Path(folder, name).exists())
