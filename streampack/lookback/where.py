"""`where`: in which steps of a run a sample was, and in which rows of which ranks.

With a plan index, the snapshots of the lane say between which of them each pass drew the sample,
and only that part is planned.

Cost: planning the sample's lane from the start of the run, about 0.4 us a sample; all lanes of a
small stream, and where lanes may run dry. With a plan index, about 1,000 steps of a lane a pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeAlias

import numpy as np

from streampack.errors import ConfigError, suggest
from streampack.lookback.at import global_batches
from streampack.lookback.index import PlanIndex
from streampack.lookback.rows import Row, SlotPack, planned_rows, rows_of, worlds_between
from streampack.lookback.steps import (
    OnStep,
    lane_views,
    last_step,
    num_parts,
    place_of,
    planned_engine,
    plans,
    whole_number,
)
from streampack.plan.device_plan import DeviceView
from streampack.plan.lane_stream import LaneStream
from streampack.plan.snapshots import text_as_rows
from streampack.plan.state import Progress
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.engine import PlanEngine
from streampack.types import NUM_COLUMNS, SAMPLE, STREAM, BoolArray, Int64Array, State


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """A row that has a part of the sample."""

    step: int
    """The step of the run."""
    is_skipped: bool
    """Whether the run skipped the step, so that no rank got the row."""
    row: Row
    """The row, with those segments that are the sample's."""


Place: TypeAlias = tuple[int, int]  # an epoch or a chapter, and a position in it
END: Place = (1 << 62, 0)


def where(
    dataset: PackedStreamingDataset,
    stream: str,
    sample: int,
    *,
    upto: int | None = None,
    index: PlanIndex | None = None,
    report: OnStep | None = None,
) -> list[Found]:
    """Return the rows in which a sample was, in order of steps.

    Args:
        dataset: The dataset of the run, as for `at`.
        stream: Name of the stream, as in `dataset.stream_names`.
        sample: Its number in the stream, as in `segments`.
        upto: The last step of the run to look at; None: its last, for a run of chapters that ends.
        index: A plan index of the run, or None if it is planned from its start.
        report: Called with the step that planning has reached, from time to time.

    Raises:
        ConfigError: If the stream or sample does not exist, or `upto` is missing and the run has no
            end.
    """
    engine = planned_engine(dataset)
    names = engine.recipe.names
    if stream not in names:
        raise ConfigError(
            f"stream={stream!r} is not one of {', '.join(map(repr, names))}"
            f"{suggest(stream, names)}; write one of these"
        )
    number = names.index(stream)
    held = engine.recipe.streams[number].num_samples
    sample = whole_number("sample", sample)
    if sample >= held:
        raise ConfigError(
            f"sample={sample}: stream {stream!r} has {held} samples; they count from 0"
        )
    epoch, position = place_of(engine, last_step(engine, upto))
    stop = epoch, position + engine.run.recipes[engine.run.index(epoch)].global_batch_size
    search = _Search(engine, number, sample, stop, index, report)
    found = []
    for epoch, slot, row in _rows_of(engine, sorted(search.packs().items()), index):
        step = engine.step_of(epoch, slot)
        is_skipped = any(first <= step < stop for first, stop in engine.skips)
        own = row.segments[search.has(row.segments)]
        found.append(Found(step=step, is_skipped=is_skipped, row=replace(row, segments=own)))
    return found


