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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from streampack.chapters import Chapter, Ramp
from streampack.errors import ConfigError, ResumeError
from streampack.plan.chapter_recipes import chapter_record
from streampack.plan.recipe import Recipe
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress
from streampack.plan.state_differences import CHECKS, check_past
from streampack.planned.build import build_chapters, chapter_steps
from streampack.planned.spec import DatasetSpec
from streampack.types import State

logger = logging.getLogger(__name__)

Records = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RunChapters:
    """The chapters of a run."""

    chapters: tuple[Chapter, ...]
    origins: tuple[int, ...]
    """The written chapter that each comes from."""
    amended: frozenset[int] = frozenset()
    """Numbers of the chapters that an amendment changed."""

    @staticmethod
    def written(chapters: Sequence[Chapter]) -> RunChapters:
        """Return chapters as they were written."""
        return RunChapters(tuple(chapters), tuple(range(len(chapters))))

    def amend(
        self, number: int, weights: Mapping[str, Any], *, after: int, left: int | None
    ) -> RunChapters:
        """Return chapters of which one ends early; another of other weights takes its rest.

        Args:
            number: The chapter that ends.
            weights: The weights of its rest.
            after: Its steps; with 0, it is replaced.
            left: The steps of its rest, or None if it has no end.
        """
        running, origins = self.chapters[number], self.origins
        if isinstance(weights, Mapping):
            weights = dict(weights)  # the caller may change it later
        rest = replace(running, weights=weights, until=None, steps=left, stop_after=None)
        parts = [replace(running, stop_after=after), rest] if after else [rest]
        num_more = len(parts) - 1
        return RunChapters(
            (*self.chapters[:number], *parts, *self.chapters[number + 1 :]),
            (*origins[:number], *[origins[number]] * len(parts), *origins[number + 1 :]),
            frozenset(
                [*range(number, number + len(parts))]
                + [n if n < number else n + num_more for n in self.amended]
            ),
        )

    def record(self, num_chapters: int) -> State:
        """Return what a state keeps in addition to the chapters of a run, as many as these."""
        amended = [number for number in sorted(self.amended) if number < num_chapters]
        sizes = [chapter.batch_size for chapter in self.chapters[:num_chapters]]
        origins = list(self.origins[:num_chapters])
        return {"origins": origins, "amended": amended, "batch_sizes": sizes}

    def as_recorded(
        self, state: State, records: Sequence[Mapping[str, Any]], steps: Sequence[int | None]
    ) -> RunChapters | None:
        """Return these written chapters with the amendments of a state; None if it fits none.

        `steps` are the lengths of the written chapters. What is left of one when its parts before
        are taken off is the length of its last part: so it follows an edit, and is nothing where
        the amendments were written into the chapters.
        """
        origins = CHECKS.items("origins", state.get("origins"), len(records))
        for origin in origins:
            CHECKS.integer("origins", origin, 0, len(records))
        amended = CHECKS.up_to("amended", state.get("amended"), len(records))
        for number in amended:
            CHECKS.integer("amended", number, 0, len(records) - 1)
        written = self.chapters
        if not amended or max(origins[n] for n in amended) >= len(written):
            return None
        last = max(amended)
        replayed: list[Chapter] = []
        for n, origin in enumerate(origins[: last + 1]):
            length = records[n].get("steps")
            if origin not in origins[n + 1 :] and (length := steps[origin]) is not None:
                begun = [records[m].get("steps") for m in range(n) if origins[m] == origin]
                length -= sum(CHECKS.integer("steps", part, 0, 2**62) for part in begun)
                if length < 1:
                    return None
            is_amended = n in amended
            chapter = written[origin]
            replayed.append(_as_recorded(chapter, records[n], length) if is_amended else chapter)
        rest = range(origins[last] + 1, len(written))
        return RunChapters(
            (*replayed, *[written[origin] for origin in rest]),
            (*origins[: last + 1], *rest),
            frozenset(amended),
        )


def _as_recorded(chapter: Chapter, record: Mapping[str, Any], steps: int | None) -> Chapter:
    """Return a written chapter with the weights that a state records, and a length."""
    weights: dict[str, Any] = {}
    try:
        for name, (begin, end) in CHECKS.mapping("weights", record.get("weights")).items():
            first, last = Fraction(begin), Fraction(end)
            weights[name] = first if first == last else Ramp(first, last)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CHECKS.error("weights", record.get("weights"), wanted="shares by name") from error
    is_left = record.get("steps") != record.get("ramp_steps") is not None
    whole, stop = (record["ramp_steps"], steps) if is_left else (steps, None)
    return replace(chapter, weights=weights, until=None, steps=whole, stop_after=stop)


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
    """Return the plan of a run that resumes: chapters that stay keep their lane_turn."""
    lanes, current = state["num_lanes"], state["epoch"]
    # As the chapters were written when the state was saved.
    sizes = CHECKS.up_to("batch_sizes", state.get("batch_sizes"), len(records))

    def kept_turn(number: int, recipe: Recipe) -> int | None:
        if number >= len(records):
            return None
        record, own = records[number], chapter_record(recipe)
        is_same = all(
            own[key] == record.get(key) for key in own if key not in ("lane_run", "steps")
        )
        is_later = current < number < len(sizes)
        is_same &= not (is_later and sizes[number] != chapters[number].batch_size)
        return record["lane_run"] if is_same else None

    try:
        return build_chapters(spec, chapters, num_lanes=lanes, turn_of=kept_turn)
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
    run: RunPlan, progress: Progress, stride: int, skips: Sequence[tuple[int, int]]
) -> str | None:
    """Return why the steps to skip are not whole for ranks that take `stride` packs together.

    None if they are. `skips` are ranges [first, stop) of steps of the run.
    """
    span = run.spans[progress.epoch]
    step, end = span.step_at(progress.position), span.stop_step
    ahead = [skip for skip in skips if skip[1] > step and (end is None or skip[0] < end)]
    if not ahead or progress.position % stride == 0:
        return None
    first, stop = ahead[0]
    return (
        f"position {progress.position} lies inside a step of this world, whose steps have "
        f"batch_size * ranks = {stride} packs, so it does not read steps {first} to {stop - 1} "
        "whole, which are skipped; set a smaller batch_size, or take a state after a whole step"
    )


def warn_of_skips(
    run: RunPlan, skips: Sequence[tuple[int, int]], progress: Progress | None = None
) -> None:
    """Warn of ranges [first, stop) of steps that are not skipped: past, or beyond the run."""
    begun, end = 0, run.spans[-1].stop_step
    if progress is not None:
        span = run.spans[progress.epoch]
        begun = span.step_at(progress.position + span.recipe.global_batch_size - 1)
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
