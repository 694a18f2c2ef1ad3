"""The recipes of a run's chapters, from what users write.

::

    Chapter(weights={"web": 3, "code": 1}, until="1b")   -->   shares 3/4, 1/4; whole global batches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from streampack.chapters import SHAPES, Chapter
from streampack.config import Mixing, Order, Packing
from streampack.errors import ConfigError, suggest
from streampack.mix.weights import Quota
from streampack.plan.chapter_plan import ChapterPlan
from streampack.plan.recipe import PlanStream, Recipe
from streampack.plan.small_passes import uses_means

SHARE_SCALE = 1 << 40


def chapter_recipes(
    streams: Sequence[PlanStream],
    chapters: Sequence[Chapter],
    *,
    packing: Packing,
    mixing: Mixing,
    order: Order,
    num_lanes: int,
    lane_turns: Sequence[int],
) -> list[Recipe]:
    """Return the recipe of each chapter of a run.

    Raises a ConfigError if one names an unknown stream. `streams` are all of the run; their quotas
    are replaced. Chapters without their own have this `packing`, and the global batch size of
    `mixing`. `lane_turns` has a value for each chapter.
    """
    names = [stream.name for stream in streams]
    passes = _passes(chapters)
    recipes = []
    for number, chapter in enumerate(chapters):
        _check_names(number, chapter, names)
        own_packing = chapter.packing or packing
        size = chapter.global_batch_size or mixing.global_batch_size or 1
        begin, end = (
            tuple(chapter.shares(at_end=at_end).get(name, Fraction(0)) for name in names)
            for at_end in (False, True)
        )
        steps = chapter_steps(chapter, own_packing, size)
        plan = ChapterPlan(
            number=number,
            begin=begin,
            end=end,
            num_slots=None if steps is None else steps * size,
            passes=chapter.passes,
            ramp_slots=(_ramp_steps(chapter, own_packing, size) or 0) * size,
        )
        # Only the ratios of quotas matter; 0 only without a share.
        shares = [first + last for first, last in zip(begin, end, strict=True)]
        amounts = [max(int(share * SHARE_SCALE), 1) if share else 0 for share in shares]
        quotas = [Quota(amount=amount, unit="tokens") for amount in amounts]
        recipes.append(
            Recipe(
                streams=tuple(
                    replace(stream, quota=quota, passes=passes.get(stream.name))
                    for stream, quota in zip(streams, quotas, strict=True)
                ),
                packing=own_packing,
                mixing=replace(mixing, global_batch_size=size),
                order=order,
                num_lanes=num_lanes,
                lane_turn=lane_turns[number],
                global_batch_size=size,
                chapter=plan,
            )
        )
    return recipes


def _check_names(number: int, chapter: Chapter, names: Sequence[str]) -> None:
    unknown = [name for name in chapter.weights if name not in names]
    if unknown:
        raise ConfigError(
            f"chapters[{number}] gives a weight to {unknown[0]!r}, and the streams are "
            f"{', '.join(map(repr, names))}{suggest(unknown[0], names)}; write one of these, "
            "or add the stream"
        )


def _passes(chapters: Sequence[Chapter]) -> dict[str, int]:
    """Return the whole passes that the last chapter takes, by stream: of one, or of none."""
    *before, last = chapters
    if last.passes is None:
        return {}
    [name] = [name for name, share in last.shares().items() if share]
    for number, chapter in enumerate(before):
        if any(chapter.shares(at_end=at_end).get(name) for at_end in (False, True)):
            raise ConfigError(
                f"chapters[{number}] gives a weight to {name!r}, and chapters[{len(before)}] takes "
                "whole passes of it, from its first sample on; pass its data as a second Stream of "
                "another name, for one of these chapters, or set steps in place of passes"
            )
    return {name: last.passes}


def chapter_steps(chapter: Chapter, packing: Packing, size: int) -> int | None:
    """Return the global batches of `size` packs of a chapter, or None if it has no end."""
    return chapter.stop_after or _ramp_steps(chapter, packing, size)


def _ramp_steps(chapter: Chapter, packing: Packing, size: int) -> int | None:
    """Return the global batches of a chapter that is not left before its end."""
    if chapter.until is None:
        return chapter.steps
    step_tokens = size * packing.row_tokens
    return max((2 * int(chapter.until) + step_tokens) // (2 * step_tokens), 1)


def chapter_record(recipe: Recipe) -> dict[str, Any]:
    """Return what determines a chapter's packs, as JSON: no batch size, ranks or workers."""
    plan = recipe.chapter
    if plan is None:
        return {}
    packing = recipe.packing.in_sequence()
    passes = {} if plan.passes is None else {"passes": plan.passes}
    used = sorted(recipe.used, key=recipe.names.__getitem__)
    tokens = {recipe.names[n]: recipe.streams[n].num_tokens for n in used}
    counted = {"tokens": tokens} if uses_means(recipe) else {}
    record = {
        "weights": {recipe.names[n]: [str(plan.begin[n]), str(plan.end[n])] for n in used},
        "steps": None if plan.num_slots is None else plan.num_slots // recipe.global_batch_size,
        "ramp_steps": plan.ramp_slots // recipe.global_batch_size if plan.ramps else None,
        "global_batch_size": recipe.global_batch_size,
        "lane_run": recipe.lane_turn,
        "packing": {name: packing[name] for name in SHAPES if name in packing},
    }
    return passes | record | counted
