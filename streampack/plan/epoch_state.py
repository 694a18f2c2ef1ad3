"""The state of a run of epochs: what it keeps, and how it differs from what it is loaded into.

The checks here say more than that a field of the fingerprint differs: which stream has other
data, which length file was rewritten, which sizes would work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast, get_args

from streampack.config.packing import Method
from streampack.errors import ResumeError
from streampack.plan.recipe import Recipe
from streampack.plan.run_worlds import nearest_divisors
from streampack.plan.snapshots import snapshots_in
from streampack.plan.spans import RunPlan
from streampack.plan.state import (
    PACK_LENGTHS,
    Progress,
    check_value,
    different_fields,
    is_same_stream,
    other_value,
    plan_fingerprint,
)
from streampack.types import State

MAX_WALKED_EPOCHS = 50_000  # each takes up to 1 ms
WITHOUT_STATE = "or start again without the state"


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


def decode_epochs(state: State, recipe: Recipe, digests: Sequence[str]) -> Progress:
    """Return the position of a state, once it is known to belong to a recipe.

    The recipe must have the state's num_lanes, lane_run and global_batch_size. The ResumeError
    names the first field that differs.
    """
    own = plan_fingerprint(RunPlan([recipe]), digests)
    for key, saved, value in different_fields(state["fingerprint"], own):
        if key != "streams" or not _are_same_streams(saved, value):
            raise ResumeError(_difference(key, saved, value, recipe.names))
    if recipe.mixing.epoch_end == "carry" and not recipe.is_mixed:
        check_value("epoch", state["epoch"], range(MAX_WALKED_EPOCHS + 1))
    return Progress(epoch=state["epoch"], position=state["position"], snapshots=snapshots_in(state))


def _are_same_streams(saved: Any, own: list[str]) -> bool:
    if not isinstance(saved, list) or len(saved) != len(own):
        return False
    return all(is_same_stream(*pair) for pair in zip(saved, own, strict=True))


def _difference(key: str, saved: Any, own: Any, names: list[str]) -> str:
    """Describe the difference in a fingerprint field, and a fix."""
    if key in ("streams", "weights") and isinstance(saved, list) and len(saved) == len(own):
        if key == "streams":
            return _other_streams(saved, own, names)
        if all(isinstance(each, list) and len(each) == 2 for each in saved):
            return _other_weights(saved, own, names)
    if key == "streams" and isinstance(saved, list):
        return (
            f"the state was saved with {len(saved)} streams, but this dataset has {len(own)}, "
            f"{_quoted(names)}; resume with those of the run, {WITHOUT_STATE}"
        )
    way_out = "resume with the saved value"
    if key == "pack_shuffle":
        size = saved[0] if isinstance(saved, list) and len(saved) == 2 else saved
        way_out = f"resume with Order(pack_shuffle={size!r:.40})"
    elif key == PACK_LENGTHS:
        way_out = "resume with the max_seq_len of each Stream that the run began with"
    elif key == "shares":
        way_out = (
            "they come from the streams' length files, or from their bytes where there is none: "
            "restore the length files of the run"
        )
    return f"{other_value(key, saved, own)}; {way_out}, {WITHOUT_STATE}"


def _other_streams(saved: list[Any], own: list[Any], names: list[str]) -> str:
    saved = list(map(str, saved))
    if sorted(saved) == sorted(own):
        order = [names[own.index(digest)] for digest in saved]
        return (
            f"the state was saved with this dataset's streams in another order: {_quoted(order)}; "
            "pass them in that order, as it decides which samples share a pack"
        )
    changed = [
        f"{name!r} (streams[{number}])"
        for number, name in enumerate(names)
        if not is_same_stream(saved[number], own[number])
    ]
    if all(a.partition(":")[0] == b.partition(":")[0] for a, b in zip(saved, own, strict=True)):
        return (
            f"since the state was saved stream {' and '.join(changed)} has other lengths: its "
            "length file, or the table of a token file, was rewritten; put back the file that the "
            "run began with, or start again without the state"
        )
    return (
        f"since the state was saved stream {' and '.join(changed)} holds other data, or another "
        "column of it: resume with what the run began with, or start again without the state"
    )


def _other_weights(saved: list[Any], own: list[Any], names: list[str]) -> str:
    changed = [
        f"{before[0]!r:.20} {before[1]!s:.20} of stream {name!r} an epoch, but this dataset takes "
        f"{now[0]} {now[1]}"
        for name, before, now in zip(names, saved, own, strict=True)
        if before != now
    ]
    return (
        f"the state was saved with {'; '.join(changed)}: resume with the run's proportion, repeat "
        "or choose of each stream, epoch_size and weight_unit, or start again without the state"
    )


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def check_resized(saved: Recipe, own: Recipe, progress: Progress) -> None:
    """Check that a change of the global batch size leaves the packs unchanged.

    `own` is the recipe of the state with the new size. The ResumeError names both sizes, and sizes
    that work.
    """
    size, before = own.global_batch_size, saved.global_batch_size
    if size == before:
        return
    asked = f"the state was saved with global_batch_size={before}, but this dataset asks for {size}"
    keep = f"omit it to keep {before}"
    if progress.position and not own.is_mixed:
        raise ResumeError(
            f"{asked}: batching_method={own.mixing.batching_method!r} chooses the streams of a "
            f"whole global batch together, so another size gives other packs from position "
            f"{progress.position} on; {keep}, or change it at the start of an epoch"
        )
    is_same = own.is_mixed and own.packs_per_carry_epoch == saved.packs_per_carry_epoch
    if own.mixing.epoch_end == "carry" and progress.epoch and not is_same:
        raise ResumeError(
            f"{asked}: with epoch_end='carry' epochs are whole global batches, so the "
            f"{progress.epoch} before would have ended elsewhere; {keep}"
        )
    if progress.position % size:
        raise ResumeError(
            f"{asked}, and position {progress.position} is not a multiple of it; set it to "
            f"{nearest_divisors(progress.position, size)}, or {keep}"
        )
