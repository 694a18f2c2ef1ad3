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
from streampack.plan.device_plan import DeviceView
from streampack.plan.recipe import Recipe
from streampack.plan.snapshots import renumbered, snapshots_in
from streampack.plan.spans import RunPlan
from streampack.plan.state import (
    Progress,
    different_fields,
    is_same_stream,
    other_value,
    plan_fingerprint,
    wrong_value,
)
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


def edits_record(chapters: RunChapters, skips: Skips) -> State:
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


class PlannedChapters(NamedTuple):
    """The chapters of a run, their plan, and the part of it that this rank gets of each."""

    chapters: RunChapters
    run: RunPlan
    views: list[DeviceView]


PlanRun: TypeAlias = Callable[..., PlannedChapters]
"""Plans chapters: see `ChapterEngine`."""


def planned_as_before(state: State, written: RunChapters, plan: PlanRun) -> PlannedChapters:
    """Return the chapters that a state belongs to, planned; those that stay keep their lane_turn.

    The ResumeError for a state of other chapters names the first difference.
    """
    recorded = _as_recorded(written, state)
    # Or else no chapter was amended, or what was is written into the chapters.
    candidates = [written] if recorded is None else [recorded, written]
    errors = []
    for chapters in candidates:
        try:
            turn_of = partial(_kept_turn, state, chapters)
            planned = plan(chapters, state["epoch"], num_lanes=state["num_lanes"], turn_of=turn_of)
            check_past(state, planned.run.recipes)
        except ConfigError as error:
            errors.append(ResumeError(f"the state does not fit this dataset: {error}"))
        except ResumeError as error:
            errors.append(error)
        else:
            return planned
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


def check_past(state: State, recipes: Sequence[Recipe]) -> None:
    """Check that the chapters before a state's position are those of this run.

    The ResumeError names the chapter and the field that differs.
    """
    records, current, position = state["chapters"], state["epoch"], state["position"]
    if current >= len(recipes):
        raise ResumeError(
            f"the state lies in chapters[{current}], but this run has {len(recipes)} chapters; "
            "keep those that the run began, and add others after them"
        )
    for number in range(current + 1):
        saved, own = records[number], chapter_record(recipes[number])
        for key, value in ({"passes": None} | own).items():
            # The running chapter may get another length, as long as no share depends on it.
            is_length = key == "steps" and number == current
            if is_length and own["ramp_steps"] is None and saved.get("ramp_steps") is None:
                _check_length(number, position, value, recipes[number].global_batch_size)
            elif saved.get(key) != value:
                field, before, now = _part_that_differs(key, saved.get(key), value)
                way_out = f"restore it, and edit chapters after chapters[{current}]"
                if number == current and saved.get("ramp_steps") is None:
                    way_out += ", or set its until and add a chapter"
                raise ResumeError(
                    f"chapters[{number}] ran with {field}={before!r:.300}, but this run has "
                    f"{now!r:.300}; what ran cannot change: {way_out}"
                )


def _part_that_differs(key: str, saved: Any, own: Any) -> tuple[str, Any, Any]:
    """Return the first part of a chapter's field that differs, and both its values."""
    if not isinstance(saved, dict) or not isinstance(own, dict):
        return key, saved, own
    parts = sorted({*saved, *own}, key=str)
    part = next((part for part in parts if saved.get(part) != own.get(part)), "")
    before, now = saved.get(part), own.get(part)
    if key != "weights":
        return f"{key}.{part}", before, now
    return f"{key}[{part!r}]", *(_share_text(value) for value in (before, now))


def _share_text(share: Any) -> Any:
    """Return a share as a chapter has it: the same at its begin and its end, or a ramp."""
    if share is None:
        return "no share"
    is_constant = isinstance(share, list) and len(share) == 2 and share[0] == share[1]
    return share[0] if is_constant else share


def _check_length(number: int, position: int, steps: int | None, size: int) -> None:
    if steps is not None and steps * size < position:
        raise ResumeError(
            f"chapters[{number}] has {steps} steps, but {-(-position // size)} of them have begun; "
            f"give it at least {-(-position // size)}, or set until to as many tokens"
        )


def decode_chapters(state: State, run: RunPlan, digests: Sequence[str]) -> Progress:
    """Return the position of a state, once it is known to have the streams and options of a run.

    The streams of chapters that ran are compared by name.
    """
    saved, recipe = state["fingerprint"], run.recipes[0]
    ran = saved.get("streams")
    if not isinstance(ran, dict):
        raise wrong_value("streams", ran, "a dict")
    _check_streams(ran, state["streams"], dict(zip(recipe.names, digests, strict=True)))
    own = plan_fingerprint(run, digests, ran)
    for key, before, now in different_fields(saved, own):
        if key != "streams":
            raise ResumeError(
                f"{other_value(key, before, now)}; it holds for all chapters: set what the run "
                "began with"
            )
    snapshots, names = snapshots_in(state), state["streams"]
    if names != recipe.names:
        snapshots = renumbered(snapshots, names, recipe.names, is_mixed=recipe.is_mixed)
    return Progress(epoch=state["epoch"], position=state["position"], snapshots=snapshots)


def _check_streams(ran: Mapping[str, Any], saved: Sequence[str], own: Mapping[str, str]) -> None:
    """Check the streams that had a share in a chapter that ran: they have the same contents.

    They are in the same order as then, and others may be between. `ran` and `own` are digests by
    name; `saved` are the names of all streams of the state, in its order.
    """
    for name, digest in ran.items():
        if name not in own:
            raise ResumeError(
                f"stream {name!r} had a share in a chapter that ran, and this dataset has "
                f"{', '.join(map(repr, own))}; pass it too, with no share it only rests"
            )
        if not is_same_stream(str(digest), own[name]):
            raise ResumeError(
                f"since the state was saved stream {name!r} holds other data, lengths or columns; "
                "resume with what the run began with. If shards were appended, pass "
                f"Stream(name={name!r}, shards=slice(0, n)) and "
                f"Stream(name={name + '2'!r}, shards=slice(n, None)) with the former number n of "
                "shards"
            )
    order = [name for name in saved if name in ran]
    if order != [name for name in own if name in order]:
        raise ResumeError(
            "the state was saved with streams in another order: "
            f"{', '.join(map(repr, order))}; pass them in that order, as it decides between "
            "streams that are due at the same time; new streams may stand anywhere"
        )


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
        if first < begun or (end is not None and stop > end):
            last = "its end" if end is None else end - 1
            logger.warning(
                "skip has steps %d to %d, and the run still has steps %d to %s, counted from 0: "
                "the others are not skipped; to skip earlier ones, resume from an earlier state",
                *(first, stop - 1, begun, last),
            )
