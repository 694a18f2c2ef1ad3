"""The canonical sequence of packs, and the part of it that one device gets.

::

    walk        slot q -> (lane, queue, pack)            all slots, integers only
    queues      (lane, queue, pack) -> segments          only the lanes that this device uses
    stride      devices * batch_size slots = one step;   the device at place p takes the p-th batch

    epoch or chapter 0         chapter 1            chapter 2
    a walk    -----edge----->  a walk    --edge-->  ...     one after another, as one sequence
        '---------------- PackQueues: the queues live on ---'

The sequence does not depend on the world; the world only selects which slots a device reads. Each
chapter has positions of its own, from 0. Steps to be skipped are walked, and planned only as far as
a lane needs them for what follows.

Cost: the pack queues, and a few us a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streampack.plan.deal import Dealer
from streampack.plan.device_plan import (
    NO_BATCHES,
    AlikeBatches,
    BatchPacks,
    DevicePlan,
    Totals,
)
from streampack.plan.pack_queues import PackQueues
from streampack.plan.shard_tracker import ShardDelta, ShardTracker
from streampack.plan.slot_kernels import QUEUE
from streampack.plan.span_slots import SpanSlots
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress
from streampack.types import NO_PACKS, Float64Array, Int64Array, State

TOGETHER = 512  # maximum number of packs gathered together, in whole batches


class PackSequence:
    """One device's batches of an epoch or of the chapters of a run, from a position on.

    Steps of the run in `skips`, ranges [first, stop), are not delivered. An epoch is delivered
    alone. Without snapshots in `start`, lanes are planned from the start of the epoch or the run.

    Attributes:
        epoch: The epoch, or the chapter of a run.
        position: Packs of it before the next step, over all ranks.
        num_skipped: Steps that were skipped.
        stop: One past the last chapter to deliver; at first the run's last.
    """

    def __init__(
        self,
        run: RunPlan,
        start: Progress | None = None,
        *,
        skips: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._run = run
        self._skips = sorted(skips)
        start = start or Progress()
        number = start.epoch
        self.stop = len(run) if run.chapters else number + 1
        self._queues = PackQueues(run, number, start.snapshots)
        self._substituted_before = 0  # in chapters before, without those before the start
        self.num_skipped = 0
        self._begin(number, start.position)
        self._dropped_before = self._queues.dropped
        self._substituted_before -= self._at.substituted
        if self._is_over and number + 1 < self.stop:
            self._start_chapter()

    def _begin(self, number: int, position: int) -> None:
        self._recipe = recipe = self._run.recipe(number)
        self._view = view = self._run.view(number)
        self.epoch = number
        self.position = position
        chapter = recipe.chapter
        # Shares at the first slot of a chapter and after its last, shape (2, num_streams).
        self._shares = np.array([chapter.begin, chapter.end] if chapter else [], np.float64)
        self._stride = view.stride
        self._gathered = NO_BATCHES  # this device's batches from _gathered_from on
        self._gathered_from = 0
        self._dealer = None if view.balance is None else Dealer(recipe, view, view.balance)
        self._dealt = NO_BATCHES  # this device's part of the global batch at _dealt_from
        self._dealt_from = -1
        self._num_looked = -1  # num_changes when shards_ahead last compared; -1: never
        self._watch = ShardTracker(recipe)
        self._at = SpanSlots(self._run, number, position, self._queues)
        self._skip_to(position)
        self._at.note_delivered()

    @property
    def num_slots(self) -> int | None:
        """Slots of the epoch or chapter, including padding in its last global batch, once known."""
        return self._at.num_slots

    @property
    def is_finished(self) -> bool:
        """Whether the epoch or the run has no step after this position, in any process."""
        self._at.walk_to(self.position + 1)
        return self._is_over and self.epoch + 1 == self.stop

    @property
    def _is_over(self) -> bool:
        return self._at.num_slots is not None and self.position >= self._at.num_slots

    @property
    def totals(self) -> Totals:
        """What was dropped, substituted and skipped from the start on.

        Dropped samples count when they are planned, in lanes of which each is counted by one
        device.
        """
        dealer = self._dealer
        return Totals(
            dropped=self._queues.dropped - self._dropped_before,
            substituted=self._substituted_before + self._at.substituted,
            skipped=self.num_skipped,
            omitted=self._at.num_omitted,
            packer_tokens=self._queues.high_water_tokens,
            straggler=None if dealer is None else dealer.straggler,
        )

    def next(self, most: int = 1, *, fetch: bool = True) -> DevicePlan | None:
        """Return the plan of this device's next batches, or None at the end.

        Args:
            most: Maximum number of batches. More than one is returned only if all of them are full
                and already planned, and no snapshot changes between them.
            fetch: False skips one batch: its plan has no packs.
        """
        while True:
            most_here = self._skip(most) if self._skips else most
            self._at.walk_to(self.position + self._stride)
            if not self._is_over:
                return self._next(most_here, fetch=fetch)
            if self.epoch + 1 == self.stop:
                return None
            self._start_chapter()

    def _next(self, most: int, *, fetch: bool) -> DevicePlan:
        stride = self._stride
        batches = self._batches_to_deliver(most) if fetch else self._no_packs()
        packs, num_batches, slots_per_pack = batches
        first, self.position = self.position, self.position + num_batches * stride
        if num_batches > 1:
            self._at.walk_to(self.position)  # these slots are known; this marks them as requested
        self._at.release(self.position)
        ends = range(first + stride, self.position + 1, stride)
        is_counted = self._at.total is not None
        return DevicePlan(
            packs=packs,
            num_rows=self._view.batch_size // slots_per_pack,
            epoch=self.epoch,
            positions=[self._count(end) for end in ends] if is_counted else list(ends),
            slots_per_pack=slots_per_pack,
        )

    def shares_of(self, plan: DevicePlan) -> Float64Array | None:
        """Return the mean share that each stream has by its chapter in the plan last returned.

        Shape (num_streams,). None: the run has epochs.
        """
        chapter = self._recipe.chapter
        if chapter is None or not chapter.ramps:
            return None if chapter is None else self._shares[0]
        middle = (plan.positions[0] - self._stride + plan.position) // 2
        begin, end = self._shares
        shares: Float64Array = begin + (end - begin) * float(chapter.fraction_at(middle))
        return shares

    def _count(self, end: int) -> int:
        """Return the position after the step that ends at slot `end`.

        In an epoch, padding packs do not advance the position, except in steps of padding alone.
        Those occur if a global batch takes several steps, and a resume must be able to tell them
        apart. After a resume inside a step of this world, the last step is longer than what is
        left.
        """
        total, num_slots = self._at.total or 0, self._at.num_slots or 0
        counts_padding = self._recipe.chapter is not None or end - self._stride >= total
        return min(end, num_slots if counts_padding else total)

    def snapshots(self) -> list[State]:
        """Return the snapshots from which this device can plan the packs that come next.

        The list is the same one until a snapshot changes.
        """
        return self._at.snapshots()

    def shards_ahead(self) -> ShardDelta | None:
        """Return the shards that this device's lanes need, and those finished since the last call.

        None if nothing changed. A shard counts as finished once the batches returned by `next` so
        far are delivered. Another device of the same lanes may need it slightly longer.
        """
        if self._recipe.is_endless and self._num_looked < 0:
            # Lanes replanned from the run's start need no shards of delivered packs.
            self._queues.know_delivered()
            self._at.quiet_until = 0
        self._at.snapshots()  # records delivered packs
        if self._num_looked == self._queues.num_changes:
            return None
        self._num_looked = self._queues.num_changes
        return self._watch.look(self._queues)

    def close(self) -> None:
        """Stop the thread that counts lane ends, if there is one."""
        self._at.close()

    # Batches.

    def _batches_to_deliver(self, most: int) -> AlikeBatches:
        """Return the next batches, dealt if they are; at least one."""
        at, size, first = self._at, self._recipe.global_batch_size, self._at.edge(self.position)
        if self._dealer is None or at.is_padded(first):
            return self._batches(most)
        if self._dealt_from != first:
            slots = at.slots[self._dealer.slots(first) - at.first]
            self._dealt = self._dealer.deal(self._gather(slots, len(slots)))
            self._dealt_from, at.quiet_until = first, 0
        number = (self.position - first) // self._stride
        if first + size >= at.quiet_until:
            # Snapshots may change at the global batch's end, and those of a state inside it must
            # not: its last batch is planned alone.
            most = max(min(most, size // self._stride - 1 - number), 1)
        return self._dealt.take(number, most)

    def _no_packs(self) -> AlikeBatches:
        """Return a batch of padding, in packs of the length that was served last."""
        return NO_PACKS, 1, int(self._recipe.shapes.slots_per_pack[self._at.last_queue])

    def _batches(self, most: int) -> AlikeBatches:
        view = self._view
        first, size = view.first_slot(self.position), view.batch_size
        if self._at.total is not None:
            size = min(size, self._at.total - first)
        if size <= 0:
            return self._no_packs()
        number = (first - self._gathered_from) // self._stride
        if number >= len(self._gathered):
            self._gathered = self._gather(self._own_slots(first), view.batch_size)
            self._gathered_from, number = first, 0
            self._at.quiet_until = 0
        if size < view.batch_size:
            return self._gathered.take(number, 1, size)
        if most == 1:
            return self._gathered.take(number, 1)
        return self._gathered.take(number, min(most, 1 + self._num_alike()))

    def _gather(self, slots: Int64Array, least: int) -> BatchPacks:
        """Return the packs of the first `least` slots, and of all known batches after them.

        Both are whole batches, in order. The last of all may lack some slots.
        """
        size, known = self._view.batch_size, self._queues.know(slots, least)
        if known < len(slots):
            slots = slots[: max(known // size * size, least)]
        shapes = self._recipe.shapes.slots_per_pack[slots[::size, QUEUE]]
        return BatchPacks(self._queues.gather(slots), shapes, self._view)

    def _num_alike(self) -> int:
        """Return how many batches after the next are full, walked, and change no snapshot."""
        at, size = self._at, self._recipe.global_batch_size
        end = self.position + self._stride
        at.release(end)
        at.snapshots()
        stop = at.asked + (at.num_walked - at.asked) // size * size
        if at.total is not None:
            stop = min(stop, at.total)
        return max(0, min(stop, at.quiet_until - 1) - end) // self._stride

    def _own_slots(self, first: int) -> Int64Array:
        """Return walked slots of this device's batches from `first` on, at least one batch."""
        at, batch_size = self._at, self._view.batch_size
        stop = at.num_walked if at.total is None else min(at.num_walked, at.total)
        num_batches = (stop - first - batch_size) // self._stride + 1
        num_batches = max(1, min(num_batches, TOGETHER // batch_size))
        starts = first - at.first + self._stride * np.arange(num_batches)
        rows = self._view.slots_from(starts).ravel()
        slots: Int64Array = at.slots[rows[rows < stop - at.first]]
        return slots

    def _skip_to(self, position: int) -> None:
        self._at.skip_to(position)
        if self._at.total is not None and position >= self._at.total:
            # Only padding is left: continue with the step after the one that held the last packs.
            self.position = -(-position // self._stride) * self._stride

    # Chapters.

    def _skip(self, most: int) -> int:
        """Move past steps that are skipped; return the batches that may follow, up to `most`."""
        size, before = self._recipe.global_batch_size, self._run.first_step(self.epoch)
        for first, stop in self._skips:
            step = before + self.position // size
            # A step that has begun is delivered to its end.
            if first <= step < stop and self.position % size == 0:
                last = stop - before
                if self.num_slots is not None:
                    last = min(last, self.num_slots // size)
                self.num_skipped += last - (step - before)
                self.position = last * size
                self._skip_to(self.position)
        step = before + self.position // size
        nexts = [first for first, _ in self._skips if first > step]
        if nexts:
            left = (nexts[0] - before) * size - self.position
            most = min(most, max(left // self._stride, 1))
        return most

    def _start_chapter(self) -> None:
        self._substituted_before += self._at.substituted
        self._at.note_delivered()
        self._run.note_end(self.epoch, self._at.walk.state())
        self.close()
        number = self.epoch + 1
        self._queues.start_chapter(self._run.recipes[number], self._run.lanes(number, 0))
        self._begin(number, 0)
