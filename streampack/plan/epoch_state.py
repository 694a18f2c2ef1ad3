"""What a run of epochs keeps when it resumes, and when its global batch size may change."""

from __future__ import annotations

from typing import NamedTuple, cast, get_args

from streampack.config.packing import Method
from streampack.errors import ResumeError
from streampack.plan.recipe import Recipe
from streampack.plan.run_worlds import nearest_divisors
from streampack.plan.state import Progress
from streampack.types import State


class RunShape(NamedTuple):
    """What a run keeps when it resumes."""

    num_lanes: int
    lane_turn: int
    global_batch_size: int
    method: Method | None = None
    """Its packing method, used if the dataset asks for none."""


def run_shape(state: State) -> RunShape:
    """Return what a state's run keeps."""
    method = state["fingerprint"].get("method")
    return RunShape(
        state["num_lanes"],
        state["lane_run"],
        state["global_batch_size"],
        method=cast(Method, method) if method in get_args(Method) else None,
    )


def check_resized(saved: Recipe, own: Recipe, progress: Progress) -> None:
    """Check that a change of the global batch size leaves the packs unchanged.

    `own` is the recipe of the state with the new size. The ResumeError names both sizes, and sizes
    that work.
    """
    size, before = own.global_batch_size, saved.global_batch_size
    if size == before:
        return
    epoch, position = progress.epoch, progress.position
    is_same = own.is_mixed and own.packs_per_carry_epoch == saved.packs_per_carry_epoch
    if position and not own.is_mixed:
        why = (
            f"batching_method={own.mixing.batching_method!r} chooses the streams of a whole global "
            f"batch together, so another size gives other packs from position {position} on; "
            "change it at the start of an epoch"
        )
    elif own.mixing.epoch_end == "carry" and epoch and not is_same:
        why = (
            f"epochs that epoch_end='carry' ends are whole global batches, so the {epoch} before "
            "would have ended elsewhere; set the former size"
        )
    elif position % size:
        why = (
            f"position {position} is not a multiple of it; set it to "
            f"{nearest_divisors(position, size)}"
        )
    else:
        return
    raise ResumeError(
        f"the state was saved with global_batch_size={before}, but this dataset asks for {size}, "
        f"and {why}, or omit it to keep {before}"
    )
