"""`at`: which packs, and which rows of which ranks, lay in a step of a run.

Cost: planning from the start of the run, about 0.4 us a sample; of an epoch without carry, from its
own start. With a plan index, planning 1,000 steps at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import numpy as np

from streampack.errors import ConfigError
from streampack.lookback.index import PlanIndex
from streampack.lookback.rows import SlotPack, StepRows, rows_of, worlds_between
from streampack.lookback.steps import OnStep, place_of, planned_engine, plans, whole_views
from streampack.plan.state import Progress
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.engine import PlanEngine


def at(
    dataset: PackedStreamingDataset,
    step: int,
    *,
    rank: int | None = None,
    index: PlanIndex | None = None,
    report: OnStep | None = None,
) -> StepRows:
    """Return what lay in a step of a run.

    Args:
        dataset: The dataset of the run. It stays as it is. Load a state of the run to know the
            worlds that it was trained in, its amendments and its skipped steps; without one, the
            run is that of this world from its start.
        step: The global batch, counted from 0 over all epochs or chapters.
        rank: The rank to return the rows of, or None for all ranks.
        index: A plan index of the run, or None if it is planned from its start.
        report: Called with the step that planning has reached, from time to time.

    Raises:
        ConfigError: If the run has no such step or rank, or the step was dealt with a cost that
            the dataset does not have.
    """
    engine = planned_engine(dataset)
    number, position = place_of(engine, step)
    packs = global_batches(engine, [(number, position)], index, report)[number, position]
    recipe = engine.run.recipes[engine.run.index(number)]
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
        is_skipped=any(first <= step < stop for first, stop in engine.skips),
        rows=rows,
    )


def global_batches(
    engine: PlanEngine,
    places: Sequence[tuple[int, int]],
    index: PlanIndex | None,
    report: OnStep | None = None,
) -> dict[tuple[int, int], list[SlotPack]]:
    """Return the packs of the global batches at places, which ascend: epoch and position.

    Without an index, the run is planned once for all of them.
    """
    found: dict[tuple[int, int], list[SlotPack]] = {place: [] for place in places}
    for together in [places] if index is None else [[place] for place in places]:
        start, walk = Progress(), None
        if index is not None:
            start, walk = index.nearest(engine, *together[0])
        number = together[0][0]
        if not engine.recipe.is_endless and (start.epoch, start.position) < (number, 0):
            start = Progress(epoch=number)
        left = list(together)
        with closing(plans(engine, whole_views(engine), start, walk)) as all_plans:
            for sequence, plan, slot in all_plans:
                if report is not None:
                    report(engine.step_of(plan.epoch, slot))
                size = engine.run.recipes[engine.run.index(plan.epoch)].global_batch_size
                slots = slot + np.arange(len(plan.packs)) * plan.slots_per_pack
                left = [place for place in left if place[0] >= plan.epoch]
                for number, position in left:
                    if (number, position) >= (plan.epoch, sequence.position):
                        break
                    inside = (position <= slots) & (slots < position + size)
                    found[number, position] += [
                        SlotPack(
                            slot=int(slots[pack]),
                            num_slots=plan.slots_per_pack,
                            segments=plan.packs[pack],
                        )
                        for pack in np.flatnonzero(inside).tolist()
                    ]
                left = [each for each in left if each > (plan.epoch, sequence.position - size)]
                if not left:
                    break
    return found
