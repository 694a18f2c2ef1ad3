"""Build the plan of a run of chapters from a dataset's arguments, and refuse what it cannot do.

::

    spec, Chapter --> DatasetSpec of the chapter --> batch sizes, lanes, world --> RunPlan

Cost: as `planned/build.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from streampack.batch.formats.registry import BatchFormat, check_format
from streampack.chapters import Chapter
from streampack.config.combinations import check_combination
from streampack.errors import ConfigError
from streampack.plan.chapter_recipes import chapter_recipes, chapter_slots
from streampack.plan.recipe import Recipe
from streampack.plan.run_drain import drained
from streampack.plan.run_limits import check_limits
from streampack.plan.run_plan import RunPlan
from streampack.planned.build import (
    DatasetSpec,
    check_batches,
    check_shape,
    default_lanes,
    plan_streams,
)
from streampack.streams import MdsStream


def check_run(spec: DatasetSpec, streams: Sequence[Any], batch_format: BatchFormat) -> None:
    """Refuse options that need epochs, which a run of chapters does not have."""
    given = {name: getattr(spec.mixing, name) for name in ("epoch_size", "epoch_end")}
    given["sampling_method"] = spec.mixing.sampling_method
    check_combination({"chapters": spec.chapters, **given})
    for stream, opened in zip(streams, spec.streams, strict=True):
        _check_stream(stream, opened)
    for chapter in spec.chapters:
        own = chapter_spec(spec, chapter)
        sizes = {"global_batch_size": own.mixing.global_batch_size}
        check_combination({"chapters": spec.chapters, **sizes, "max_cost": own.packing.max_cost})
        check_format(batch_format, own.packing, own.batch_size)


def _check_stream(stream: Any, opened: MdsStream) -> None:
    """Refuse options of a stream that a run of chapters does not have."""
    names = ("proportion", "repeat", "choose", "max_seq_len")
    given = {f"Stream({name})": getattr(stream, name, None) for name in names}
    ends = None if opened.max_passes is None else opened.on_exhausted
    given |= {"Stream(on_exhausted)": ends, "a length file": opened.has_length_file}
    check_combination({"chapters": [stream], **given}, f"stream {opened.name!r}: ")


def chapter_spec(spec: DatasetSpec, chapter: Chapter) -> DatasetSpec:
    """Return the specification of a dataset with a chapter's packing and sizes."""
    size = chapter.global_batch_size or spec.mixing.global_batch_size
    return replace(
        spec,
        packing=chapter.packing or spec.packing,
        batch_size=chapter.batch_size or spec.batch_size,
        mixing=replace(spec.mixing, global_batch_size=size),
    )


def chapter_steps(spec: DatasetSpec, chapter: Chapter) -> int | None:
    """Return the length of a chapter in global batches, as it is written; None: it has no end."""
    own = chapter_spec(spec, chapter)
    size = own.mixing.global_batch_size or 1
    slots = chapter_slots(chapter, own.packing.max_seq_len, size)
    return None if slots is None else slots // size


def run_recipes(
    spec: DatasetSpec,
    chapters: Sequence[Chapter],
    *,
    num_lanes: int | None = None,
    lane_runs: Sequence[int | None] = (),
) -> tuple[list[DatasetSpec], list[Recipe]]:
    """Return the specification and the recipe of each chapter; see `build_run`."""
    streams = plan_streams(spec)
    known = [*lane_runs, *[None] * (len(chapters) - len(lane_runs))]
    specs = [chapter_spec(spec, chapter) for chapter in chapters]
    runs = [run or own.batch_size for run, own in zip(known, specs, strict=True)]
    lanes = num_lanes or spec.order.num_lanes
    if lanes is None:
        tokens = sum(stream.num_tokens for stream in streams)
        lanes = default_lanes(tokens, spec.packing, spec.world)
    recipes = chapter_recipes(
        streams,
        chapters,
        packing=spec.packing,
        mixing=spec.mixing,
        order=spec.order,
        num_lanes=lanes,
        lane_runs=runs,
    )
    return specs, recipes


def build_run(
    spec: DatasetSpec,
    chapters: Sequence[Chapter],
    *,
    num_lanes: int | None = None,
    lane_runs: Sequence[int | None] = (),
) -> RunPlan:
    """Return the plan of a run.

    `num_lanes` is known of a run that resumes. `lane_runs` are consecutive packs from one lane in
    each chapter, as far as they are known; else it is the batch size of the chapter.
    """
    specs, recipes = run_recipes(spec, chapters, num_lanes=num_lanes, lane_runs=lane_runs)
    for number, (own, recipe) in enumerate(zip(specs, recipes, strict=True)):
        _check_sizes(number, own, recipe)
    end = check_limits(recipes)
    if end is None:
        return RunPlan(recipes)
    # The estimate is early rather than late: a later chapter may be the one that ends.
    for number in range(end[0], len(recipes)):
        run = drained(recipes[: number + 1], end[2])
        if run.ended_by is not None:
            break
    return run


def _check_sizes(number: int, spec: DatasetSpec, recipe: Recipe) -> None:
    """Refuse a chapter whose global batches are not whole steps of all ranks."""
    size, window = recipe.global_batch_size, spec.batch_size * spec.world.num_devices
    try:
        check_batches(spec.batch_size, size)
        check_shape((recipe.num_lanes, recipe.lane_run, size), recipe.mixing.batching_method)
    except ConfigError as error:
        raise ConfigError(f"chapters[{number}]: {error}") from None
    given = {"chapters": [spec], "global_batch_size": size, "batch_size * ranks": window}
    check_combination(given, f"chapters[{number}]: ")
