"""The data that a training run consumed in total, after being killed and restarted.

::

    run-000-from-step-0   steps 1 2 3 4 5 6      5 and 6 do not count: the next run began after 4
    run-001-from-step-4   steps         5 6 7 8
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np


def lines_of(run: Path, files: str = "rank*.jsonl") -> list[dict[str, Any]]:
    """Read the logs of all ranks of a run, without a last line that was cut off by a kill."""
    lines = []
    for file in sorted(run.glob(files)):
        text = file.read_text()
        lines += [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return lines


def runs_of(out: Path) -> list[Path]:
    """All starts of the training, in order."""
    return sorted((out / "consumed").glob("run-*"))


def runs_that_trained(out: Path) -> list[Path]:
    """All starts of the training that took at least one step, in order.

    The threads of a process group can abort a rank while its interpreter exits ("terminate called
    without an active exception"). torchrun then starts a job that has nothing left to do.
    """
    return [run for run in runs_of(out) if lines_of(run)]


def first_step(run: Path) -> int:
    return int(run.name.rpartition("-")[2])


def counted(out: Path) -> list[dict[str, Any]]:
    """Return the log lines that count: those of each run up to where the next one began."""
    runs = runs_of(out)
    lines = []
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        last = first_step(following) if following else 10**9
        lines += [line for line in lines_of(run) if first_step(run) < line["step"] <= last]
    return lines


def segments_of(lines: Sequence[dict[str, Any]]) -> np.ndarray:
    """The segments of log lines: stream, pass, sample, start, length; shape (n, 5)."""
    rows = [segment[1:] for line in lines for segment in line["segments"]]
    return np.array(rows, np.int64).reshape(-1, 5)


def wait_until(is_so: Callable[[], Any], ended: Callable[[], bool], *, timeout_s: float) -> Any:
    """Poll a condition twenty times per second until it is true, and return its value."""
    end = monotonic() + timeout_s
    while not (found := is_so()):
        assert not ended(), "the job ended before"
        assert monotonic() < end, f"not within {timeout_s} s"
        sleep(0.05)
    return found


def pids_at_step(out: Path, run: int, step: int) -> dict[int, int]:
    """Return the process ids by rank once run number `run` has reached a step, else nothing."""
    runs = runs_of(out)
    if len(runs) <= run:
        return {}
    lasts = {
        int(file.stem.removeprefix("rank")): lines_of(runs[run], file.name)[-1:]
        for file in runs[run].glob("rank*.jsonl")
    }
    if not all(last and last[0]["step"] >= step for last in lasts.values()):
        return {}
    return {rank: int(last["pid"]) for rank, [last] in lasts.items()}
