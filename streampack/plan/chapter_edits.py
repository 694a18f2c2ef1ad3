"""Edits of the chapters of a run: as written, as amended since, as a state records them, and skips.

::

    written     0: 100 steps                1: ...        of a config
    running     0: 40 steps   1: 60 steps   2: ...        after an amendment at step 40
    origins     0             0             1             where each was written

    state, written chapters --> amended as the state records --.
                            '-> as they are written -----------+--> the first that fits, planned

A state records the running chapters and their origins. So the written config still fits it, and so
does one into which the amendments were written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from streampack.chapters import Chapter, Ramp
from streampack.errors import ConfigError, ResumeError
from streampack.plan.chapter_recipes import chapter_record
from streampack.plan.recipe import Recipe
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress, decode_state, wrong_value
from streampack.types import State

logger = logging.getLogger(__name__)

Skips: TypeAlias = list[tuple[int, int]]
"""Ranges [first, stop) of steps of a run."""


class RunChapter(NamedTuple):
    """A chapter of a run."""

    chapter: Chapter
    origin: int
    """The written chapter that it comes from."""
    steps: int | None
    """Its length in global batches, or None if it has no end."""
    is_amended: bool = False


RunChapters: TypeAlias = Sequence[RunChapter]


def amend_chapters(
    chapters: RunChapters, number: int, weights: Any, *, after: int
) -> tuple[RunChapter, ...]:
    """Return chapters of which one ends `after` its first steps, and one of other weights follows.

    With 0 it is replaced. The other one has the rest of its steps.
    """
    running, _, steps, _ = chapters[number]
    if running.passes is not None:
        raise ConfigError(
            f"chapters[{number}] takes whole passes, so its weights stay; let the run end, or "
            "resume from a state of the chapter before"
        )
    left = None if steps is None else steps - after
    if left == 0:
        raise ConfigError(
            f"chapters[{number}] ends with this global batch; amend in the next chapter"
        )
    if isinstance(weights, Mapping):
        weights = dict(weights)  # the caller may change it later
    rest = replace(running, weights=weights, until=None, steps=left, stop_after=None)
    parts = [(rest, left)]
    if after:
        parts.insert(0, (replace(running, stop_after=after), after))
    made = [
        chapters[number]._replace(chapter=part, steps=length, is_amended=True)
        for part, length in parts
    ]
    return (*chapters[:number], *made, *chapters[number + 1 :])


def edits_record(chapters: RunChapters, skips: Sequence[tuple[int, int]]) -> State:
    """Return what a state keeps in addition to the chapters of a run."""
    return {
        "skip": [list(skip) for skip in skips],
        "origins": [each.origin for each in chapters],
        "amended": [number for number, each in enumerate(chapters) if each.is_amended],
        "batch_sizes": [each.chapter.batch_size for each in chapters],
    }


def _as_recorded(written: RunChapters, state: State) -> RunChapters | None:
    """Return written chapters with the amendments of a state; None if it fits none.

    What is left of one when its parts before are taken off is the length of its last part: so it
    follows an edit, and is nothing where the amendments were written into the chapters.
    """
    records, origins, amended = state["chapters"], state["origins"], state["amended"]
    last = max(amended, default=-1)
    if not amended or max(origins[: last + 1]) >= len(written):
        return None
    replayed: list[RunChapter] = []
    for number, origin in enumerate(origins[: last + 1]):
        own, record = written[origin], records[number]
        steps = record.get("steps")
        if origin not in origins[number + 1 :] and own.steps is not None:
            before = zip(records[:number], origins, strict=False)
            steps = own.steps - sum(each.get("steps") or 0 for each, of in before if of == origin)
            if steps < 1:
                return None
        if number in amended:
            chapter = _with_recorded_weights(own.chapter, record, steps)
            own = RunChapter(chapter, origin, steps, is_amended=True)
        replayed.append(own)
    return (*replayed, *written[origins[last] + 1 :])


def _with_recorded_weights(
    chapter: Chapter, record: Mapping[str, Any], steps: int | None
) -> Chapter:
    weights: dict[str, Any] = {}
    try:
        for name, (begin, end) in record["weights"].items():
            first, last = Fraction(begin), Fraction(end)
            weights[name] = first if first == last else Ramp(first, last)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise wrong_value("chapters' weights", record["weights"], "shares by name") from error
    is_left = record.get("steps") != record.get("ramp_steps") is not None
    whole, stop = (record["ramp_steps"], steps) if is_left else (steps, None)
    return replace(chapter, weights=weights, until=None, steps=whole, stop_after=stop)


def planned_as_before(
    state: State, written: RunChapters, plan: Callable[..., RunPlan], digests: Sequence[str]
) -> tuple[RunPlan, RunChapters, Progress]:
    """Return the plan of the chapters that a state belongs to, the chapters, and its position.

    `plan` is `build_chapters` of a dataset. Chapters that stay keep their lane_turn. The
    ResumeError for a state of another run names the first difference.
    """
    recorded = _as_recorded(written, state)
    # Or else no chapter was amended, or what was is written into the chapters.
    candidates = [written] if recorded is None else [recorded, written]
    errors = []
    for chapters in candidates:
        try:
            turn_of = partial(_kept_turn, state, chapters)
            run = plan(chapters, num_lanes=state["num_lanes"], turn_of=turn_of)
            return run, chapters, decode_state(state, run, digests)
        except ConfigError as error:
            errors.append(ResumeError(f"the state does not fit this dataset: {error}"))
        except ResumeError as error:
            errors.append(error)
    raise errors[0]


def _kept_turn(state: State, chapters: RunChapters, number: int, recipe: Recipe) -> int | None:
    """Return the lane_turn of a chapter that stays as it was."""
    records, sizes = state["chapters"], state["batch_sizes"]
    if number >= len(records):
        return None
    record, own = records[number], chapter_record(recipe)
    is_later = state["epoch"] < number < len(sizes)
    is_same = not (is_later and sizes[number] != chapters[number].chapter.batch_size)
    is_same &= all(own[key] == record.get(key) for key in {*own} - {"lane_run", "steps"})
    turn: int = record["lane_run"]
    return turn if is_same else None


def read_skips(state: State) -> Skips:
    """Return the ranges of steps that a state skips, after a check."""
    for skip in state["skip"]:
        if len(skip) != 2 or skip[1] < skip[0]:
            raise wrong_value("skip", skip, "a range [first, stop)")
    return [(first, stop) for first, stop in state["skip"]]


def skip_problem(
    run: RunPlan, progress: Progress, stride: int, skips: Sequence[tuple[int, int]]
) -> str | None:
    """Return why the steps to skip are not whole for ranks that take `stride` packs together.

    None if they are. `skips` are ranges [first, stop) of steps of the run.
    """
    step, end = run.step_of(progress.epoch, progress.position), run.stop_step(progress.epoch)
    ahead = [skip for skip in skips if skip[1] > step and (end is None or skip[0] < end)]
    if not ahead or progress.position % stride == 0:
        return None
    first, stop = ahead[0]
    return (
        f"position {progress.position} is inside a step of this world, which has "
        f"batch_size * ranks = {stride} packs, so it does not read steps {first} to {stop - 1} "
        "whole, which are skipped; set a smaller batch_size, or take a state after a whole step"
    )


def warn_of_skips(
    run: RunPlan, skips: Sequence[tuple[int, int]], progress: Progress | None = None
) -> None:
    """Warn of ranges [first, stop) of steps that are not skipped: past, or beyond the run."""
    begun, end = 0, run.num_steps
    if progress is not None:
        size = run.recipe(progress.epoch).global_batch_size
        begun = run.step_of(progress.epoch, progress.position + size - 1)
    for first, stop in skips:
        if first < begun or (end is not None and stop > end):
            last = "its end" if end is None else end - 1
            logger.warning(
                "skip has steps %d to %d, and the run still has steps %d to %s, counted from 0: "
                "the others are not skipped; to skip earlier ones, resume from an earlier state",
                *(first, stop - 1, begun, last),
            )
