"""The chapters that a saved state belongs to: as they are written, or as they were amended.

::

    state, written chapters --> amended as the state records --.
                            '-> as they are written -----------+--> the first that fits, planned

Cost: building a plan for each candidate; the walk is resumed, not repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streampack.chapters import Chapter
from streampack.errors import ConfigError, ResumeError
from streampack.plan import Progress
from streampack.plan.run_plan import RunPlan
from streampack.plan.run_state import chapter_record, check_past
from streampack.plan.state_text import CHECKS
from streampack.planned.build import DatasetSpec
from streampack.planned.run_build import build_run
from streampack.planned.run_chapters import RunChapters
from streampack.types import State

Records = Sequence[dict[str, Any]]


def fitting_run(
    spec: DatasetSpec, written: RunChapters, state: State, records: Records
) -> tuple[RunChapters, RunPlan]:
    """Return the chapters that a state belongs to, and their plan; `records` are the state's.

    The ResumeError for a state of other chapters names the first difference.
    """
    candidates = [written]
    amended = written.as_recorded(state, records)
    if amended is not None:
        last = max(amended.amended) + 1
        # Or else the amendments were written into the chapters.
        if not _are_written(spec, written, records[:last], state["num_lanes"]):
            candidates = [amended, written]
    errors = []
    for chapters in candidates:
        try:
            run = _resumed(spec, chapters.chapters, records, state["num_lanes"])
            check_past(records, run, state)
        except ResumeError as error:
            errors.append(error)
        else:
            return chapters, run
    raise errors[-1]


def _are_written(spec: DatasetSpec, written: RunChapters, records: Records, lanes: int) -> bool:
    """Whether the first chapters are written as a state records them, amendments included."""
    chapters = written.chapters[: len(records)]
    if len(chapters) < len(records):
        return False
    runs = [record["lane_run"] for record in records]
    run = build_run(spec, chapters, num_lanes=lanes, lane_runs=runs)
    return [chapter_record(recipe) for recipe in run.recipes] == list(records)


def _resumed(
    spec: DatasetSpec, chapters: Sequence[Chapter], records: Records, lanes: int
) -> RunPlan:
    """Return the plan of a run that resumes: chapters that stay keep their lane_run."""
    try:
        plain = build_run(spec, chapters, num_lanes=lanes)
        runs: list[int | None] = []
        for number, record in enumerate(records[: len(chapters)]):
            own = chapter_record(plain.recipes[number])
            is_same = all(
                own[key] == record.get(key) for key in own if key not in ("lane_run", "steps")
            )
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
