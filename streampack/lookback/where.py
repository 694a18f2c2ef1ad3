"""`where`: in which steps of a run a sample was, and in which rows of which ranks.

Cost: planning the sample's lane from the start of the run, about 0.4 us a sample; all lanes of a
small stream, and where lanes may run dry. With a `Balance`, planning all lanes once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from streampack._checks import read_integer
from streampack.errors import ConfigError, suggest
from streampack.lookback.at import global_batches
from streampack.lookback.rows import Row, planned_rows, rows_of, worlds_between
from streampack.lookback.steps import COUNTED_FROM, OnStep, last_step, place_of, planned_engine
from streampack.plan.reader import Place, PlanReader, SlotPack, lanes_of, num_parts
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.engine import PlanEngine
from streampack.planned.refusals import check_tokenized
from streampack.types import SAMPLE, STREAM, BoolArray, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """A row that contained a part of the sample."""

    step: int
    """The step of the run."""
    is_skipped: bool
    """Whether the run skipped the step, so that no rank got the row."""
    row: Row
    """The row, with only the sample's segments."""


def where(
    dataset: PackedStreamingDataset,
    stream: str,
    sample: int,
    *,
    upto: int | None = None,
    report: OnStep | None = None,
) -> list[Found]:
    """Return the rows that contained a sample, in order of steps.

    Args:
        dataset: The dataset of the run, as for `at`.
        stream: Name of the stream, as in `dataset.stream_names`.
        sample: Its number in the stream, as in `segments`.
        upto: The last step to look at. By default that of the run, for chapters that end.
        report: Called from time to time with the step that planning has reached.

    Raises:
        ConfigError: If the stream or sample does not exist, `upto` is missing and the run has no
            end, or texts would be tokenized.
    """
    engine = planned_engine(dataset)
    check_tokenized(engine.spec.streams, "where")
    names = engine.recipe.names
    if stream not in names:
        raise ConfigError(
            f"stream={stream!r} is not one of {', '.join(map(repr, names))}"
            f"{suggest(stream, names)}; write one of these"
        )
    number = names.index(stream)
    held = engine.recipe.streams[number].num_samples
    sample = read_integer("sample", sample, COUNTED_FROM, least=0)
    if sample >= held:
        raise ConfigError(
            f"sample={sample}: stream {stream!r} has {held} samples; they count from 0"
        )
    epoch, position = place_of(engine, last_step(engine, upto))
    stop = epoch, position + engine.run.recipe(epoch).global_batch_size
    packs, found = _packs(engine, number, sample, stop, report), []
    for epoch, slot, row in _rows_of(engine, packs):
        step = engine.run.step_of(epoch, slot)
        is_skipped = any(first <= step < stop for first, stop in engine.state.skips)
        own = row.segments[_has(row.segments, number, sample)]
        found.append(Found(step=step, is_skipped=is_skipped, row=replace(row, segments=own)))
    return found


def _has(segments: Int64Array, number: int, sample: int) -> BoolArray:
    """Return which segments are of a sample, shape (n,)."""
    has: BoolArray = (segments[:, [STREAM, SAMPLE]] == [number, sample]).all(axis=1)
    return has


def _packs(
    engine: PlanEngine, number: int, sample: int, stop: Place, report: OnStep | None
) -> dict[Place, SlotPack]:
    """Return the packs that have a part of a sample, in order of their places."""
    run, parts, found = engine.run, num_parts(engine.run), {}
    for part in sorted({lane % parts for lane in _lanes(engine, number, sample)}):
        seen = run.whole() if parts == 1 else lanes_of(run, part, parts)
        with PlanReader(seen, stop=stop) as reader:
            for read in reader:
                if report is not None:
                    report(engine.run.step_of(read.plan.epoch, read.begin))
                packs = read.plan.packs
                hits = np.flatnonzero(_has(packs.segments, number, sample))
                for pack in np.unique(np.searchsorted(packs.ends, hits, "right")).tolist():
                    found[read.plan.epoch, int(read.slots[pack])] = read.pack(pack)
    # A batch may reach over the end of a step.
    return {place: found[place] for place in sorted(found) if place < stop}


def _lanes(engine: PlanEngine, number: int, sample: int) -> list[int]:
    """Return the lanes that deliver a sample: one of its own, or all in turn."""
    recipe = engine.recipe
    extents, shares = recipe.assignment(number)
    if shares is None:
        return list(range(recipe.num_lanes))
    firsts = [recipe.streams[number].first_sample[own.shards] + own.firsts for own in extents]
    return [
        lane
        for lane, (own, begins) in enumerate(zip(extents, firsts, strict=True))
        if ((begins <= sample) & (sample < begins + own.counts)).any()
    ]


def _rows_of(engine: PlanEngine, packs: dict[Place, SlotPack]) -> Iterator[tuple[int, int, Row]]:
    """Yield the rows that packs were, each with its epoch or chapter, and its slot there."""
    found = []
    for (epoch, slot), pack in packs.items():
        size = engine.run.recipe(epoch).global_batch_size
        world = worlds_between(engine, epoch, slot, slot + 1)[0][0]
        found.append(((epoch, slot // size * size), pack, world))
    # Where packs are dealt, only the whole global batch says where to.
    dealt = {place for place, _, world in found if world.within is not None}
    batches = global_batches(engine, dealt) if dealt else {}
    for (epoch, position), pack, world in found:
        rows = planned_rows(world, [pack], position)
        if world.within is not None:
            own = rows_of(engine, epoch, batches[epoch, position], position)
            rows = (row for row in own if np.array_equal(row.segments, pack.segments))
        for row in rows:
            yield epoch, pack.slot, row
