"""`at`: the packs of a step of a run, and the rows and ranks that they were in.

Cost: planning from the start of the run, about 0.4 us a sample; for an epoch without carry, from
the start of the epoch; or from a state that was loaded, if it is not after the step.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from streampack.errors import ConfigError
from streampack.lookback.rows import StepRows, rows_of, worlds_between
from streampack.lookback.steps import OnStep, place_of, planned_engine
from streampack.plan.reader import Place, PlanReader, SlotPack
from streampack.plan.state import Progress
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.engine import PlanEngine
from streampack.planned.replanning import check_replanning, lanes_to_replan


def at(
    dataset: PackedStreamingDataset,
    step: int,
    *,
    rank: int | None = None,
    report: OnStep | None = None,
) -> StepRows:
    """Return the rows of a step of a run, and which ranks got them.

    Args:
        dataset: The dataset of the run, which is not changed. Load a state of the run first: it
            records the worlds that the run trained in, its amendments and its skipped steps.
            Without a state, the whole run is taken to have this world. Planning begins at the
            state, unless the step comes before it; a state from `loader.gather_state()` allows this
            for every lane. While the run trains and its ranks have left the snapshots of all lanes,
            planning begins at the step.
        step: The global batch, counted from 0 over all epochs or chapters.
        rank: Return only the rows of this rank. None: those of all ranks.
        report: Called from time to time with the step that planning has reached.

    Raises:
        ConfigError: If the run has no such step or rank, or the step was balanced by a cost that
            the dataset does not have.
        ResumeError: If texts would be tokenized again; load a state with `replan=True` to do it.
    """
    engine = planned_engine(dataset)
    number, position = place_of(engine, step)
    packs = global_batches(engine, [(number, position)], report)[number, position]
    recipe = engine.run.recipe(number)
    rows = rows_of(engine, number, packs, position)
    if rank is not None:
        stop = position + recipe.global_batch_size
        worlds = worlds_between(engine, number, position, stop)
        last = max(world.num_ranks for world, *_ in worlds) - 1
        if not 0 <= rank <= last:
            raise ConfigError(
                f"rank={rank}: the ranks of step {step} were 0 to {last}", option="rank"
            )
        rows = [row for row in rows if rank in row.ranks]
    return StepRows(
        step=step,
        epoch=number,
        position=position,
        is_skipped=any(first <= step < stop for first, stop in engine.state.skips),
        rows=rows,
    )


def global_batches(
    engine: PlanEngine, places: Collection[Place], report: OnStep | None = None
) -> dict[Place, list[SlotPack]]:
    """Return the packs of the global batches at places; the run is planned once for all of them."""
    found: dict[Place, list[SlotPack]] = {place: [] for place in places}
    recipes, start = engine.run.recipes, _start_before(engine, min(places))
    if not recipes[0].is_endless and start.epoch < min(places)[0]:
        start = Progress(epoch=min(places)[0])
    number, position = max(places)
    stop = number, position + engine.run.recipe(number).global_batch_size
    with PlanReader(engine.run.whole(), start, stop=stop) as reader:
        for part in reader:
            epoch, size = part.plan.epoch, part.recipe.global_batch_size
            if report is not None:
                report(engine.run.step_of(epoch, part.begin))
            begins = part.slots // size * size
            wanted = [begin for number, begin in found if number == epoch]
            for pack in np.flatnonzero(np.isin(begins, wanted)).tolist():
                found[epoch, int(begins[pack])].append(part.pack(pack))
    return found


def _start_before(engine: PlanEngine, place: Place) -> Progress:
    """Return the state that was loaded, if it is of no later place, or else the run's start.

    Instead of the start, it is the place itself, if snapshots of all lanes are known there. A
    ResumeError if texts would be tokenized again.
    """
    run, state = engine.run.whole(), engine.state
    there = Progress(epoch=place[0], position=place[1])
    there = engine.left.completed(state, there)
    if not state.replans:
        check_replanning(run, engine.spec.streams, there)
    start = state.start if (state.start.epoch, state.start.position) <= place else Progress()
    is_better = bool(there.snapshots) and not start.snapshots and not lanes_to_replan(run, there)
    return there if is_better else start
