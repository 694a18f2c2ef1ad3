"""Build the plan of a run from a dataset's arguments. The only module that wires rooms together.

::

    streams --open--> counts, bytes, totals --weights--> quotas --+
    packing, mixing, order ---------------------------------------+--> Recipe
    world, batch_size --> num_lanes, lane_turn, global_batch_size -+    (or the state's, on resume)

    Chapter --> packing, batch sizes, shares of the chapter ------+--> a Recipe for each: RunPlan
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast, get_args

from streampack.batch.formats.registry import BatchFormat, Formatter, check_format, options_of
from streampack.chapters import Chapter
from streampack.config import Packing
from streampack.config.combinations import check_combination
from streampack.config.packing import Method
from streampack.errors import ConfigError
from streampack.mix.weights import Weight, resolve_weights
from streampack.plan.chapter_edits import RunChapters
from streampack.plan.chapter_recipes import chapter_recipes
from streampack.plan.recipe import MAX_LANES, MAX_PACKS, PlanStream, Recipe
from streampack.plan.repeats import check_repeats
from streampack.plan.spans import RunPlan, run_of
from streampack.plan.state import RunShape
from streampack.planned.refusals import (
    check_equal_cost,
    check_lengths,
    check_pack_lengths,
    slots_per_pack,
)
from streampack.planned.spec import DatasetSpec
from streampack.planned.stream_lengths import StreamLengths
from streampack.streams.registry import unique_names
from streampack.world import World

MIN_PACKS_PER_LANE = 4096  # smaller lanes waste fill at their ends
METHODS: tuple[Method | None, ...] = get_args(Method)
MANY_PASSES = 4  # of an epoch over one stream

logger = logging.getLogger(__name__)


@cache
def _warn_of_passes(name: str, num_samples: int, passes: float) -> None:
    logger.warning(
        "stream %r: an epoch takes each of its %d samples %s times, and more than %d are more "
        "likely remembered than learned; lower its share or epoch_size, or set repeat= in place "
        "of proportion= or choose= if this is meant",
        name,
        num_samples,
        passes,
        MANY_PASSES,
    )


def _default_lanes(chosen_tokens: int, packing: Packing, world: World) -> int:
    """Return the lanes of a new run: one for each node, if that leaves enough packs in each."""
    nodes = world.num_nodes
    packs = chosen_tokens // packing.max_seq_len
    return nodes if packs >= nodes * MIN_PACKS_PER_LANE else 1


def _check_shape(shape: tuple[int, int, int], method: str) -> None:
    """Refuse lanes, turns and global batches that are incompatible."""
    num_lanes, turn, global_batch_size = shape
    sizes = {"global_batch_size": global_batch_size, "num_lanes": num_lanes, "batch_size": turn}
    for name, size in sizes.items():
        most = MAX_LANES if name == "num_lanes" else MAX_PACKS
        if size > most:
            raise ConfigError(f"{name}={size} is more than {most}, the most; lower it")
    given = {"batching_method": method, "global_batch_size": global_batch_size}
    given["the run's first batch_size"] = turn
    if num_lanes > 1:
        given["num_lanes * batch_size"] = num_lanes * turn
    check_combination(given)


def _check_batches(batch_size: int, global_batch_size: int) -> None:
    divisor = max(n for n in range(1, batch_size + 1) if global_batch_size % n == 0)
    given = {"batch_size": batch_size, "global_batch_size": global_batch_size, "divisor": divisor}
    check_combination(given)


def _plan_streams(spec: DatasetSpec) -> tuple[PlanStream, ...]:
    packing, mixing, order = spec.packing, spec.mixing, spec.order
    totals = [stream.total_tokens() for stream in spec.streams]
    names = unique_names([stream.name for stream in spec.streams])
    quotas = resolve_weights(
        [
            Weight(name=n, proportion=s.proportion, repeat=s.repeat, choose=s.choose)
            for n, s in zip(names, spec.streams, strict=True)
        ],
        [(s.num_samples, t) for s, t in zip(spec.streams, totals, strict=True)],
        epoch_size=cast("int | None", mixing.epoch_size),  # an int after Mixing's checks
        unit=mixing.weight_unit,
        arithmetic=mixing.arithmetic,
        seed=order.seed,
    )
    for stream, quota, total in zip(spec.streams, quotas, totals, strict=True):
        held = stream.num_samples if quota.unit == "samples" else total
        if stream.repeat is None and quota.amount > MANY_PASSES * held:
            _warn_of_passes(stream.name, stream.num_samples, round(quota.amount / max(held, 1), 1))
    deals_over_nodes = spec.world.num_nodes > 1 and getattr(spec.balance, "within", "") == "batch"
    for stream in spec.streams:
        check_lengths(stream, {"Balance(within='batch')": deals_over_nodes}, may_fetch=True)
    fetched, is_checked = spec.fetched_for_lengths, mixing.max_repeats is not None
    lengths = [StreamLengths(stream, packing, fetched) for stream in spec.streams]
    return tuple(
        PlanStream(
            name=name,
            first_sample=stream.first_sample,
            raw_bytes=stream.raw_bytes,
            num_tokens=total,
            num_slots=lengths_of.num_slots(total),
            lengths_of=lengths_of,
            overflow=stream.ends.overflow,
            whole_lengths_of=None if stream.ends.overflow is None else lengths_of.whole,
            quota=quota,
            may_be_empty=stream.shards.may_be_empty or stream.ends.overflow == "drop",
            block_samples=stream.block_samples,
            prepare=lengths_of.prepare,
            shard_tokens=lengths_of.shard_tokens()
            if is_checked or quota.unit == "tokens"
            else None,
            slots_per_pack=slots_per_pack(stream, packing),
        )
        for name, stream, total, lengths_of, quota in zip(
            names, spec.streams, totals, lengths, quotas, strict=True
        )
    )


def build_recipe(spec: DatasetSpec, shape: RunShape | None = None) -> Recipe:
    """Return the recipe of a dataset's sequence; `shape` is of a run that resumes, if it does."""
    packing, mixing, order = spec.packing, spec.mixing, spec.order
    if packing.method is None and shape is not None:
        packing = replace(packing, method=shape.method)
    check_combination({"dataset": "PackedStreamingDataset", "stop": mixing.stop})
    check_combination({"chapters": None, "max_repeats": mixing.max_repeats})
    check_equal_cost(packing, spec.streams)
    streams = _plan_streams(spec)
    if shape is None:
        chosen = sum(stream.chosen_tokens for stream in streams)
        lanes = order.num_lanes or _default_lanes(chosen, packing, spec.world)
        default_batch = spec.batch_size * spec.world.num_devices
        shape = RunShape(lanes, spec.batch_size, mixing.global_batch_size or default_batch)
        # A run can resume with any batch size that divides its position.
        _check_batches(spec.batch_size, shape.global_batch_size)
    num_lanes, lane_turn, global_batch_size, _ = shape
    _check_shape(shape[:3], mixing.batching_method)
    for stream in spec.streams:
        check_lengths(stream, {"epoch_end": mixing.epoch_end, "num_lanes": num_lanes})
    recipe = Recipe(
        streams=streams,
        packing=packing,
        mixing=mixing,
        order=order,
        num_lanes=num_lanes,
        lane_turn=lane_turn,
        global_batch_size=global_batch_size,
    )
    check_pack_lengths(recipe, spec.batch_size)
    steps = {"global_batch_size": global_batch_size, "batch_size * devices": spec.view().stride}
    check_combination({"balance": spec.balance, **steps})
    if mixing.epoch_end == "carry" and not recipe.packs_per_carry_epoch:
        raise ConfigError(
            f"epoch_end='carry' gives epochs of whole global batches, but an epoch's "
            f"{recipe.chosen_tokens} tokens are less than one of {global_batch_size} packs of "
            f"{packing.max_seq_len}; lower global_batch_size, raise epoch_size, or set "
            "epoch_end='pad'"
        )
    return recipe


