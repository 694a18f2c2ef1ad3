"""The steps of a run, and their places: step 34017 --> chapter 2, position 130048."""

from __future__ import annotations

from collections.abc import Callable
from typing import SupportsIndex, TypeAlias

from streampack._checks import read_integer
from streampack.errors import ConfigError
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.engine import PlanEngine
from streampack.runtime.resumable import engine_of

OnStep: TypeAlias = Callable[[int], None]
"""Called with the step of the run that was reached."""
COUNTED_FROM = "they count from 0"


def planned_engine(dataset: PackedStreamingDataset) -> PlanEngine:
    """Return the engine of a dataset, which must have a plan."""
    if not isinstance(dataset, PackedStreamingDataset):
        raise ConfigError(
            f"dataset is a {type(dataset).__name__}: only a PackedStreamingDataset has a plan to "
            "look back at; pass the dataset of the loader, or log loader.provenance(batch)"
        )
    return engine_of(dataset)


def place_of(engine: PlanEngine, step: SupportsIndex) -> tuple[int, int]:
    """Return the epoch or chapter of a step of the run, and the position at which it begins.

    Without carry, epochs before it are counted, which takes about 1 us a sample.
    """
    step = read_integer("step", step, COUNTED_FROM, least=0)
    run, number = engine.run, 0
    if run.num_steps is not None and step >= run.num_steps:
        raise ConfigError(f"step={step}: the run has {run.num_steps} steps; they count from 0")
    if not run.chapters and engine.recipe.is_endless:
        number = step // run.first_step(1)
    while (stop := run.stop_step(number)) is not None and stop <= step:
        if stop == run.first_step(number):
            raise ConfigError(
                f"step={step}: epoch {number} has no global batch of "
                f"{engine.recipe.global_batch_size} packs, so that the run ends there; lower "
                "global_batch_size"
            )
        number += 1
    return number, (step - run.first_step(number)) * run.recipe(number).global_batch_size


def last_step(engine: PlanEngine, upto: int | None) -> int:
    """Return the step to look up to: `upto`, or the last of a run of chapters that ends."""
    last = engine.run.num_steps
    if upto is None and last is None:
        raise ConfigError(
            f"upto={upto}: the run has no end; name the last step to look at, such as upto=100000",
            option="upto",
        )
    return (last or 0) - 1 if upto is None else upto


def last_step_begun(dataset: PackedStreamingDataset) -> int | None:
    """Return the last step that a dataset's state has begun, or None if the run has an end."""
    engine = planned_engine(dataset)
    if engine.run.num_steps is not None:
        return None
    state = engine.state_here()
    size = engine.run.recipe(state["epoch"]).global_batch_size
    return max(engine.run.step_of(state["epoch"], state["position"] + size - 1) - 1, 0)
