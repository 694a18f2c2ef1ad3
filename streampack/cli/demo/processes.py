"""A process of the demo that reports as it goes, and is killed after a step.

::

    command --> one line of JSON per step --> reports --> compared with an unbroken run
                     '-- the step to kill it after: SIGKILL
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from streampack.errors import StreampackError

BatchReport = dict[str, Any]
"""What a process says about a step: its number and its batch's digest, and more."""


def report_until(
    kill_after: int | None,
    command: Sequence[str],
    log: Path,
    show: Callable[[BatchReport], None] = lambda _: None,
) -> tuple[list[BatchReport], int]:
    """Start a process and show its reports; kill it with SIGKILL after a step.

    Return the reports, those made before the signal arrived included, and the exit code: minus the
    signal's number if a signal ended it. A process that fails by itself is a StreampackError.
    """
    reports: list[BatchReport] = []
    is_killed = False
    with (
        log.open("a", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        for line in process.stdout or ():
            if not line.endswith("\n"):
                break  # killed in the middle of a report
            reports.append(json.loads(line))
            show(reports[-1])
            # Reports that were already on their way are read too.
            if reports[-1]["step"] == kill_after:
                process.kill()
                is_killed = True
    if process.returncode and not is_killed:
        raise StreampackError(
            f"the process ended with exit code {process.returncode} after {len(reports)} steps; "
            f"{log} says why"
        )
    return reports, process.returncode


def send(reports: Iterable[BatchReport]) -> None:
    """Write each report to the parent process as soon as it is made."""
    for report in reports:
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()


def check_same_batches(unbroken: Sequence[str], reports: Iterable[BatchReport]) -> None:
    """Raise a StreampackError if a report's batch is not that of the unbroken run, by digest."""
    differing = [one["step"] for one in reports if one["batch"] != unbroken[one["step"] - 1]]
    if differing:
        raise StreampackError(f"batches of steps {differing} differ from the unbroken run's")
