"""The slots of one span of a run, walked ahead of the device: an epoch or a chapter.

::

    delivered | released  asked ...        walked on            | not known
              ^ first                      as far as no queue has to be planned for it

Slots are walked in whole global batches, and several batches together, as long as that plans
nothing early. The pack queues are told which slots are delivered.

Cost: about 10 ns a slot.
"""

from __future__ import annotations

import numpy as np

from streampack.plan.lane_ends import LaneEndFinder, packs_in, slots_in
from streampack.plan.lane_stream import is_used
from streampack.plan.pack_queues import PackQueues
from streampack.plan.slot_kernels import QUEUE, SUBSTITUTED
from streampack.plan.slots import NO_SLOTS
from streampack.plan.spans import RunPlan
from streampack.types import State

AHEAD = 4096  # maximum number of slots walked ahead, as long as no queue has to be planned for it


class SpanSlots:
    """The slots of a span, by its number, that are walked, and its end.

    It begins before `position`, where `skip_to` moves. With a balance, the packs of a global batch
    are needed together until its last step.

    Attributes:
        slots: Walked slots that are not yet recorded as delivered, shape (n, 4).
        first: Number of the first of these.
        num_walked: Slots that are walked.
        asked: Slots that were requested: whole global batches.
        total: Packs of the span, once known.
        num_slots: Slots of the span, including padding in its last global batch, once known.
        last_queue: Queue of the last slot that was walked.
        quiet_until: Slots that can be released before a snapshot changes.
        walk: The walk.
    """

    def __init__(self, run: RunPlan, number: int, position: int, queues: PackQueues) -> None:
        self._recipe = recipe = run.recipe(number)
        self._queues = queues
        self._is_dealt = run.view(number).balance is not None
        self._ends = LaneEndFinder(recipe, number)
        # Packs of queues that were extended.
        self._num_packs = np.zeros((recipe.num_lanes, recipe.num_queues), np.int64)
        self.slots = NO_SLOTS
        self.last_queue = self.quiet_until = 0
        self.total: int | None = None
        self.num_slots: int | None = None
        self._substituted = 0  # substitutions before `first`
        self._saved: list[State] = []
        self._own_lanes = run.lanes(number, position)
        if recipe.is_endless and (num_slots := run.num_slots(number)) is not None:
            self._set_total(num_slots)
        self.walk = run.walker(number, position, self._extend_queue)
        self.first = self.num_walked = self.asked = self._released = self.walk.slot
        queues.delivered[:] = self.walk.served // recipe.shapes.slots_per_pack
        self._open_queues()

    @property
    def substituted(self) -> int:
        """Slots so far that went to another stream because theirs was exhausted."""
        asked = self.slots[: self.asked - self.first, SUBSTITUTED]
        return self._substituted + int(asked.sum())

    @property
    def num_omitted(self) -> int:
        """Packs that epoch_end="drop" omits, over all ranks; 0 until the end is known."""
        if self.total is None or self._recipe.mixing.epoch_end != "drop":
            return 0
        served = self.walk.served.sum(axis=0)
        omitted = self.slots[self.total - self.first :, QUEUE]
        served -= np.bincount(omitted, minlength=len(served))
        packs = self._num_packs.sum(axis=0) - served // self._recipe.shapes.slots_per_pack
        return int(packs.sum())

    def _open_queues(self) -> None:
        """Create the pack queues of this device's lanes, and record their known packs."""
        recipe = self._recipe
        for lane in self._own_lanes:
            for queue in range(recipe.num_queues):
                if recipe.chapter is not None and not is_used(recipe, lane, queue):
                    continue
                pack_queue = self._queues.get(lane, queue)
                if not recipe.is_endless:
                    self.walk.known[lane, queue] = recipe.shapes.slots_of(
                        queue, pack_queue.num_known, is_all=pack_queue.is_complete
                    )

    def _extend_queue(self, lane: int, queue: int) -> None:
        """Plan a queue further if it is this device's, otherwise refine its bound."""
        walk = self.walk
        if lane in self._own_lanes:
            self.note_delivered()
            pack_queue = self._queues.extend(lane, queue)
            num_packs, is_all = pack_queue.num_known, pack_queue.is_complete
        else:
            num_packs, is_all = self._ends.refine(lane, queue)
        self._num_packs[lane, queue] = num_packs
        walk.known[lane, queue] = self._recipe.shapes.slots_of(queue, num_packs, is_all=is_all)
        walk.complete[lane, queue] = is_all

    def _set_total(self, num_packs: int) -> None:
        self.total = num_packs
        self.num_slots = slots_in(self._recipe, num_packs)

    def walk_to(self, slot: int) -> None:
        """Walk whole global batches until `slot` slots are known, or all lanes are dry."""
        size = self._recipe.global_batch_size
        while self.asked < slot and (self.total is None or self.asked < self.total):
            wanted = -(-slot // size) * size
            if wanted > self.num_walked:  # one batch at a time: each may be the last
                wanted = self.asked + size
            if wanted > self.num_walked:
                self._walk_on(wanted - self.num_walked)
            self.asked = min(wanted, self.num_walked)

    def _walk_on(self, num_slots: int) -> None:
        """Walk `num_slots` slots, and as many more as possible without planning queues."""
        walked = self.walk.next(num_slots)
        num_walked = self.num_walked + len(walked)
        if len(walked) < num_slots:
            self._set_total(packs_in(self._recipe, num_walked))
        room = AHEAD if self.total is None else max(self.total - num_walked, 0)
        ahead = self.walk.next(min(room, AHEAD), may_extend=False)
        self.note_delivered()
        self.slots = np.concatenate([self.slots, walked, ahead])
        self.num_walked = num_walked + len(ahead)
        if len(self.slots):
            self.last_queue = int(self.slots[-1, QUEUE])
        self.quiet_until = 0
        self._ends.look_ahead(self.walk.served)

    def edge(self, slot: int) -> int:
        """Return the slot before which everything is delivered once `slot` slots are.

        A padded global batch is not dealt.
        """
        is_dealt = self._is_dealt and not self.is_padded(slot)
        return slot - slot % self._recipe.global_batch_size if is_dealt else slot

    def is_padded(self, slot: int) -> bool:
        """Whether the global batch of a slot has fewer packs than slots."""
        size = self._recipe.global_batch_size
        return self.total is not None and slot // size * size + size > self.total

    def release(self, slot: int) -> None:
        """Mark the slots before `slot` as delivered, as far as nothing there is dealt later."""
        self._release(self.edge(slot))

    def _release(self, slot: int) -> None:
        # Packs omitted by epoch_end="drop" do not count as delivered.
        self._released = slot if self.total is None else min(slot, self.total)

    def note_delivered(self) -> None:
        """Tell the pack queues which slots are delivered, and drop these."""
        gone = self.slots[: self._released - self.first]
        if len(gone):
            self._queues.deliver(gone)
            self._substituted += int(gone[:, SUBSTITUTED].sum())
            self.slots = self.slots[len(gone) :]
            self.first = self._released

    def snapshots(self) -> list[State]:
        """Return the snapshots from which this device can plan the packs that come next."""
        if self._released >= self.quiet_until:  # one of them may have changed
            self.note_delivered()
            self._saved = self._queues.snapshots()
            self.quiet_until = self.first + self._queues.num_quiet(self.slots) + 1
        return self._saved

    def skip_to(self, position: int) -> None:
        """Walk all slots before `position`, one global batch at a time, and release them."""
        edge = self.edge(position)
        while self._released < edge:
            target = min(self._released + self._recipe.global_batch_size, edge)
            self.walk_to(target)
            reached = min(target, self.num_walked)
            if reached == self._released:
                break
            self._release(reached)
        if edge < position:  # inside a global batch: only its walk shows whether it is padded
            self.walk_to(position)
            self._release(min(self.edge(position), self.num_walked))

    def close(self) -> None:
        """Stop the thread that counts lane ends, if there is one."""
        self._ends.close()
