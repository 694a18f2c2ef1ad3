"""The plans of one iteration, from the request to the delivery of their last batch.

::

    request    plan, snapshots, losses so far, finished shards     -> waiting
    deliver    the next batch of the oldest waiting plan           -> progress, counts

So states and statistics refer to the batch last delivered, not to planned or prefetched ones.

Cost: about 10 us per plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from streampack.plan import DevicePlan, EpochSequence, Progress, Recipe
from streampack.planned.cache_budget import ReadAhead
from streampack.planned.refusals import check_not_empty
from streampack.runtime.stats import DeliveryStats
from streampack.types import Int64Array, State


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Losses:
    """Samples dropped, slots substituted and packs omitted."""

    dropped: Int64Array
    """Dropped samples per stream, shape (num_streams,)."""
    substituted: int = 0
    """Slots that another stream served."""
    skipped: int = 0
    """Steps that were not delivered."""
    omitted: int = 0
    """Packs that the ends of epochs omitted."""

    def __add__(self, other: Losses) -> Losses:
        return Losses(
            dropped=self.dropped + other.dropped,
            substituted=self.substituted + other.substituted,
            skipped=self.skipped + other.skipped,
            omitted=self.omitted + other.omitted,
        )

    @classmethod
    def none(cls, num_streams: int) -> Losses:
        """Return zero losses."""
        return cls(dropped=np.zeros(num_streams, np.int64))


@dataclass(slots=True, kw_only=True, eq=False)
class PlannedBatches:
    """Batches that were planned together."""

    plan: DevicePlan
    snapshots: list[State]
    """Progress after each batch."""
    losses: Losses
    """Losses of this iteration so far."""
    packer_tokens: int
    """High-water mark of the packers' buffers so far."""
    straggler: tuple[float, float] | None
    """Time of a global batch over the ideal, as planned and as dealt, so far in this iteration."""
    finished: Int64Array | None
    """Rows (stream, shard) that are finished with the last batch."""
    num_counted: int = 0
    """Number of delivered batches already counted in the statistics."""

    def count(self, num_delivered: int, tally: DeliveryStats) -> None:
        """Count delivered batches that were not counted before."""
        packs, num_rows = self.plan.packs, self.plan.num_rows
        if self.num_counted < num_delivered:
            first, last = self.num_counted * num_rows, num_delivered * num_rows
            delivered = packs.slice(first, min(last, len(packs)))
            tally.add(delivered, self.plan.slots_per_pack)
            self.num_counted = num_delivered


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeliveredBatch:
    """The batch last delivered, as part of a planned group."""

    planned: PlannedBatches
    number: int
    """Number of the group's batches that are delivered."""

    @property
    def is_last(self) -> bool:
        """Whether all batches of the group are delivered."""
        return self.number == self.planned.plan.num_batches

    @property
    def progress(self) -> Progress:
        """Progress of the run after this batch."""
        plan = self.planned.plan
        position = plan.positions[self.number - 1]
        return Progress(epoch=plan.epoch, position=position, snapshots=self.planned.snapshots)

    def count(self, tally: DeliveryStats) -> None:
        """Count this batch, and earlier ones that were not counted."""
        self.planned.count(self.number, tally)


class IterationPlans:
    """The plans of one iteration, recorded as they are requested, and followed by the prefetch."""

    def __init__(self, sequence: EpochSequence, recipe: Recipe, ahead: ReadAhead) -> None:
        self.sequence = sequence
        self.ahead = ahead
        self._recipe = recipe
        self._drops = recipe.packing.overflow == "drop"
        self._starts_epoch = not sequence.position
        # Losses of the epoch before this iteration, if it resumes from a state.
        self._before = Losses(dropped=sequence.overlong, substituted=sequence.substituted)
        self._no_drops = np.zeros_like(self._before.dropped)
        self.waiting: deque[PlannedBatches] = deque()
        self._planned_last: PlannedBatches | None = None
        self._num_asked, self._num_delivered = 0, 0
        self._num_of_first = 0  # delivered batches of the oldest plan
        self.most_waiting = 0
        """High-water mark of batches planned and not delivered."""

    def next(self, most: int) -> DevicePlan | None:
        """Return a plan of at most this many batches; None at the epoch's end."""
        sequence = self.sequence
        if not self._num_asked:
            self.ahead.look()  # only now: it starts threads, and the workers are already forked
        plan = sequence.next(most)
        if plan is None:
            if self._starts_epoch and not self._num_asked:
                check_not_empty(self._recipe, sequence.epoch)
            elif self._planned_last:
                # Only now it is known where the epoch ends.
                last = self._planned_last
                last.losses = replace(last.losses, omitted=sequence.num_omitted)
            return None
        finished = self.ahead.look()
        losses = Losses(
            dropped=self._dropped(),
            substituted=sequence.substituted - self._before.substituted,
            skipped=sequence.num_skipped,
            omitted=sequence.num_omitted,
        )
        self._num_asked += plan.num_batches
        self.most_waiting = max(self.most_waiting, self._num_asked - self._num_delivered)
        self._planned_last = PlannedBatches(
            plan=plan,
            snapshots=sequence.snapshots(),
            losses=losses,
            packer_tokens=sequence.buffered_tokens,
            straggler=sequence.straggler,
            finished=finished,
        )
        self.waiting.append(self._planned_last)
        return plan

    def one_by_one(self) -> Iterator[DevicePlan]:
        """Yield the plans of single batches."""
        while (plan := self.next(1)) is not None:
            yield plan

    def deliver(self) -> DeliveredBatch:
        """Record the delivery of one more batch."""
        self._num_of_first += 1
        self._num_delivered += 1
        delivered = DeliveredBatch(planned=self.waiting[0], number=self._num_of_first)
        if delivered.is_last:
            self.waiting.popleft()
            self._num_of_first = 0
        return delivered

    def _dropped(self) -> Int64Array:
        if not self._drops:
            return self._no_drops
        return self.sequence.overlong - self._before.dropped