def _rows_of(
    engine: PlanEngine, packs: Sequence[tuple[Place, SlotPack]], index: PlanIndex | None
) -> Iterator[tuple[int, int, Row]]:
    """Yield the rows that packs were, each with its epoch or chapter, and its slot there."""
    worlds = [worlds_between(engine, epoch, slot, slot + 1)[0][0] for (epoch, slot), _ in packs]
    sizes = [recipe.global_batch_size for recipe in engine.run.recipes]
    steps = []
    for epoch, slot in (place for place, _ in packs):
        size = sizes[engine.run.index(epoch)]
        steps.append((epoch, slot // size * size))
    # Where packs are dealt, only the whole global batch says where to.
    dealt = {place for place, world in zip(steps, worlds, strict=True) if world.within is not None}
    batches = global_batches(engine, sorted(dealt), index) if dealt else {}
    for ((epoch, slot), pack), world, place in zip(packs, worlds, steps, strict=True):
        rows = planned_rows(world, [pack], place[1])
        if world.within is not None:
            rows = (
                row
                for row in rows_of(engine, epoch, batches[place], place[1])
                if np.array_equal(row.segments, pack.segments)
            )
        for row in rows:
            yield epoch, slot, row


@dataclass(frozen=True, slots=True)
class _Search:
    engine: PlanEngine
    number: int
    sample: int
    stop: Place
    index: PlanIndex | None
    report: OnStep | None

    def lanes(self) -> list[int]:
        """Return the lanes that deliver the sample: one of its own, or all in turn."""
        recipe = self.engine.recipe
        extents, shares = recipe.assignment(self.number)
        if shares is None:
            return list(range(recipe.num_lanes))
        for lane, own in enumerate(extents):
            starts = recipe.streams[self.number].first_sample[own.shards] + own.firsts
            if ((starts <= self.sample) & (self.sample < starts + own.counts)).any():
                return [lane]
        return []

    def has(self, segments: Int64Array) -> BoolArray:
        """Return which segments are of the sample, shape (n,)."""
        has: BoolArray = (segments[:, [STREAM, SAMPLE]] == [self.number, self.sample]).all(axis=1)
        return has

    def packs(self) -> dict[Place, SlotPack]:
        """Return the packs by place."""
        engine = self.engine
        parts = num_parts(engine.run, engine.recipe.num_lanes)
        ranges: dict[int, list[tuple[Place, Place]]] = {}
        for lane, some in self._ranges().items():
            ranges.setdefault(lane % parts, []).extend(some)
        found: dict[Place, SlotPack] = {}
        for part, some in ranges.items():
            views = lane_views(engine, part, parts)
            for begin, end in _merged(some):
                found |= self._search(views, begin, min(end, self.stop))
        return found

    def _search(self, views: list[DeviceView], begin: Place, end: Place) -> dict[Place, SlotPack]:
        engine, found = self.engine, {}
        start, walk = Progress(), None
        if self.index is not None and begin > (0, 0):
            start, walk = self.index.nearest(engine, *begin)
        with closing(plans(engine, views, start, walk)) as all_plans:
            for sequence, plan, slot in all_plans:
                if self.report is not None:
                    self.report(engine.step_of(plan.epoch, slot))
                view = views[engine.run.index(plan.epoch)]
                hits = np.flatnonzero(self.has(plan.packs.segments))
                for pack in np.unique(np.searchsorted(plan.packs.ends, hits, "right")).tolist():
                    batch, row = divmod(pack, plan.num_rows)
                    first = view.first_slot(slot + batch * view.stride) + row * plan.slots_per_pack
                    segments, size = plan.packs[pack], plan.slots_per_pack
                    if (plan.epoch, first) < self.stop:
                        found[plan.epoch, first] = SlotPack(
                            slot=first, num_slots=size, segments=segments
                        )
                if (plan.epoch, sequence.position) >= end:
                    break
        return found

    def _ranges(self) -> dict[int, list[tuple[Place, Place]]]:
        """Return ranges of the run in which lanes may have the sample, by lane."""
        engine, recipe, index = self.engine, self.engine.recipe, self.index
        lanes = self.lanes()
        is_fixed = recipe.mixing.sampling_method == "fixed"
        if index is None or is_fixed or not recipe.is_endless:
            return {lane: [((0, 0), self.stop)] for lane in lanes}
        queue = 0 if recipe.is_mixed else self.number
        histories = {lane: _History(index, engine, lane, queue) for lane in lanes}
        ranges = {lane: [own.last] for lane, own in histories.items()}
        streams = recipe.streams_in(queue)
        column = 3 + len(streams) + streams.index(self.number)
        most = max(own.cursors(column)[-1] for own in histories.values())
        own = LaneStream(recipe, self.number, lanes[0])
        for passes in count():
            lane, cursor = own.find(passes, self.sample)
            if cursor > most:
                return ranges
            ranges[lane].append(histories[lane].range_of(column, cursor, self._waits))
        return ranges

    def _waits(self, snapshot: State) -> bool:
        """Return whether the sample was drawn before a snapshot, and is delivered after it."""
        packer = snapshot["packer"]
        rows = [text_as_rows(snapshot.get("undelivered", ""))]
        for part in (packer, packer.get("short", {})):
            rows += [part.get("buffered", []), *part.get("items", [])]
        together = [np.array(some, np.int64).reshape(-1, NUM_COLUMNS) for some in rows]
        return bool(self.has(np.concatenate(together)).any())


class _History:
    """The snapshots of a queue of a lane, from the start of the run on."""

    def __init__(self, index: PlanIndex, engine: PlanEngine, lane: int, queue: int) -> None:
        self._places: list[Place] = [(0, 0)]
        self._snapshots: list[State] = []
        num_packs = 0
        for epoch, position, snapshot in index.snapshots_of(engine, lane, queue):
            # At a chapter's edge, a snapshot is labelled again and remains the same.
            if snapshot["num_packs"] > num_packs:
                num_packs = snapshot["num_packs"]
                self._places.append((epoch, position))
                self._snapshots.append(snapshot)

    def cursors(self, column: int) -> list[int]:
        """Return the samples that a stream had drawn at each place."""
        return [0, *[snapshot["arrivals"][column] for snapshot in self._snapshots]]

    @property
    def last(self) -> tuple[Place, Place]:
        """The range of which no snapshot tells the end."""
        return self._places[max(len(self._places) - 2, 0)], END

    def range_of(
        self, column: int, cursor: int, waits: Callable[[State], bool]
    ) -> tuple[Place, Place]:
        """Return a range in which a sample is delivered that was drawn at a cursor."""
        number = bisect_right(self.cursors(column), cursor) - 1
        # The packs of a snapshot may begin before it, but not before the one that came first.
        begin = self._places[max(number - 1, 0)]
        for place, snapshot in zip(
            self._places[number + 1 :], self._snapshots[number:], strict=True
        ):
            if not waits(snapshot):
                return begin, place
        return begin, END


def _merged(ranges: Sequence[tuple[Place, Place]]) -> list[tuple[Place, Place]]:
    """Return ranges without overlap, in order.

    >>> _merged([((1, 0), (1, 8)), ((0, 0), (0, 4)), ((0, 2), (0, 6))])
    [((0, 0), (0, 6)), ((1, 0), (1, 8))]
    """
    merged: list[tuple[Place, Place]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged
