"""The chapters that a saved state belongs to: as they are written, or as they were amended.

::

    state, written chapters --> amended as the state records --.
                            '-> as they are written -----------+--> the first that fits, planned

A later chapter takes its lane_run from its batch size where that was edited. Others keep theirs, so
that they are the same in every world.

Cost: building a plan for each candidate; the walk is resumed, not repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from streampack.chapters import Chapter
from streampack.errors import ConfigError, ResumeError
from streampack.plan import Progress
from streampack.plan.chapter_recipes import chapter_record
from streampack.plan.run_plan import RunPlan
from streampack.plan.state_differences import CHECKS, check_past
from streampack.planned.build import DatasetSpec
from streampack.planned.run_build import build_run, chapter_steps, run_recipes
from streampack.planned.run_chapters import RunChapters
from streampack.types import State

logger = logging.getLogger(__name__)

Records = Sequence[dict[str, Any]]


def fitting_run(
    spec: DatasetSpec, written: RunChapters, state: State, records: Records
) -> tuple[RunChapters, RunPlan]:
    """Return the chapters that a state belongs to, and their plan; `records` are the state's.

    The ResumeError for a state of other chapters names the first difference.
    """
    steps = [chapter_steps(spec, chapter) for chapter in written.chapters]
    amended = written.as_recorded(state, records, steps)
    # Or else no chapter was amended, or what was is written into the chapters.
    candidates = [written] if amended is None else [amended, written]
    errors = []
    for chapters in candidates:
        try:
            run = _resumed(spec, chapters.chapters, records, state)
            check_past(records, run.recipes, state)
        except ResumeError as error:
            errors.append(error)
        else:
            return chapters, run
    raise errors[0]


def _resumed(
    spec: DatasetSpec, chapters: Sequence[Chapter], records: Records, state: State
) -> RunPlan:
    """Return the plan of a run that resumes: chapters that stay keep their lane_run."""
    lanes, current = state["num_lanes"], state["epoch"]
    # As the chapters were written when the state was saved.
    sizes = CHECKS.up_to("batch_sizes", state.get("batch_sizes"), len(records))
    try:
        _, recipes = run_recipes(spec, chapters, num_lanes=lanes)
        runs: list[int | None] = []
        for number, (record, recipe) in enumerate(zip(records, recipes, strict=False)):
            own = chapter_record(recipe)
            is_same = all(
                own[key] == record.get(key) for key in own if key not in ("lane_run", "steps")
            )
            is_later = current < number < len(sizes)
            is_same &= not (is_later and sizes[number] != chapters[number].batch_size)
            runs.append(record["lane_run"] if is_same else None)
        return build_run(spec, chapters, num_lanes=lanes, lane_runs=runs)
    except ConfigError as error:
        raise ResumeError(f"the state does not fit this dataset: {error}") from error


def read_skips(state: State) -> list[tuple[int, int]]:
    """Return the ranges [first, stop) of steps that a state skips, after a check."""
    read = []
    for skip in CHECKS.up_to("skip", state.get("skip", []), 10**6):
        first, stop = CHECKS.items("skip", skip, 2)
        first = CHECKS.integer("skip", first, 0, 2**62)
        read.append((first, CHECKS.integer("skip", stop, first, 2**62)))
    return read


def skip_problem(
    run: RunPlan, progress: Progress, window: int, skips: Sequence[tuple[int, int]]
) -> str | None:
    """Return why the steps to skip are not whole for ranks that take `window` packs together.

    None if they are. `skips` are ranges [first, stop) of steps of the run.
    """
    chapter, size = progress.epoch, run.recipes[progress.epoch].global_batch_size
    step = run.steps_before(chapter) + progress.position // size
    slots = run.num_slots(chapter)
    end = None if slots is None else run.steps_before(chapter) + slots // size
    ahead = [skip for skip in skips if skip[1] > step and (end is None or skip[0] < end)]
    if not ahead or progress.position % window == 0:
        return None
    first, stop = ahead[0]
    return (
        f"position {progress.position} lies inside a step of this world, whose steps have "
        f"batch_size * ranks = {window} packs, so it does not read steps {first} to {stop - 1} "
        "whole, which are skipped; set a smaller batch_size, or take a state after a whole step"
    )


def warn_of_skips(
    run: RunPlan, skips: Sequence[tuple[int, int]], progress: Progress | None = None
) -> None:
    """Warn of ranges [first, stop) of steps that are not skipped: past, or beyond the run."""
    begun, at = 0, progress or Progress()
    if progress is not None:
        size = run.recipes[at.epoch].global_batch_size
        begun = run.steps_before(at.epoch) - (-at.position // size)
    last = len(run) - 1
    slots = run.num_slots(last)
    end = (
        None
        if slots is None
        else run.steps_before(last) + slots // run.recipes[last].global_batch_size
    )
    for first, stop in skips:
        if first < begun:
            logger.warning(
                "skip has steps %d to %d, and the state was saved when %d had begun: those are not "
                "skipped; to skip them, resume from an earlier state",
                first,
                stop - 1,
                begun,
            )
        if end is not None and stop > end:
            logger.warning(
                "skip has steps %d to %d, and the run has %d, counted from 0: those after are not "
                "there",
                first,
                stop - 1,
                end,
            )
