"""The canonical sequence of packs, and the part of it that one device gets.

::

    walk        slot q -> (lane, column, pack)           all slots, integers only
    columns     (lane, column, pack) -> segments         only the lanes that this device uses
    window      devices * batch_size slots = one step;   the device at place p takes the p-th batch

The sequence does not depend on the world; the world only selects which slots a device reads. The
ends of other devices' lanes are found by planning those lanes in a thread, once their end may be
near. Slots are walked and packs gathered for several batches together, as long as that plans
nothing early.

Cost: the pack queues, and a few us a batch. Memory: one chunk of segments a column, and a shuffle
block for each stream of each planned lane (16 bytes a sample, by default at most 262,144: 4 MiB).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from streampack.errors import ResumeError
from streampack.plan.lane_ends import LaneEndFinder, packs_in, slots_in
from streampack.plan.pack_queues import PackQueues
from streampack.plan.recipe import Recipe
from streampack.plan.shard_window import ShardDelta, ShardTracker
from streampack.plan.slots import ENDLESS, NO_SLOTS, PIECE, SUBSTITUTED, SlotWalker
from streampack.types import Int64Array, Packs, State

AHEAD = 4096  # maximum number of slots walked ahead, as long as no column has to be planned for it
TOGETHER = 512  # maximum number of packs gathered together, in whole batches


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """The part of the sequence that a device gets."""

    place: int = 0
    """Index of the device's batch within each window."""
    num_devices: int = 1
    """Number of device batches in a window."""
    batch_size: int = 1
    """Packs per device batch."""

    @property
    def window(self) -> int:
        """Packs that all devices take in one step."""
        return self.num_devices * self.batch_size

    def first_slot(self, position: int) -> int:
        """Return the first slot of this device's batch in the window that begins at `position`.

        The device at place p takes the batches k with k mod num_devices == p, wherever the window
        begins. It therefore keeps its lanes after a resume with another number of devices.

        >>> [DeviceView(place=p, num_devices=2, batch_size=4).first_slot(12) for p in (0, 1)]
        [16, 12]
        """
        turn = (self.place - position // self.batch_size) % self.num_devices
        return position + turn * self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DevicePlan:
    """The plan of one or more consecutive batches of a device."""

    packs: Packs
    """The packs, batch after batch. A padded last batch has fewer than num_rows packs, and is then
    the only batch."""
    num_rows: int
    """Packs per batch, including padding packs."""
    epoch: int
    positions: list[int]
    """For each batch: packs of the epoch delivered over all ranks after its step."""

    @property
    def num_batches(self) -> int:
        """Number of batches."""
        return len(self.positions)

    @property
    def position(self) -> int:
        """Packs of the epoch delivered over all ranks after the last of these steps."""
        return self.positions[-1]

    def part(self, first: int, last: int) -> DevicePlan:
        """Return the plan of batches [first, last)."""
        if first == 0 and last == len(self.positions):
            return self
        return DevicePlan(
            packs=self.packs.slice(first * self.num_rows, last * self.num_rows),
            num_rows=self.num_rows,
            epoch=self.epoch,
            positions=self.positions[first:last],
        )


def touched_lanes(recipe: Recipe, view: DeviceView, position: int = 0, before: int = 0) -> set[int]:
    """Return the lanes that a device's slots use from a position on, while no lane is dry.

    Args:
        recipe: Determines the sequence.
        view: The part of it that the device gets.
        position: Packs of the epoch before those slots.
        before: Slots of the run before the epoch, with carry.
    """
    lanes, run = recipe.num_lanes, recipe.lane_run
    # Batches begin at first + n * window. Only their offset within a cycle of lanes matters.
    first, spacing = before + view.first_slot(position), math.gcd(lanes * run, view.window)
    if spacing <= run:
        return set(range(lanes))
    return {
        number % lanes
        for start in range(first % spacing, lanes * run, spacing)
        for number in range(start // run, (start + view.batch_size - 1) // run + 1)
    }


def _expected_packs(recipe: Recipe) -> Int64Array:
    """Return the expected packs of each column in an epoch, shape (num_lanes, num_columns)."""
    per_lane = recipe.num_lanes * recipe.packing.max_seq_len
    if recipe.is_mixed:
        expected = [-(-recipe.chosen_tokens // per_lane)]
    else:
        expected = [-(-stream.chosen_tokens // per_lane) for stream in recipe.streams]
    return np.tile(np.array(expected, np.int64), (recipe.num_lanes, 1))


class EpochSequence:
    """One device's batches of one epoch, from a position on.

    Args:
        recipe: Determines the sequence.
        view: The part of it that this device gets.
        epoch: The epoch.
        position: Packs of the epoch delivered before, over all ranks.
        snapshots: The result of `snapshots` at that position. Without them the lanes are planned
            from the epoch's start.
    """

    def __init__(
        self,
        recipe: Recipe,
        view: DeviceView,
        *,
        epoch: int,
        position: int = 0,
        snapshots: list[State] | None = None,
    ) -> None:
        self._recipe = recipe
        self._view = view
        self._epoch = epoch
        self._at = position
        self._slots = NO_SLOTS  # walked slots that are not yet recorded as delivered
        self._first_slot = 0  # number of the first of these
        self._released = 0  # slots that are delivered
        self._asked = 0  # slots that were requested: whole global batches
        self._total: int | None = None  # packs of the epoch, once known
        self._substituted = 0  # substitutions before _first_slot
        self._gathered = Packs.none()  # packs of this device's batches from _gathered_from on
        self._gathered_from = 0
        self._quiet_until = 0  # slots that can be released before a snapshot changes
        self._saved: list[State] = []
        self._num_looked = -1  # num_changes when shards_ahead last compared
        self._ends = LaneEndFinder(recipe, epoch)
        self._watch = ShardTracker(recipe)
        self._is_carry = recipe.mixing.epoch_end == "carry"
        first_epoch = 0 if self._is_carry else epoch
        before = (epoch - first_epoch) * recipe.packs_per_carry_epoch
        self._own_lanes = touched_lanes(recipe, view, position, before)
        expected = _expected_packs(recipe)
        self._walk = SlotWalker(recipe, first_epoch, expected, self._learn)
        if self._is_carry:
            self._total = recipe.packs_per_carry_epoch
            self._walk_before(epoch, expected)
        counted = range(view.place, recipe.num_lanes, view.num_devices)
        served = self._walk.served
        self._columns = PackQueues(recipe, first_epoch, served, snapshots or [], counted)
        self._open_columns()
        self._pass_over(position)
        self._check_snapshots()

    @property
    def epoch(self) -> int:
        """The epoch."""
        return self._epoch

    @property
    def position(self) -> int:
        """Packs of the epoch before the next step, over all ranks."""
        return self._at

    @property
    def is_finished(self) -> bool:
        """Whether the epoch has no step after this position, in any process."""
        self._walk_to(self._at + 1)
        stop = self._end_of_epoch()
        return stop is not None and self._at >= stop

    @property
    def num_slots(self) -> int | None:
        """Slots of the epoch, including padding in its last global batch, once known."""
        return self._end_of_epoch()

    @property
    def substituted(self) -> int:
        """Slots of the epoch so far that went to another stream because theirs was exhausted."""
        if self._recipe.is_mixed:
            return 0
        asked = self._slots[: self._asked - self._first_slot, SUBSTITUTED]
        return self._substituted + int(asked.sum())

    @property
    def buffered_tokens(self) -> int:
        """The sum of the maximum number of tokens held by each packer of this device."""
        return self._columns.high_water_tokens

    @property
    def overlong(self) -> Int64Array:
        """Samples over max_seq_len seen since the epoch began, per stream.

        Each lane is counted by one device, although several devices may plan it.
        """
        return self._columns.overlong

    def next(self, most: int = 1, *, fetch: bool = True) -> DevicePlan | None:
        """Return the plan of this device's next batches, or None at the epoch's end.

        Args:
            most: Maximum number of batches. More than one is returned only if all of them are full
                and already planned, and no snapshot changes between them.
            fetch: False skips one batch: its plan has no packs.
        """
        view = self._view
        self._walk_to(self._at + view.window)
        stop = self._end_of_epoch()
        if stop is not None and self._at >= stop:
            return None
        packs, num_batches = self._packs(most) if fetch else (Packs.none(), 1)
        first, self._at = self._at, self._at + num_batches * view.window
        self._walk_to(self._at)  # these slots are known; this only marks them as requested
        self._release(self._at)
        begins = range(first, self._at, view.window)
        return DevicePlan(
            packs=packs,
            num_rows=view.batch_size,
            epoch=self._epoch,
            positions=[self._count(begin, begin + view.window) for begin in begins],
        )

    def _count(self, begin: int, end: int) -> int:
        """Return the position after the step of slots [begin, end).

        Padding packs do not advance the position, except in steps of padding alone. Those occur if
        a global batch takes several steps, and a resume must be able to tell them apart.
        """
        stop = self._end_of_epoch()
        if self._total is None or stop is None:
            return end
        return min(end, stop if begin >= self._total else self._total)

    def snapshots(self) -> list[State]:
        """Return the snapshots from which this device can plan the packs that come next."""
        self._look()
        return list(self._saved)

    def shards_ahead(self) -> ShardDelta | None:
        """Return the shards that this device's lanes need, and those finished since the last call.

        None if nothing changed. A shard counts as finished once the batches returned by `next` so
        far are delivered. Another device of the same lanes may need it slightly longer.
        """
        if self._is_carry and not self._watch.has_looked:
            # Lanes planned again from the run's start need no shards of what is already delivered.
            self._columns.know_passed()
            self._quiet_until = 0
        self._look()
        if self._num_looked == self._columns.num_changes:
            return None
        self._num_looked = self._columns.num_changes
        return self._watch.look(self._columns)

    def close(self) -> None:
        """Stop the thread that counts lane ends, if there is one."""
        self._ends.close()

    def _check_snapshots(self) -> None:
        """Reject snapshots taken after the position.

        Raises:
            ResumeError: If there is one. Names its lane.
        """
        self._note_passed()
        ahead = self._columns.first_ahead()
        if ahead is not None:
            lane, known, passed = ahead
            raise ResumeError(
                f"the state's snapshots of lane {lane} lie at pack {known}, but at position "
                f"{self._at} only {passed} are delivered; load the state unchanged, or take "
                "'snapshots' out of it: they are only a speed-up"
            )

    def _walk_before(self, epoch: int, expected: Int64Array) -> None:
        """Walk the epochs before this one (carry): lanes and shares continue where they stopped."""
        self._walk.known[:] = ENDLESS
        self._close_empty(self._walk)
        per_epoch = self._recipe.packs_per_carry_epoch
        if self._recipe.is_mixed:
            self._walk.skip(epoch * per_epoch)
            return
        for _ in range(epoch):
            left = per_epoch
            while left and (slots := len(self._walk.next(min(left, PIECE)))):
                left -= slots
            self._walk.expect(expected)

    def _close_empty(self, walk: SlotWalker) -> None:
        """Mark the columns of a carrying walk that are always empty."""
        recipe = self._recipe
        if not recipe.is_mixed:
            for column, stream in enumerate(recipe.streams):
                for lane in range(recipe.num_lanes):
                    if not stream.quota.amount or recipe.lane_stream(column, lane).is_empty:
                        walk.known[lane, column] = 0
                        walk.complete[lane, column] = 1

    def _open_columns(self) -> None:
        """Create the pack queues of this device's lanes, and record their known packs."""
        for lane in self._own_lanes:
            for column in range(self._recipe.num_columns):
                planner = self._columns.planner(lane, column)
                if not self._is_carry:
                    self._walk.known[lane, column] = planner.num_known

    def _learn(self, lane: int, column: int) -> None:
        """Learn more about a column: plan it if it is this device's, otherwise refine its bound."""
        walk = self._walk
        if lane in self._own_lanes:
            self._note_passed()
            planner = self._columns.extend(lane, column)
            walk.known[lane, column] = planner.num_known
            walk.complete[lane, column] = planner.is_complete
        else:
            num_packs, is_all = self._ends.learn(lane, column)
            walk.known[lane, column] = num_packs
            walk.complete[lane, column] = is_all

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
        """Walk `num_slots` slots, and as many more as possible without planning columns."""
        walked = self._walk.next(num_slots)
        num_walked = self._num_walked + len(walked)
        if len(walked) < num_slots:
            self._total = packs_in(self._recipe, num_walked)
        room = AHEAD if self._total is None else max(self._total - num_walked, 0)
        ahead = self._walk.next(min(room, AHEAD), may_learn=False)
        self._note_passed()
        self._slots = np.concatenate([self._slots, walked, ahead])
        self._quiet_until = 0
        self._ends.look_ahead(self._walk.served)

    def _end_of_epoch(self) -> int | None:
        """Return the slot at which this epoch's steps end, once known."""
        return None if self._total is None else slots_in(self._recipe, self._total)

    def _packs(self, most: int) -> tuple[Packs, int]:
        """Return the packs of the next batches, in order, and the number of batches."""
        view = self._view
        first, size = view.first_slot(self._at), view.batch_size
        if self._total is not None:
            size = min(size, self._total - first)
        if size <= 0:
            return Packs.none(), 1
        row = (first - self._gathered_from) // view.window * view.batch_size
        if row + size > len(self._gathered):
            self._gathered = self._columns.gather(self._own_slots(first), view.batch_size)
            self._gathered_from, row = first, 0
            self._quiet_until = 0
        num_batches = 1
        if most > 1 and size == view.batch_size:
            known = (len(self._gathered) - row) // size
            num_batches = min(most, known, 1 + self._num_alike())
        return self._gathered.slice(row, row + num_batches * size), num_batches

    def _num_alike(self) -> int:
        """Return how many batches after the next are full, walked, and change no snapshot."""
        end, size = self._at + self._view.window, self._recipe.global_batch_size
        self._release(end)
        self._look()
        stop = self._asked + (self._num_walked - self._asked) // size * size
        if self._total is not None:
            stop = min(stop, self._total)
        return max(0, min(stop, self._quiet_until - 1) - end) // self._view.window

    def _own_slots(self, first: int) -> Int64Array:
        """Return walked slots of this device's batches from `first` on, at least one batch."""
        view = self._view
        stop = self._num_walked if self._total is None else min(self._num_walked, self._total)
        num_batches = (stop - first - view.batch_size) // view.window + 1
        num_batches = max(1, min(num_batches, TOGETHER // view.batch_size))
        starts = first - self._first_slot + view.window * np.arange(num_batches)
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
            self._columns.pass_by(gone)
            self._substituted += int(gone[:, SUBSTITUTED].sum())
            self._slots = self._slots[len(gone) :]
            self._first_slot = self._released

    def _look(self) -> None:
        """Update the snapshots if one of them may have changed."""
        if self._released < self._quiet_until:
            return
        self._note_passed()
        self._saved = self._columns.snapshots()
        self._quiet_until = self._first_slot + self._columns.num_quiet(self._slots) + 1

    def _pass_over(self, position: int) -> None:
        """Move to `position`: walk all slots before it, one global batch at a time."""
        while self._released < position:
            target = min(self._released + self._recipe.global_batch_size, position)
            self._walk_to(target)
            reached = min(target, self._num_walked)
            if reached == self._released:
                break
            self._release(reached)
        if self._total is not None and position >= self._total:
            # Only padding is left: continue with the step after the one that held the last packs.
            self._at = -(-position // self._view.window) * self._view.window
