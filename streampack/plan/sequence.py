"""The canonical sequence of packs, and the part of it that one device gets.

::

    walk        slot q -> (lane, queue, pack)            all slots, integers only
    queues      (lane, queue, pack) -> segments          only the lanes that this device uses
    window      devices * batch_size slots = one step;   the device at place p takes the p-th batch

The sequence does not depend on the world; the world only selects which slots a device reads. The
ends of other devices' lanes are found by planning those lanes in a thread, once their end may be
near. Slots are walked and packs gathered for several batches together, as long as that plans
nothing early.

Cost: the pack queues, and a few us a batch. Memory: one chunk of segments a queue, and a shuffle
block for each stream of each planned lane (16 bytes a sample, by default at most 262,144: 4 MiB).
"""

from __future__ import annotations

import numpy as np

from streampack.plan.deal import Dealer
from streampack.plan.device import (
    NO_BATCHES,
    AlikeBatches,
    DevicePlan,
    DeviceView,
    counted_lanes,
    touched_lanes,
)
from streampack.plan.lane_ends import LaneEndFinder, packs_in, slots_in
from streampack.plan.pack_queues import PackQueues
from streampack.plan.recipe import Recipe
from streampack.plan.shard_window import ShardDelta, ShardTracker
from streampack.plan.slot_kernels import QUEUE, SUBSTITUTED
from streampack.plan.slots import NO_SLOTS, SlotWalker
from streampack.plan.state import Progress
from streampack.types import NO_PACKS, Float64Array, Int64Array, State

AHEAD = 4096  # maximum number of slots walked ahead, as long as no queue has to be planned for it
TOGETHER = 512  # maximum number of packs gathered together, in whole batches


