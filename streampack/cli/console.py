"""Input and output of the command line: a console, JSON, counts with their nouns, and SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import Progress

from streampack._paths import local_path
from streampack.errors import ConfigError

PIPE_COLUMNS = 240  # rich assumes 80, and would cut the numbers of wide tables


def output_console() -> Console:
    """Return a console for tables, wide enough for all of them in a file or a pipe."""
    is_known = Console().is_terminal or "COLUMNS" in os.environ
    return Console(width=None if is_known else PIPE_COLUMNS)


def print_json(document: dict[str, Any] | list[Any]) -> None:
    """Print one line of JSON; arrays are lists in it, and values of other types text."""
    sys.stdout.write(json.dumps(document, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def read_json(path: Path | None, option: str, method: str) -> Any:
    """Return the content of a JSON file, the result of a method of a loader; None without one."""
    if path is None:
        return None
    try:
        return json.loads(local_path(path, option).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = "is not JSON" if isinstance(error, ValueError) else "cannot be read"
        raise ConfigError(
            f"{option}={path}: {what} ({error}); name a file that json.dump(loader.{method}(), "
            "file) wrote"
        ) from error


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1.

    >>> counted(1, "shard"), counted(1200, "bad row")
    ('1 shard', '1,200 bad rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def visible(text: str) -> str:
    """Return a text of a document with its control characters shown, so that no terminal obeys.

    >>> visible("a\\x1b[2Jb"), visible("漢\\n")
    ('a\\\\x1b[2Jb', '漢⏎')
    """
    return "".join(
        one if one.isprintable() else "⏎" if one == "\n" else ascii(one)[1:-1] for one in text
    )


@contextmanager
def progress(
    words: str, total: int | None = None, *, hidden: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal; what is yielded is called with the number of things done."""
    console = Console(stderr=True)
    with Progress(
        console=console,
        transient=True,
        disable=hidden or not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),  # else lines for a file would go to the terminal
    ) as bar:
        task = bar.add_task(words, total=total)
        yield lambda done: bar.update(task, completed=done, description=f"{done:,} {words}")


class Terminated(KeyboardInterrupt):
    """SIGTERM, as schedulers send it before they kill a job."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` at a SIGTERM, inside this block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as signal wants it
    raise Terminated
