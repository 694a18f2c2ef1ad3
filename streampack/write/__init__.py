"""write: create streams and their length files; not part of the data path of training.

Names are imported on first use, so that processes that only tokenize start quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FILES = {
    "ChatEncoder": "chat",
    "ChatSamples": "chat",
    "Indexed": "lengths",
    "JobProgress": "options",
    "RowFormat": "rows",
    "WriteOptions": "options",
    "Written": "options",
    "merge": "files",
    "verify": "files",
    "write_lengths": "lengths",
    "write_stream": "shards",
    "write_texts": "files",
}

__all__ = list(_FILES)


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"streampack.write.{_FILES[name]}"), name)
