"""The canonical sequence of packs, and the part of it that one device gets.

::

    walk        slot q -> (lane, column, pack)           all slots, integers only
    columns     (lane, column, pack) -> segments         only the lanes that this device touches
    window      devices * batch_size slots = one step;   the device at place p takes the p-th batch

Nothing in the sequence depends on the world: a world only chooses which slots it reads. Where other
lanes end is found by planning them, in a thread, once they could be near their end. Slots are
walked, and packs taken, for several batches at once where that plans nothing before its time.

Cost: the planners', and a few us a batch. Memory: a chunk of segments a column, and a shuffle block
(16 bytes a sample, at most 262,144 by default: 4 MiB) for each stream of each lane that is planned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from streampack.errors import ResumeError
from streampack.plan.ahead import ShardNeeds, ShardWatch
from streampack.plan.columns import Columns
from streampack.plan.ends import ColumnEnds, packs_in, slots_in
from streampack.plan.recipe import Recipe
from streampack.plan.walk import ENDLESS, NO_SLOTS, PIECE, SUBSTITUTED, Walk
from streampack.types import Int64Array, Packs, State

__all__ = ["DevicePlan", "DeviceView", "EpochSequence", "touched_lanes"]

AHEAD = 4096  # slots that are walked ahead at most, where nothing has to be learnt for them
TOGETHER = 512  # packs, at most, that are taken at once where a batch has fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """Which part of the sequence a device gets."""

    place: int = 0
    """Which device batch of every window."""
    num_devices: int = 1
    """Device batches in a window."""
    batch_size: int = 1
    """Packs in a device batch."""

    @property
    def window(self) -> int:
        """Packs that all devices take in one step."""
        return self.num_devices * self.batch_size

    def first_slot(self, position: int) -> int:
        """Return the first slot of this device's batch in the window that begins at `position`.

        The device at place p takes the batches k with k mod num_devices == p, wherever the window
        begins: so it keeps its lanes after a resume into another number of devices.

        >>> [DeviceView(place=p, num_devices=2, batch_size=4).first_slot(12) for p in (0, 1)]
        [16, 12]
        """
        turn = (self.place - position // self.batch_size) % self.num_devices
        return position + turn * self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DevicePlan:
    """The plan of a device's next batch, or of several."""

    packs: Packs
    """What lies in their packs, batch after batch; fewer than num_rows each at a padded end, and
    then of one batch."""
    num_rows: int
    """Packs in each batch, padding packs included."""
    epoch: int
    positions: list[int]
    """Of each batch: packs of the epoch delivered over all ranks once its step is done."""

    @property
    def num_batches(self) -> int:
        """How many batches these are."""
        return len(self.positions)

    @property
    def position(self) -> int:
        """Packs of the epoch delivered over all ranks once all of these steps are done."""
        return self.positions[-1]

    def part(self, first: int, last: int) -> DevicePlan:
        """Return the plan of batches `first` to `last` - 1 of these."""
        if first == 0 and last == len(self.positions):
            return self
        return DevicePlan(
            packs=self.packs.slice(first * self.num_rows, last * self.num_rows),
            num_rows=self.num_rows,
            epoch=self.epoch,
            positions=self.positions[first:last],
        )


