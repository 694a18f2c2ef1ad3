"""The run of a saved state, and changes of a running one: functions from state to state.

Each checks all there is to check before it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from streampack._checks import read_count
from streampack.errors import ConfigError, ResumeError
from streampack.plan.chapter_edits import (
    RunChapters,
    amend_chapters,
    planned_as_before,
    read_skips,
    skip_problem,
    warn_of_skips,
)
from streampack.plan.lane_ends import count_slots
from streampack.plan.run_worlds import check_at_batch, check_balance, check_resized
from streampack.plan.snapshots import MAX_INTEGER
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress, decode_state, run_shape
from streampack.planned.build import build_chapters, build_recipe
from streampack.planned.run_state import RunState, after_edge, written_chapters
from streampack.planned.spec import DatasetSpec
from streampack.types import State


def loaded_epochs(
    state: RunState, spec: DatasetSpec, digests: Sequence[str], saved: State
) -> tuple[RunState, Progress]:
    """Return the run of a saved state, with its lanes and packing method, and its position."""
    shape = run_shape(saved)
    size = spec.mixing.global_batch_size or shape.global_batch_size
    try:
        before = recipe = build_recipe(spec, shape)
        if size != shape.global_batch_size:
            recipe = build_recipe(spec, shape._replace(global_batch_size=size))
    except ConfigError as error:
        raise ResumeError(f"the state does not fit this dataset: {error}") from error
    progress = decode_state(saved, RunPlan([before]), digests)
    check_resized(before, recipe, progress)
    check_balance(saved, before, state.view, lambda: count_slots(before, progress.epoch))
    return state.with_recipe(recipe)._replace(saved_size=shape.global_batch_size), progress


def chapters_of(
    spec: DatasetSpec, digests: Sequence[str], saved: State
) -> tuple[RunPlan, RunChapters, Progress]:
    """Return the chapters of a saved state, planned, and its position, or raise a ResumeError."""
    plan = partial(build_chapters, spec)
    return planned_as_before(saved, written_chapters(spec), plan, digests)


def loaded_chapters(
    state: RunState, spec: DatasetSpec, digests: Sequence[str], saved: State
) -> tuple[RunState, Progress]:
    """Return the run of a saved state; later chapters, skips and streams may be others."""
    skips = read_skips(saved)
    run, chapters, progress = chapters_of(spec, digests, saved)
    current = progress.epoch
    view, num_packs = run.view(current), run.spans[current].num_slots or MAX_INTEGER
    check_balance(saved, run.recipes[current], view, lambda: num_packs)
    check_at_batch(progress.position, progress.position, view)
    # Those that the state knows of were skipped then.
    warn_of_skips(run, [skip for skip in state.skips if skip not in skips], progress)
    skips = sorted({*state.skips, *skips})
    if (problem := skip_problem(run, progress, view.stride, skips)) is not None:
        raise ResumeError(problem)
    return state._replace(run=run, chapters=chapters, skips=skips, latest=None), progress


def amended(state: RunState, spec: DatasetSpec, reached: Progress, weights: Any) -> RunState:
    """Return a run whose chapter ends at the next global batch; one of other weights follows."""
    run, progress = state.run, after_edge(state.run, reached)
    number, size = progress.epoch, run.recipes[progress.epoch].global_batch_size
    steps = -(-progress.position // size)
    chapters = amend_chapters(state.chapters, number, weights, after=steps)
    turns = [recipe.lane_turn for recipe in run.recipes]
    if steps:
        turns.insert(number, turns[number])
    planned = build_chapters(
        spec,
        chapters,
        num_lanes=run.recipes[0].num_lanes,
        turn_of=lambda each, _: turns[each] if each < len(turns) else None,
    )
    # A state in the chapter that is amended as a whole would have its former weights.
    is_replaced = reached.epoch == number and not steps
    latest = None if is_replaced else state.latest
    return state._replace(run=planned, chapters=chapters, latest=latest)


def skipping(state: RunState, reached: Progress, steps: int) -> RunState:
    """Return a run that skips the next global batches, from the next edge on."""
    run, progress = state.run, after_edge(state.run, reached)
    span, stride = run.spans[progress.epoch], run.view(progress.epoch).stride
    first = span.step_at(progress.position + span.recipe.global_batch_size - 1)
    skips = sorted([*state.skips, (first, first + read_count("steps", steps))])
    if (problem := skip_problem(run, progress, stride, skips)) is not None:
        raise ConfigError(problem)
    warn_of_skips(run, [(first, first + steps)], progress)
    return state._replace(skips=skips)
