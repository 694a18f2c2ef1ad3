"""The steps of a run, and its plan from a place in it on.

::

    step 34017 --> chapter 2, position 130048
    plans      --> the batches of a device, chapter after chapter or epoch after epoch

With `lane_views`, that device plans some of the lanes only, and others the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from operator import index
from typing import SupportsIndex, TypeAlias

from streampack.errors import ConfigError
from streampack.plan.device_plan import DevicePlan, DeviceView
from streampack.plan.lane_stream import is_used
from streampack.plan.sequence import PackSequence
from streampack.plan.slots import WalkState
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.engine import PlanEngine
from streampack.runtime.resumable import engine_of

OnStep: TypeAlias = Callable[[int], None]
"""Called with the step of the run that was reached."""

MOST = 512  # batches planned per call


def planned_engine(dataset: PackedStreamingDataset) -> PlanEngine:
    """Return the engine of a dataset, which must have a plan."""
    if not isinstance(dataset, PackedStreamingDataset):
        raise ConfigError(
            f"dataset is a {type(dataset).__name__}: only a PackedStreamingDataset has a plan to "
            "look back at; pass the dataset of the loader, or log loader.provenance(batch)"
        )
    return engine_of(dataset)


def whole_number(name: str, value: SupportsIndex) -> int:
    """Return a step or a sample as an int; it may come from an array or a tensor."""
    try:
        number = index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"{name}={value!r:.40} must be a whole number, at least 0", option=name)
    return number


def place_of(engine: PlanEngine, step: SupportsIndex) -> tuple[int, int]:
    """Return the epoch or chapter of a step of the run, and the position at which it begins.

    Without carry, epochs before it are counted, which takes about 1 us a sample.
    """
    step = whole_number("step", step)
    for span in engine.run.spans:
        if span.stop_step is None or step < span.stop_step:
            return span.number, (step - span.first_step) * span.recipe.global_batch_size
    if engine.run.spans:
        raise ConfigError(
            f"step={step}: the run has {engine.run.spans[-1].stop_step} steps; they count from 0"
        )
    recipe, number = engine.recipe, 0
    if recipe.mixing.epoch_end == "carry":
        number = step // engine.first_step(1)
    while engine.first_step(number + 1) <= step:
        if engine.first_step(number + 1) == engine.first_step(number):
            raise ConfigError(
                f"step={step}: epoch {number} has no global batch of {recipe.global_batch_size} "
                "packs, so that the run ends there; lower global_batch_size"
            )
        number += 1
    return number, (step - engine.first_step(number)) * recipe.global_batch_size


def last_step(engine: PlanEngine, upto: int | None) -> int:
    """Return the step to look up to: `upto`, or the last of a run of chapters that ends."""
    last = engine.run.spans[-1].stop_step if engine.run.spans else None
    if upto is None and last is None:
        raise ConfigError(
            f"upto={upto}: the run has no end; name the last step to look at, such as upto=100000 "
            "(at --build: --step 100000)",
            option="upto",
        )
    return (last or 0) - 1 if upto is None else upto


def last_step_begun(dataset: PackedStreamingDataset) -> int | None:
    """Return the last step that a dataset's state has begun, or None if the run has an end."""
    engine = planned_engine(dataset)
    if engine.run.spans and engine.run.spans[-1].stop_step is not None:
        return None
    state = engine.state_here()
    size = engine.run.recipes[engine.run.index(state["epoch"])].global_batch_size
    return max(engine.step_of(state["epoch"], state["position"] + size - 1) - 1, 0)


def plans(
    engine: PlanEngine,
    views: Sequence[DeviceView],
    start: Progress,
    walk: WalkState | None = None,
) -> Generator[tuple[PackSequence, DevicePlan, int], None, None]:
    """Yield the plans of a device from a place on, each with the slot at which it begins.

    No step is skipped. A consumer may stop the iteration at any plan.
    """
    run = engine.run
    while True:
        sequence = PackSequence(run, views, start, walk=walk)
        with closing(sequence):
            is_empty = not start.position
            while (plan := sequence.next(MOST)) is not None:
                stride = views[run.index(plan.epoch)].stride
                yield sequence, plan, sequence.position - plan.num_batches * stride
                is_empty = False
            if run.chapters or is_empty:
                return
            snapshots = sequence.snapshots() if engine.recipe.is_endless else []
        start, walk = Progress(epoch=start.epoch + 1, snapshots=snapshots), None


def whole_views(engine: PlanEngine) -> list[DeviceView]:
    """Return the views of a device that gets the batches of all, one after another."""
    return [view.alone for view in engine.views]


def num_parts(run: RunPlan, most: int) -> int:
    """Return the greatest number of parts up to `most` into which `lane_views` can divide lanes.

    1 where lanes may run dry, since their slots then go to other lanes.
    """
    recipes, lanes = run.recipes, range(run.recipes[0].num_lanes)
    if not all(recipe.is_endless for recipe in recipes) or run.ended_by is not None:
        return 1
    for recipe in recipes:
        for queue in range(recipe.num_queues):
            if len({is_used(recipe, lane, queue) for lane in lanes}) > 1:
                return 1

    def fits(parts: int) -> bool:
        sizes = [recipe.global_batch_size % (parts * recipe.lane_turn) for recipe in recipes]
        return len(lanes) % parts == 0 and not any(sizes)

    return next(parts for parts in range(min(most, len(lanes)), 0, -1) if parts == 1 or fits(parts))


def lane_views(engine: PlanEngine, part: int, parts: int) -> list[DeviceView]:
    """Return the views of a device that plans lanes part, part + parts, ...; see `num_parts`."""
    if parts == 1:
        return whole_views(engine)
    run, views = engine.run, []
    for number, recipe in enumerate(run.recipes):
        # Each chapter begins at another lane, and the device keeps its own.
        place = (part - run.lane_offset(number) // recipe.lane_turn) % parts
        views.append(DeviceView.of_lanes(recipe, place, parts))
    return views
