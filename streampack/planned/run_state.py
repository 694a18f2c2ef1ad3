"""What a process runs and its position, as one frozen value; where it begins, and its changes.

::

    arguments --> RunState --load, amend, skip, iterate--> RunState --> ...

Each change makes another value, which the engine adopts in one assignment. It checks all there is
to check before it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from streampack._checks import read_count
from streampack.errors import ConfigError, ResumeError
from streampack.plan.chapter_edits import (
    RunChapter,
    RunChapters,
    amend_chapters,
    planned_as_before,
    read_skips,
    skip_problem,
    warn_of_skips,
)
from streampack.plan.chapter_recipes import chapter_steps
from streampack.plan.device_plan import DeviceView
from streampack.plan.lane_ends import count_slots
from streampack.plan.recipe import Recipe
from streampack.plan.run_worlds import RunWorld, check_at_batch, check_balance, check_resized
from streampack.plan.sequence import PackSequence
from streampack.plan.snapshots import MAX_INTEGER
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress, decode_state, run_shape
from streampack.planned.build import build_chapters, build_recipe, chapter_spec
from streampack.planned.spec import DatasetSpec
from streampack.types import State


class RunState(NamedTuple):
    """A run, and its position in a process; see `ResumableRun`."""

    run: RunPlan
    """Its epochs or its chapters, and where they begin."""
    spec: DatasetSpec
    """The dataset's arguments; in a run of chapters, those of the current one."""
    chapters: RunChapters = ()
    number: int = 0
    """The current chapter, or 0."""
    skips: Sequence[tuple[int, int]] = ()
    """Ranges [first, stop) of steps of the run that are not delivered."""
    past: Sequence[RunWorld] = ()
    """Worlds of the run before `start`."""
    start: Progress = Progress()
    """Where the run was loaded, set or changed last."""
    replans: bool = False
    """Whether texts may be tokenized again, to plan lanes from their start."""
    worker_start: Progress | None = None
    """Where the next iteration begins, loaded in a worker of torch."""
    saved_size: int = 0
    """The global batch size of the state loaded last; of epochs."""
    at: Progress | None = None
    current: PackSequence | None = None
    """The last iteration."""
    epoch_after: int = 0
    moves: int = 0
    changes: int = 0
    """How often the run was changed; an iteration that began before ends there."""

    @property
    def recipe(self) -> Recipe:
        return self.run.recipes[self.number]

    @property
    def view(self) -> DeviceView:
        return self.run.views[self.number]

    def with_recipe(self, recipe: Recipe) -> RunState:
        """Return a state with another recipe of all epochs."""
        return self._replace(run=RunPlan([recipe], [self.view]))


def digests_of(spec: DatasetSpec) -> list[str]:
    """Return a digest of each stream's contents; a chapter's streams may grow."""
    return [each.growing_digest if spec.chapters else each.full_digest for each in spec.streams]


def _written_chapters(spec: DatasetSpec) -> RunChapters:
    chapters = []
    for number, chapter in enumerate(spec.chapters):
        own = chapter_spec(spec, chapter)
        steps = chapter_steps(chapter, own.packing, own.mixing.global_batch_size or 1)
        chapters.append(RunChapter(chapter, number, steps))
    return chapters


def first_state(spec: DatasetSpec) -> RunState:
    """Return the state of a run that begins."""
    if spec.chapters:
        chapters = _written_chapters(spec)
        return RunState(build_chapters(spec, chapters), spec, chapters, skips=spec.skip)
    recipe = build_recipe(spec)
    run = RunPlan([recipe], [spec.view()])
    return RunState(run, spec, saved_size=recipe.global_batch_size)


def after_edge(run: RunPlan, progress: Progress) -> Progress:
    """Return the start of the next chapter for the end of one."""
    slots = run.chapters[progress.epoch].num_slots if run.chapters else None
    if slots is None or progress.position < slots or progress.epoch + 1 == len(run):
        return progress
    return Progress(epoch=progress.epoch + 1, snapshots=progress.snapshots)


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
    return planned_as_before(saved, _written_chapters(spec), plan, digests)


def loaded_chapters(
    state: RunState, spec: DatasetSpec, digests: Sequence[str], saved: State
) -> tuple[RunState, Progress]:
    """Return the run of a saved state; later chapters, skips and streams may be others."""
    skips = read_skips(saved)
    run, chapters, progress = chapters_of(spec, digests, saved)
    current = progress.epoch
    view, num_packs = run.view(current), run.chapters[current].num_slots or MAX_INTEGER
    check_balance(saved, run.recipes[current], view, lambda: num_packs)
    check_at_batch(progress.position, progress.position, view)
    # Those that the state knows of were skipped then.
    warn_of_skips(run, [skip for skip in state.skips if skip not in skips], progress)
    skips = sorted({*state.skips, *skips})
    if (problem := skip_problem(run, progress, view.stride, skips)) is not None:
        raise ResumeError(problem)
    return state._replace(run=run, chapters=chapters, skips=skips), progress


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
    return state._replace(run=planned, chapters=chapters)


def skipping(state: RunState, reached: Progress, steps: int) -> RunState:
    """Return a run that skips the next global batches, from the next edge on."""
    run, progress = state.run, after_edge(state.run, reached)
    number, stride = progress.epoch, run.view(progress.epoch).stride
    first = run.step_of(number, progress.position + run.recipe(number).global_batch_size - 1)
    skips = sorted([*state.skips, (first, first + read_count("steps", steps))])
    if (problem := skip_problem(run, progress, stride, skips)) is not None:
        raise ConfigError(problem)
    warn_of_skips(run, [(first, first + steps)], progress)
    return state._replace(skips=skips)
