"""Training in a process of its own, killed without warning, and again in a new one.

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

__all__ = ["Report", "train_until"]

TRAINING = [sys.executable, "-m", "streampack.cli.demo.train"]

Report = dict[str, Any]
"""What the training says of a step: its number, the loss, the batch's digest."""


def train_until(
    arguments: list[str], log: Path, seen: Callable[[Report], bool]
) -> tuple[list[Report], int]:
    """Start a training process and read its reports; kill it with SIGKILL once `seen` says so.

    Args:
        arguments: What the training is to be called with.
        log: Where its other output goes.
        seen: Called with each report; True kills the process, which has no time to tidy up.

    Returns:
        The reports, and the exit code: minus the signal's number if a signal ended it.

    Raises:
        StreampackError: If the training fails by itself.
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