def kept_shape(recipe: Recipe) -> tuple[int, int, int, int]:
    """Return what a run keeps, as integers for its workers."""
    method = METHODS.index(recipe.packing.method)
    sizes = recipe.num_lanes, recipe.lane_turn, recipe.global_batch_size
    return *sizes, method


def loss_weights_of(streams: Sequence[Any], convert: Formatter) -> tuple[float, ...] | None:
    """Return the factor of each stream's losses, or None if all are 1."""
    own = [getattr(stream, "loss_weight", None) for stream in streams]
    weights = tuple(1.0 if weight is None else float(weight) for weight in own)
    stated = next((weight for weight in weights if weight != 1), None)
    check_combination({"Stream(loss_weight)": stated, **options_of(convert)})
    return None if stated is None else weights


def check_run(spec: DatasetSpec, streams: Sequence[Any], batch_format: BatchFormat) -> None:
    """Refuse options that need epochs, which a run of chapters does not have."""
    given = {name: getattr(spec.mixing, name) for name in ("epoch_size", "epoch_end")}
    given["sampling_method"] = spec.mixing.sampling_method
    check_combination({"chapters": spec.chapters, **given})
    names, last = unique_names([stream.name for stream in spec.streams]), spec.chapters[-1]
    for name, stream, opened in zip(names, streams, spec.streams, strict=True):
        options = ("proportion", "repeat", "choose", "max_seq_len")
        of_stream = {f"Stream({option})": getattr(stream, option, None) for option in options}
        check_combination({"chapters": [stream], **of_stream}, f"stream {opened.name!r}: ")
        lengths = {
            "max_repeats": spec.mixing.max_repeats_of(name),
            "Chapter(passes)": last.passes if last.weights.get(name) else None,
        }
        check_lengths(opened, lengths)
    for chapter in spec.chapters:
        own = chapter_spec(spec, chapter)
        sizes = {"global_batch_size": own.mixing.global_batch_size}
        check_combination({"chapters": spec.chapters, **sizes, "cost": own.packing.cost})
        check_format(batch_format, own.packing, own.batch_size)


