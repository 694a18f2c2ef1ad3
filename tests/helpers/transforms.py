"""Transforms of rows, in a module that worker processes import in no time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

FLAG = "STREAMPACK_TEST_FLAG"


def slow(row: Any) -> Any:
    """Return a row after some time."""
    time.sleep(0.01)
    return row


def kill_once(row: Any) -> Any:
    """Kill this process, unless a former call has."""
    flag = Path(os.environ[FLAG])
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return row


def shout_or_leave_out(row: Any) -> Any:
    """Return a row in which each "a" is "b", or None for one with a "c"."""
    return None if "c" in row["text"] else {**row, "text": row["text"].replace("a", "b")}


def break_some(row: Any) -> Any:
    """Return a row whose text has half of a surrogate pair, for one with a "c"."""
    return {**row, "text": "\ud800"} if "c" in row["text"] else row
