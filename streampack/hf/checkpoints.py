"""The loader's state in checkpoints of transformers' Trainer, and which checkpoints are complete.

::

    checkpoint-10/streampack.json       the state of every rank        written first
                  model, optimizer, random states of every rank
                  trainer_state.json                                   written last

Only then does Trainer delete older checkpoints. So with both JSON files there, the others are too,
and a run that is killed at any moment leaves a complete checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from streampack.errors import ResumeError
from streampack.hf.checks import check_global_batch
from streampack.loader.loader import PackedDataLoader, gather_states, state_of_rank

logger = logging.getLogger(__name__)

LOADER_STATE = "streampack.json"


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint of a `PackedTrainer` in a folder; None if it has none.

    A checkpoint that a killed run was writing is not complete.

    >>> last_checkpoint("no-such-folder") is None
    True
    """
    found = _checkpoints(output_dir)
    complete = [number for number in found if not missing_files(found[number])]
    return str(found[max(complete)]) if complete else None


def find_checkpoint(output_dir: str | os.PathLike[str], resume: str | bool | None) -> str | None:
    """Return the checkpoint that `resume_from_checkpoint` means, or None to begin at step 0.

    Raises:
        ResumeError: If the folder is incomplete, or no complete one is found.
    """
    if not resume:
        return None
    folder = Path(output_dir if resume is True else resume)
    if resume is not True and not _checkpoints(folder):
        if missing := missing_files(folder):
            last = last_checkpoint(folder.parent)
            raise ResumeError(
                f"the checkpoint {resume} has no readable {' and no '.join(missing)}: the run was "
                "killed while it wrote it, or another trainer wrote it; "
                + (f"resume from {last}" if last else "omit resume_from_checkpoint to begin")
            )
        return str(folder)
    last = last_checkpoint(folder)
    if last is None:
        raise ResumeError(
            f"resume_from_checkpoint={resume}, but {folder} has no complete checkpoint; omit it "
            "to begin, or pass streampack.hf.last_checkpoint(...), which may be None"
        )
    newest = str(max(_checkpoints(folder).items())[1])
    if newest != last:
        logger.warning("%s is incomplete: resuming from %s", newest, last)
    else:
        logger.info("resuming from %s", last)
    return last


def save_state(
    output_dir: str | os.PathLike[str], step: int, loader: PackedDataLoader, *, writes: bool
) -> None:
    """Write the states of all ranks into the checkpoint of a step; every rank must call this."""
    states = gather_states(loader)
    if writes:
        folder = Path(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        folder.mkdir(parents=True, exist_ok=True)
        # Of an older run's checkpoint of this step, which is overwritten.
        (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        new = folder / f"{LOADER_STATE}.new"
        new.write_text(json.dumps(states), encoding="utf-8")
        new.replace(folder / LOADER_STATE)


def load_state(folder: str, loader: PackedDataLoader) -> None:
    """Let a loader continue where a checkpoint was taken, after a check of its state."""
    states = json.loads(Path(folder, LOADER_STATE).read_text(encoding="utf-8"))
    state = state_of_rank(states, loader.dataset.world, folder)
    check_global_batch(state, loader.dataset)
    loader.load_state_dict(state)


def steps_done(folder: str) -> int:
    """Return the optimizer steps of a complete checkpoint."""
    state = json.loads(Path(folder, TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    return int(state["global_step"])


def missing_files(folder: Path) -> list[str]:
    """Return which of the two files a checkpoint lacks, or has only in part."""
    missing = []
    for name in (LOADER_STATE, TRAINER_STATE_NAME):
        try:
            json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            missing.append(name)
    return missing


def _checkpoints(output_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the checkpoints of a folder by their step."""
    found: dict[int, Path] = {}
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if number := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name):
            found[int(number[1])] = path
    return found
