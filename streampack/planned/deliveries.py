"""The plans of one iteration, from the request to the delivery of their last batch.

::

    request    plan, snapshots, losses so far, finished shards     -> waiting
    deliver    the next batch of the oldest waiting plan           -> progress, counts

So states and statistics refer to the batch last delivered, not to planned or prefetched ones.

Cost: about 10 us per plan.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from streampack.plan.device_plan import DevicePlan, Totals
from streampack.plan.recipe import Recipe
from streampack.plan.sequence import PackSequence
from streampack.plan.state import Progress
from streampack.planned.cache_budget import ReadAhead
from streampack.planned.refusals import check_not_empty
from streampack.runtime.stats import DeliveryStats
from streampack.types import Float64Array, Int64Array, State


@dataclass(slots=True, kw_only=True, eq=False)
class PlannedBatches:
    """Batches that were planned together, and how many of them are delivered."""

    plan: DevicePlan
    snapshots: list[State]
    """Progress after each batch."""
    totals: Totals
    """Those of this iteration so far."""
    shares: Float64Array | None
    """Shares that the chapter asks for, shape (num_streams,), or None if the run has epochs."""
    finished: Int64Array | None
    """Rows (stream, shard) that are finished with the last batch."""
    num_delivered: int = 0
    num_counted: int = 0
    """Number of delivered batches already counted in the statistics."""

    @property
    def is_delivered(self) -> bool:
        """Whether all batches are delivered."""
        return self.num_delivered == self.plan.num_batches

    @property
    def progress(self) -> Progress:
        """Progress of the run after the batch last delivered."""
        position = self.plan.positions[self.num_delivered - 1]
        return Progress(epoch=self.plan.epoch, position=position, snapshots=self.snapshots)

    def count(self, tally: DeliveryStats) -> None:
        """Count delivered batches that were not counted before."""
        packs, num_rows = self.plan.packs, self.plan.num_rows
        if self.num_counted < self.num_delivered:
            first, last = self.num_counted * num_rows, self.num_delivered * num_rows
            delivered = packs.slice(first, min(last, len(packs)))
            tally.add(delivered, self.plan.slots_per_pack, self.shares, last - first)
            self.num_counted = self.num_delivered


class IterationPlans:
    """The plans of one iteration, recorded as they are requested, and followed by the prefetch."""

    def __init__(self, sequence: PackSequence, recipe: Recipe, ahead: ReadAhead) -> None:
        self.sequence = sequence
        self.ahead = ahead
        self._recipe = recipe
        self._starts_epoch = not sequence.position
        self.waiting: deque[PlannedBatches] = deque()
        self._planned_last: PlannedBatches | None = None
        self._num_asked, self._num_delivered = 0, 0
        self.most_waiting = 0
        """High-water mark of batches planned and not delivered."""

    def next(self, most: int) -> DevicePlan | None:
        """Return a plan of at most this many batches; None at the epoch's end."""
        last, sequence = self._planned_last, self.sequence
        if last is None:
            self.ahead.look()  # only now: it starts threads, and the workers are already forked
        plan = sequence.next(most)
        if plan is None:
            if last is not None:
                # Only now it is known where the epoch ends, and what is skipped there.
                now = sequence.totals
                last.totals = replace(last.totals, omitted=now.omitted, skipped=now.skipped)
            elif self._starts_epoch:
                check_not_empty(self._recipe, sequence.epoch)
            return None
        self._num_asked += plan.num_batches
        self.most_waiting = max(self.most_waiting, self._num_asked - self._num_delivered)
        snapshots, shares = sequence.snapshots(), sequence.shares_of(plan)
        self._planned_last = PlannedBatches(
            plan=plan,
            snapshots=snapshots,
            totals=sequence.totals,
            shares=shares,
            finished=self.ahead.look(),
        )
        self.waiting.append(self._planned_last)
        return plan

    def deliver(self) -> PlannedBatches:
        """Record the delivery of one more batch, and return those that it was planned with."""
        delivered, self.ahead.is_patient = self.waiting[0], False
        delivered.num_delivered += 1
        self._num_delivered += 1
        if delivered.is_delivered:
            self.waiting.popleft()
        return delivered
