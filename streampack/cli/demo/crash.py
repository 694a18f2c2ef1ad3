"""Train in a subprocess that is killed without warning, and resume in a new one.

::

    process 1    step 1 ... 12 [saved] 13 14 15  SIGKILL
    process 2                  '-----> 13 14 15 16 ... 30

Cost: that of the training, plus a few seconds for each process to import torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streampack.errors import StreampackError

TRAINING = [sys.executable, "-m", "streampack.cli.demo.train"]

Report = dict[str, Any]
"""The training's report on a step: its number, the loss, the batch's digest."""


def train_until(
    arguments: list[str], log: Path, seen: Callable[[Report], bool]
) -> tuple[list[Report], int]:
    """Start a training process and read its reports; kill it with SIGKILL when `seen` is true.

    Args:
        arguments: The training's arguments.
        log: The file for its other output.
        seen: Called with each report; True kills the process, which cannot clean up.

    Returns:
        The reports, and the exit code: minus the signal's number if a signal ended it.

    Raises:
        StreampackError: If the training itself fails.
    """
    command = [*TRAINING, *arguments]
    reports = []
    is_killed = False
    with (
        log.open("a", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        for line in process.stdout or ():
            reports.append(json.loads(line))
            if seen(reports[-1]):
                process.kill()
                is_killed = True
                break
    if process.returncode and not is_killed:
        raise StreampackError(
            f"the training ended with exit code {process.returncode} after {len(reports)} steps; "
            f"{log} says why"
        )
    return reports, process.returncode
