"""Refusals and their remedies, and all messages of the package."""

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
    """A refusal, and the remedy in its message."""

    refuse: Callable[[Path], Any]
    """Makes the mistake, in a given folder."""
    says: str
    """A regular expression for the message; its groups capture the suggested values."""
    apply: Callable[..., Any]
    """Follows the advice, given the folder and the groups."""

    def check(self, folder: Path) -> None:
        """Make the mistake, read the message, and follow its advice."""
        found = re.search(self.says, message := self.refusal(folder))
        assert found, message
        self.apply(folder, *found.groups())

    def refusal(self, folder: Path) -> str:
        """Make the mistake and return the message."""
        with pytest.raises(StreampackError) as caught:
            self.refuse(folder)
        return str(caught.value)


def packed(streams: Any, **options: Any) -> int:
    """Iterate a dataset over a list of streams, and return its tokens."""
    kind = PackedIterableDataset if isinstance(streams[0], IterableStream) else None
    dataset = (kind or PackedStreamingDataset)(streams, packing=PACKING, **options)
    total = sum(int((batch["document_ids"] > 0).sum()) for batch in dataset)
    assert total
    return total


def mds(folder: Path, column: str = "tokens", **options: Any) -> Path:
    """Write a stream of twenty samples unless it exists, and return its folder."""
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