def chapter_spec(spec: DatasetSpec, chapter: Chapter) -> DatasetSpec:
    """Return the specification of a dataset with a chapter's packing and sizes."""
    overflow = next((stream.ends.overflow for stream in spec.streams if stream.ends.overflow), None)
    check_combination({"Stream(overflow)": overflow, "Chapter(packing)": chapter.packing})
    size = chapter.global_batch_size or spec.mixing.global_batch_size
    return replace(
        spec,
        packing=chapter.packing or spec.packing,
        batch_size=chapter.batch_size or spec.batch_size,
        mixing=replace(spec.mixing, global_batch_size=size),
    )


def build_chapters(
    spec: DatasetSpec,
    chapters: RunChapters,
    *,
    num_lanes: int | None = None,
    turn_of: Callable[[int, Recipe], int | None] = lambda *_: None,
) -> RunPlan:
    """Return the plan of a run.

    `num_lanes` is known of a run that resumes. `turn_of` returns consecutive packs from one lane in
    a chapter, by its number and recipe, if they are known; else it is the batch size.
    """
    streams = _plan_streams(spec)
    specs = [chapter_spec(spec, each.chapter) for each in chapters]
    lanes = num_lanes or spec.order.num_lanes
    if lanes is None:
        tokens = sum(stream.num_tokens for stream in streams)
        lanes = _default_lanes(tokens, spec.packing, spec.world)
    recipes = chapter_recipes(
        streams,
        [each.chapter for each in chapters],
        packing=spec.packing,
        mixing=spec.mixing,
        order=spec.order,
        num_lanes=lanes,
        lane_turns=[own.batch_size for own in specs],
    )
    for number, (own, recipe) in enumerate(zip(specs, recipes, strict=True)):
        turn = turn_of(number, recipe)
        if turn not in (None, recipe.lane_turn):
            recipes[number] = replace(recipe, lane_turn=turn)
        _check_sizes(number, own, recipes[number])
    check_repeats(recipes)
    return run_of(recipes).seen([own.view() for own in specs])


def _check_sizes(number: int, spec: DatasetSpec, recipe: Recipe) -> None:
    """Refuse a chapter if its global batches are not whole steps of all ranks."""
    size, stride = recipe.global_batch_size, spec.batch_size * spec.world.num_devices
    try:
        _check_batches(spec.batch_size, size)
        _check_shape((recipe.num_lanes, recipe.lane_turn, size), recipe.mixing.batching_method)
    except ConfigError as error:
        raise ConfigError(f"chapters[{number}]: {error}") from None
    given = {"chapters": [spec], "global_batch_size": size, "batch_size * ranks": stride}
    check_combination(given, f"chapters[{number}]: ")
