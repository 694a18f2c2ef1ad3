"""Refusals with their remedies, and all messages of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import streampack
from streampack import IterableStream, PackedIterableDataset, PackedStreamingDataset, Packing
from streampack.errors import StreampackError
from streampack.write import write_stream

PACKAGE = Path(streampack.__file__).parent
ERRORS = {"ConfigError", "DataError", "ResumeError", "WorkerError", "BadRowsError"}
PACKING = Packing(max_seq_len=16)
ROWS = [[1, 2, 3], [4, 5, 6, 7]] * 10


@dataclass(frozen=True)
class Remedy:
    """One refusal, and what its message says to do."""

    refuse: Callable[[Path], Any]
    """Makes the mistake in a folder."""
    says: str
    """A regular expression that the message matches; its groups are the remedy's own words."""
    apply: Callable[..., Any]
    """Does what the message says: takes the folder and the groups."""

    def check(self, folder: Path) -> None:
        """Make the mistake, read the message, and do what it says."""
        found = re.search(self.says, message := self.refusal(folder))
        assert found, message
        self.apply(folder, *found.groups())

    def refusal(self, folder: Path) -> str:
        """Make the mistake; return the message."""
        with pytest.raises(StreampackError) as caught:
            self.refuse(folder)
        return str(caught.value)


def packed(streams: Any, **options: Any) -> int:
    """Iterate the dataset of a list of streams; return the tokens in it."""
    kind = PackedIterableDataset if isinstance(streams[0], IterableStream) else None
    dataset = (kind or PackedStreamingDataset)(streams, packing=PACKING, **options)
    total = sum(int((batch["document_ids"] > 0).sum()) for batch in dataset)
    assert total
    return total


def mds(folder: Path, column: str = "tokens", **options: Any) -> Path:
    """Write a stream of twenty samples, once; return its folder."""
    out = folder / f"mds-{column}"
    if not out.exists():
        write_stream(({column: row} for row in ROWS), out, tokens=column, **options)
    return out


def messages() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each message in the package, with \0 for values."""
    for module in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in ERRORS:
                message = node.args[0]
                parts = message.values if isinstance(message, ast.JoinedStr) else [message]
                texts = [part.value if isinstance(part, ast.Constant) else "\0" for part in parts]
                place = f"{module.relative_to(PACKAGE)}:{node.lineno}"
                yield place, "".join(map(str, texts))
