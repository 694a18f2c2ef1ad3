"""The output of the command line: a console, a JSON line, and counts with their nouns."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rich.console import Console

PIPE_COLUMNS = 240  # rich assumes 80, and would cut the numbers of wide tables


def output_console() -> Console:
    """Return a console for tables, wide enough for all of them in a file or a pipe."""
    is_known = Console().is_terminal or "COLUMNS" in os.environ
    return Console(width=None if is_known else PIPE_COLUMNS)


def print_json(document: dict[str, Any] | list[Any]) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(document) + "\n")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1.

    >>> counted(1, "shard"), counted(1200, "bad row")
    ('1 shard', '1,200 bad rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