def touched_lanes(recipe: Recipe, view: DeviceView, position: int = 0) -> set[int]:
    """Return the lanes of a device's slots from a position on, while no lane is dry."""
    lanes, run = recipe.num_lanes, recipe.lane_run
    # Its batches begin at first + n * window, and what counts is where that is in a cycle of lanes.
    first, spacing = view.first_slot(position), math.gcd(lanes * run, view.window)
    if spacing <= run:
        return set(range(lanes))
    return {
        number % lanes
        for start in range(first % spacing, lanes * run, spacing)
        for number in range(start // run, (start + view.batch_size - 1) // run + 1)
    }


def _expected_packs(recipe: Recipe) -> Int64Array:
    """Return the packs that each column should have in an epoch, shape (num_lanes, num_columns)."""
    per_lane = recipe.num_lanes * recipe.packing.max_seq_len
    if recipe.is_mixed:
        expected = [-(-recipe.chosen_tokens // per_lane)]
    else:
        expected = [-(-stream.chosen_tokens // per_lane) for stream in recipe.streams]
    return np.tile(np.array(expected, np.int64), (recipe.num_lanes, 1))


class EpochSequence:
    """One device's batches of one epoch, from a position on.

    Args:
        recipe: What the sequence is a function of.
        view: Which part of it this device gets.
        epoch: Which epoch.
        position: Packs of the epoch that were delivered before, over all ranks.
        snapshots: What `snapshots` returned at that position, or nothing: then the lanes are
            planned again from the epoch's start.
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
        self._slots = NO_SLOTS  # of those walked, the ones whose passing is not noted yet
        self._first_slot = 0  # of these
        self._released = 0  # slots that are passed
        self._asked = 0  # slots that had to be walked: whole global batches
        self._total: int | None = None  # packs of the epoch, once they are known
        self._substituted = 0  # before the first slot
        self._gathered = Packs.none()  # of this device's batches from a slot on
        self._gathered_from = 0
        self._quiet_until = 0  # slots that may be released before any snapshot changes
        self._saved: list[State] = []
        self._num_looked = -1  # changes of the columns when shards were looked at
        self._ends = ColumnEnds(recipe, epoch)
        self._watch = ShardWatch(recipe)
        self._is_carry = recipe.mixing.epoch_end == "carry"
        self._own_lanes = touched_lanes(recipe, view, position)
        expected = _expected_packs(recipe)
        served = np.zeros_like(expected)
        if self._is_carry:
            self._total = recipe.packs_per_carry_epoch
            served = self._packs_before(epoch, expected)
        first_epoch = 0 if self._is_carry else epoch
        counted = range(view.place, recipe.num_lanes, view.num_devices)
        self._columns = Columns(recipe, first_epoch, served, snapshots or [], counted)
        self._walk = Walk(recipe, epoch, served, expected, self._learn)
        self._open_columns()
        self._pass_over(position)
        self._check_snapshots()

    @property
    def epoch(self) -> int:
        """Which epoch this is."""
        return self._epoch

    @property
    def position(self) -> int:
        """Packs of the epoch that lie before the next step, over all ranks."""
        return self._at

    @property
    def is_finished(self) -> bool:
        """Whether the epoch has no step after this position, in any process."""
        self._walk_to(self._at + 1)
        stop = self._end_of_epoch()
        return stop is not None and self._at >= stop

    @property
    def num_slots(self) -> int | None:
        """Slots of the epoch, the padding of its last global batch included, once it is known."""
        return self._end_of_epoch()

    @property
    def substituted(self) -> int:
        """Slots of the epoch so far that another stream served, because theirs had run out."""
        if self._recipe.is_mixed:
            return 0
        asked = self._slots[: self._asked - self._first_slot, SUBSTITUTED]
        return self._substituted + int(asked.sum())

    @property
    def buffered_tokens(self) -> int:
        """The sum of the most tokens that each packer of this device ever held."""
        return self._columns.high_water_tokens

    @property
    def overlong(self) -> Int64Array:
        """Samples over max_seq_len met since the epoch began, per stream.

        Each lane's are counted by one device, though several may plan it.
        """
        return self._columns.overlong

    def next(self, most: int = 1, *, fetch: bool = True) -> DevicePlan | None:
        """Return the plan of this device's next batches; None at the epoch's end.

        Args:
            most: Batches, at most. One comes, and more where all of them are full and planned
                already, and `snapshots` stays the same after each.
            fetch: False passes one batch over: it comes back with no packs.
        """
        view = self._view
        self._walk_to(self._at + view.window)
        stop = self._end_of_epoch()
        if stop is not None and self._at >= stop:
            return None
        packs, num_batches = self._packs(most) if fetch else (Packs.none(), 1)
        first, self._at = self._at, self._at + num_batches * view.window
        self._walk_to(self._at)  # these are known: they count as asked for
        self._release(self._at)
        begins = range(first, self._at, view.window)
        return DevicePlan(
            packs=packs,
            num_rows=view.batch_size,
            epoch=self._epoch,
            positions=[self._count(begin, begin + view.window) for begin in begins],
        )

    def _count(self, begin: int, end: int) -> int:
        """Return the position after the step of slots `begin` to `end` - 1.

        Padding packs have no position, but for steps of nothing else, which follow where a global
        batch takes several steps: these must be told apart to go on after any of them.
        """
        stop = self._end_of_epoch()
        if self._total is None or stop is None:
            return end
        return min(end, stop if begin >= self._total else self._total)

    def snapshots(self) -> list[State]:
        """Return where each planner of this device can go on from for what comes next."""
        self._look()
        return list(self._saved)

    def shards_ahead(self) -> ShardNeeds | None:
        """Return which shards this device's lanes need, and which they have finished since asked.

        None where nothing changed. What is finished is so once the batches are delivered that
        `next` returned up to now; another device of these lanes may need it a little longer.
        """
        if self._is_carry and not self._watch.has_looked:
            # Lanes that are planned again from the run's start need nothing of what lies behind.
            self._columns.know_passed()
            self._quiet_until = 0
        self._look()
        if self._num_looked == self._columns.num_changes:
            return None
        self._num_looked = self._columns.num_changes
        return self._watch.look(self._columns)

    def close(self) -> None:
        """End the thread that looks for lane ends, if there is one."""
        self._ends.close()

    def _check_snapshots(self) -> None:
        """Refuse snapshots that were taken later than the position.

        Raises:
            ResumeError: Naming the lane.
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

    def _packs_before(self, epoch: int, expected: Int64Array) -> Int64Array:
        """Return the packs that epochs before this one took of each column (carry)."""
        served = np.zeros_like(expected)
        # Where packs mix streams nothing is scheduled, so every epoch takes the same of each lane.
        is_same = self._recipe.is_mixed
        for earlier in range(min(epoch, 1) if is_same else epoch):
            walk = Walk(self._recipe, earlier, served, expected, self._learn)
            walk.known[:] = ENDLESS
            self._close_empty(walk)
            left = self._recipe.packs_per_carry_epoch
            while left and (slots := len(walk.next(min(left, PIECE)))):
                left -= slots
            served = walk.served
        return served * epoch if is_same else served

    def _close_empty(self, walk: Walk) -> None:
        """Tell a carrying walk which columns hold nothing, ever."""
        recipe = self._recipe
        if not recipe.is_mixed:
            for column, stream in enumerate(recipe.streams):
                for lane in range(recipe.num_lanes):
                    if not stream.quota.amount or recipe.lane_stream(column, lane).is_empty:
                        walk.known[lane, column] = 0
                        walk.complete[lane, column] = 1

    def _open_columns(self) -> None:
        """Make the planners of this device's lanes, and say what is known of the others."""
        if self._is_carry:
            self._walk.known[:] = ENDLESS
            self._close_empty(self._walk)
        for lane in self._own_lanes:
            for column in range(self._recipe.num_columns):
                planner = self._columns.planner(lane, column)
                if not self._is_carry:
                    self._walk.known[lane, column] = planner.num_known

    def _learn(self, lane: int, column: int) -> None:
        """Know more of a column: plan it, or bound it, or look for its end."""
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
        """Walk whole global batches until `slot` slots of the epoch are known, or all lanes dry."""
        size = self._recipe.global_batch_size
        while self._asked < slot and (self._total is None or self._asked < self._total):
            wanted = -(-slot // size) * size
            if wanted > self._num_walked:  # one after the other: each may be the last
                wanted = self._asked + size
            if wanted > self._num_walked:
                self._walk_on(wanted - self._num_walked)
            self._asked = min(wanted, self._num_walked)

    def _walk_on(self, num_slots: int) -> None:
        """Walk some slots further, and as many more as can be without learning more."""
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
        """Return the slot at which this epoch's steps end, once it is known."""
        return None if self._total is None else slots_in(self._recipe, self._total)

    def _packs(self, most: int) -> tuple[Packs, int]:
        """Return the packs of the next batches, in order, and of how many batches they are."""
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
        """Return the walked slots of this device's batches from `first` on, one batch at least."""
        view = self._view
        stop = self._num_walked if self._total is None else min(self._num_walked, self._total)
        num_batches = (stop - first - view.batch_size) // view.window + 1
        num_batches = max(1, min(num_batches, TOGETHER // view.batch_size))
        starts = first - self._first_slot + view.window * np.arange(num_batches)
        rows = (starts[:, None] + np.arange(view.batch_size)).ravel()
        slots: Int64Array = self._slots[rows[rows < stop - self._first_slot]]
        return slots

    def _release(self, slot: int) -> None:
        """Forget the slots before `slot` and their packs."""
        # Packs that epoch_end="drop" leaves out are not passed.
        self._released = slot if self._total is None else min(slot, self._total)

    def _note_passed(self) -> None:
        """Tell the columns what is released."""
        gone = self._slots[: self._released - self._first_slot]
        if len(gone):
            self._columns.pass_by(gone)
            self._substituted += int(gone[:, SUBSTITUTED].sum())
            self._slots = self._slots[len(gone) :]
            self._first_slot = self._released

    def _look(self) -> None:
        """Bring the snapshots up to date."""
        if self._released < self._quiet_until:
            return
        self._note_passed()
        self._saved = self._columns.snapshots()
        self._quiet_until = self._first_slot + self._columns.num_quiet(self._slots) + 1

    def _pass_over(self, position: int) -> None:
        """Go to `position`: walk what lies before it, a global batch at a time."""
        while self._released < position:
            target = min(self._released + self._recipe.global_batch_size, position)
            self._walk_to(target)
            reached = min(target, self._num_walked)
            if reached == self._released:
                break
            self._release(reached)
        if self._total is not None and position >= self._total:
            # Only padding is left: go on with the step after the one that held the last packs.
            self._at = -(-position // self._view.window) * self._view.window