class EpochSequence:
    """One device's batches of one epoch, from a position on.

    Without snapshots in `start`, the lanes are planned from the epoch's start.

    Attributes:
        position: Packs of the epoch before the next step, over all ranks.
        num_slots: Slots of the epoch, including padding in its last global batch, once known.
    """

    num_skipped = 0
    """Steps that were skipped; only a run of chapters skips any."""

    def __init__(self, recipe: Recipe, view: DeviceView, start: Progress | None = None) -> None:
        start = start or Progress()
        epoch, position = start.epoch, start.position
        self._set_up(recipe, view, epoch, position)
        self._is_carry = recipe.mixing.epoch_end == "carry"
        first_epoch = 0 if self._is_carry else epoch
        before = (epoch - first_epoch) * recipe.packs_per_carry_epoch
        self._own_lanes = touched_lanes(recipe, view, position, before)
        self._walk = SlotWalker(recipe, first_epoch, self._extend_queue)
        if self._is_carry:
            self._set_total(recipe.packs_per_carry_epoch)
            self._walk.go_to_epoch(epoch)
        counted = counted_lanes(recipe, view)
        self._queues = PackQueues(recipe, first_epoch, self._walk.served, start.snapshots, counted)
        self._open_queues()
        self._pass_over(position)
        self._note_passed()
        self._queues.check_passed(self.position)

    def _set_up(self, recipe: Recipe, view: DeviceView, epoch: int, position: int) -> None:
        self._recipe = recipe
        self._view = view
        self.epoch = epoch
        self.position = position
        self.num_slots: int | None = None
        self._slots = NO_SLOTS  # walked slots that are not yet recorded as delivered
        self._first_slot = 0  # number of the first of these
        self._released = 0  # slots that are delivered
        self._asked = 0  # slots that were requested: whole global batches
        self._total: int | None = None  # packs of the epoch, once known
        chapter = recipe.chapter
        # Shares at the first slot of a chapter and after its last, shape (2, num_streams).
        self._shares = np.array([chapter.begin, chapter.end] if chapter else [], np.float64)
        self._window = view.window
        self._substituted = 0  # substitutions before _first_slot
        self._last_queue = 0  # of the last slot that was walked
        self._gathered = NO_BATCHES  # this device's batches from _gathered_from on
        self._gathered_from = 0
        self._dealer = None if view.balance is None else Dealer(recipe, view, view.balance)
        self._dealt = NO_BATCHES  # this device's part of the global batch at _dealt_from
        self._dealt_from = -1
        self._quiet_until = 0  # slots that can be released before a snapshot changes
        self._saved: list[State] = []
        self._num_looked = -1  # num_changes when shards_ahead last compared; -1: never
        self._ends = LaneEndFinder(recipe, epoch)
        self._watch = ShardTracker(recipe)
        # Packs of queues that were extended.
        self._num_packs = np.zeros((recipe.num_lanes, recipe.num_queues), np.int64)

    @property
    def is_finished(self) -> bool:
        """Whether the epoch has no step after this position, in any process."""
        self._walk_to(self.position + 1)
        return self.num_slots is not None and self.position >= self.num_slots

    @property
    def substituted(self) -> int:
        """Slots of the epoch so far that went to another stream because theirs was exhausted."""
        if self._recipe.is_mixed:
            return 0
        asked = self._slots[: self._asked - self._first_slot, SUBSTITUTED]
        return self._substituted + int(asked.sum())

    @property
    def num_omitted(self) -> int:
        """Packs that epoch_end="drop" leaves out, over all ranks; 0 until the end is known."""
        if self._total is None or self._recipe.mixing.epoch_end != "drop":
            return 0
        served = self._walk.served.sum(axis=0)
        omitted = self._slots[self._total - self._first_slot :, QUEUE]
        served -= np.bincount(omitted, minlength=len(served))
        packs = self._num_packs.sum(axis=0) - served // self._recipe.shapes.slots_per_pack
        return int(packs.sum())

    @property
    def buffered_tokens(self) -> int:
        """The sum of the maximum number of tokens held by each packer of this device."""
        return self._queues.high_water_tokens

    @property
    def dropped(self) -> Int64Array:
        """Samples without segments since the epoch began, per stream.

        Each lane is counted by one device, although several devices may plan it.
        """
        return self._queues.dropped

    def next(self, most: int = 1, *, fetch: bool = True) -> DevicePlan | None:
        """Return the plan of this device's next batches, or None at the epoch's end.

        Args:
            most: Maximum number of batches. More than one is returned only if all of them are full
                and already planned, and no snapshot changes between them.
            fetch: False skips one batch: its plan has no packs.
        """
        window = self._window
        self._walk_to(self.position + window)
        if self.num_slots is not None and self.position >= self.num_slots:
            return None
        batches = self._batches_to_deliver(most) if fetch else self._no_packs()
        packs, num_batches, slots_per_pack = batches
        first, self.position = self.position, self.position + num_batches * window
        if num_batches > 1:
            self._walk_to(self.position)  # these slots are known; this marks them as requested
        self._release(self._edge(self.position))
        ends = range(first + window, self.position + 1, window)
        return DevicePlan(
            packs=packs,
            num_rows=self._view.batch_size // slots_per_pack,
            epoch=self.epoch,
            positions=list(ends) if self._total is None else [self._count(end) for end in ends],
            slots_per_pack=slots_per_pack,
        )

    def shares_of(self, plan: DevicePlan) -> Float64Array | None:
        """Return the mean share that each stream has by its chapter in the plan last returned.

        Shape (num_streams,). None: the run has epochs.
        """
        chapter = self._recipe.chapter
        if chapter is None or not chapter.ramps:
            return None if chapter is None else self._shares[0]
        middle = (plan.positions[0] - self._window + plan.position) // 2
        begin, end = self._shares
        shares: Float64Array = begin + (end - begin) * float(chapter.fraction_at(middle))
        return shares

    def _count(self, end: int) -> int:
        """Return the position after the step that ends at slot `end`, if the total is known.

        Padding packs do not advance the position, except in steps of padding alone. Those occur if
        a global batch takes several steps, and a resume must be able to tell them apart.
        """
        total, num_slots = self._total or 0, self.num_slots or 0
        return min(end, num_slots if end - self._window >= total else total)

    def snapshots(self) -> list[State]:
        """Return the snapshots from which this device can plan the packs that come next."""
        self._look()
        return list(self._saved)

    def shards_ahead(self) -> ShardDelta | None:
        """Return the shards that this device's lanes need, and those finished since the last call.

        None if nothing changed. A shard counts as finished once the batches returned by `next` so
        far are delivered. Another device of the same lanes may need it slightly longer.
        """
        if self._is_carry and self._num_looked < 0:
            # Lanes planned again from the run's start need no shards of delivered packs.
            self._queues.know_passed()
            self._quiet_until = 0
        self._look()
        if self._num_looked == self._queues.num_changes:
            return None
        self._num_looked = self._queues.num_changes
        return self._watch.look(self._queues)

    @property
    def straggler(self) -> tuple[float, float] | None:
        """Mean time of a global batch over the ideal, as planned and as dealt; None: none dealt.

        Of the devices that share packs. A padded last batch is not dealt.
        """
        return None if self._dealer is None else self._dealer.straggler

    def close(self) -> None:
        """Stop the thread that counts lane ends, if there is one."""
        self._ends.close()

    def _open_queues(self) -> None:
        """Create the pack queues of this device's lanes, and record their known packs."""
        for lane in self._own_lanes:
            for queue in range(self._recipe.num_queues):
                pack_queue = self._queues.get(lane, queue)
                if not self._is_carry:
                    self._walk.known[lane, queue] = self._recipe.shapes.slots_of(
                        queue, pack_queue.num_known, is_all=pack_queue.is_complete
                    )

    def _extend_queue(self, lane: int, queue: int) -> None:
        """Plan a queue further if it is this device's, otherwise refine its bound."""
        walk = self._walk
        if lane in self._own_lanes:
            self._note_passed()
            pack_queue = self._queues.extend(lane, queue)
            num_packs, is_all = pack_queue.num_known, pack_queue.is_complete
        else:
            num_packs, is_all = self._ends.refine(lane, queue)
        self._num_packs[lane, queue] = num_packs
        walk.known[lane, queue] = self._recipe.shapes.slots_of(queue, num_packs, is_all=is_all)
        walk.complete[lane, queue] = is_all

    def _set_total(self, num_packs: int) -> None:
        self._total = num_packs
        self.num_slots = slots_in(self._recipe, num_packs)

    @property
    def _num_walked(self) -> int:
        return self._first_slot + len(self._slots)

    def _walk_to(self, slot: int) -> None:
        """Walk whole global batches until `slot` slots are known, or all lanes are dry."""
        size = self._recipe.global_batch_size
        while self._asked < slot and (self._total is None or self._asked < self._total):
            wanted = -(-slot // size) * size
            if wanted > self._num_walked:  # one batch at a time: each may be the last
                wanted = self._asked + size
            if wanted > self._num_walked:
                self._walk_on(wanted - self._num_walked)
            self._asked = min(wanted, self._num_walked)

    def _walk_on(self, num_slots: int) -> None:
        """Walk `num_slots` slots, and as many more as possible without planning queues."""
        walked = self._walk.next(num_slots)
        num_walked = self._num_walked + len(walked)
        if len(walked) < num_slots:
            self._set_total(packs_in(self._recipe, num_walked))
        room = AHEAD if self._total is None else max(self._total - num_walked, 0)
        ahead = self._walk.next(min(room, AHEAD), may_extend=False)
        self._note_passed()
        self._slots = np.concatenate([self._slots, walked, ahead])
        if len(self._slots):
            self._last_queue = int(self._slots[-1, QUEUE])
        self._quiet_until = 0
        self._ends.look_ahead(self._walk.served)

    def _edge(self, slot: int) -> int:
        """Return the slot before which everything is delivered once `slot` slots are.

        With balance, the packs of a global batch are needed together until its last step, unless
        it is padded: then it is not dealt.
        """
        size = self._recipe.global_batch_size
        edge = slot // size * size
        is_padded = self._total is not None and edge + size > self._total
        return slot if self._dealer is None or is_padded else edge

    def _batches_to_deliver(self, most: int) -> AlikeBatches:
        """Return the next batches, dealt if they are; at least one."""
        size, first = self._recipe.global_batch_size, self._edge(self.position)
        is_padded = self._total is not None and first + size > self._total
        if self._dealer is None or is_padded:
            return self._batches(most)
        if self._dealt_from != first:
            slots = self._slots[self._dealer.slots(first) - self._first_slot]
            batch_size = self._view.batch_size
            slots = self._queues.know(slots, len(slots), batch_size)
            self._dealt = self._dealer.deal(self._queues.gather(slots, batch_size))
            self._dealt_from, self._quiet_until = first, 0
        number = (self.position - first) // self._window
        if first + size >= self._quiet_until:
            # Snapshots may change at the global batch's end, and those of a state inside it must
            # not: its last batch is planned alone.
            most = max(min(most, size // self._window - 1 - number), 1)
        return self._dealt.take(number, most)

    def _no_packs(self) -> AlikeBatches:
        """Return a batch of padding, in packs of the length that was served last."""
        slots_per_pack = int(self._recipe.shapes.slots_per_pack[self._last_queue])
        return AlikeBatches(NO_PACKS, 1, slots_per_pack)

    def _batches(self, most: int) -> AlikeBatches:
        """Return the next batches, in order; at least one."""
        view = self._view
        first, size = view.first_slot(self.position), view.batch_size
        if self._total is not None:
            size = min(size, self._total - first)
        if size <= 0:
            return self._no_packs()
        number = (first - self._gathered_from) // self._window
        if number >= len(self._gathered):
            slots = self._queues.know(self._own_slots(first), view.batch_size, view.batch_size)
            self._gathered = self._queues.gather(slots, view.batch_size)
            self._gathered_from, number = first, 0
            self._quiet_until = 0
        if size < view.batch_size:
            return self._gathered.take(number, 1, size)
        if most == 1:
            return self._gathered.take(number, 1)
        return self._gathered.take(number, min(most, 1 + self._num_alike()))

    def _num_alike(self) -> int:
        """Return how many batches after the next are full, walked, and change no snapshot."""
        end, size = self.position + self._window, self._recipe.global_batch_size
        self._release(self._edge(end))
        self._look()
        stop = self._asked + (self._num_walked - self._asked) // size * size
        if self._total is not None:
            stop = min(stop, self._total)
        return max(0, min(stop, self._quiet_until - 1) - end) // self._window

    def _own_slots(self, first: int) -> Int64Array:
        """Return walked slots of this device's batches from `first` on, at least one batch."""
        view = self._view
        stop = self._num_walked if self._total is None else min(self._num_walked, self._total)
        num_batches = (stop - first - view.batch_size) // self._window + 1
        num_batches = max(1, min(num_batches, TOGETHER // view.batch_size))
        starts = first - self._first_slot + self._window * np.arange(num_batches)
        rows = (starts[:, None] + np.arange(view.batch_size)).ravel()
        slots: Int64Array = self._slots[rows[rows < stop - self._first_slot]]
        return slots

    def _release(self, slot: int) -> None:
        """Mark the slots before `slot` as delivered."""
        # Packs omitted by epoch_end="drop" do not count as delivered.
        self._released = slot if self._total is None else min(slot, self._total)

    def _note_passed(self) -> None:
        """Pass delivered slots on to the pack queues, and drop them."""
        gone = self._slots[: self._released - self._first_slot]
        if len(gone):
            self._queues.pass_by(gone)
            self._substituted += int(gone[:, SUBSTITUTED].sum())
            self._slots = self._slots[len(gone) :]
            self._first_slot = self._released

    def _look(self) -> None:
        """Update the snapshots if one of them may have changed."""
        if self._released < self._quiet_until:
            return
        self._note_passed()
        self._saved = self._queues.snapshots()
        self._quiet_until = self._first_slot + self._queues.num_quiet(self._slots) + 1

    def _pass_over(self, position: int) -> None:
        """Move to `position`: walk all slots before it, one global batch at a time."""
        edge = self._edge(position)
        while self._released < edge:
            target = min(self._released + self._recipe.global_batch_size, edge)
            self._walk_to(target)
            reached = min(target, self._num_walked)
            if reached == self._released:
                break
            self._release(reached)
        if edge < position:  # inside a global batch: only its walk shows whether it is padded
            self._walk_to(position)
            self._release(min(self._edge(position), self._num_walked))
        if self._total is not None and position >= self._total:
            # Only padding is left: continue with the step after the one that held the last packs.
            self.position = -(-position // self._window) * self._window
