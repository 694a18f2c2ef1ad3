"""`PackedDataLoader`'s side of the planned way: plan here, read in a thread or stateless workers.

::

    num_workers=0    a thread plans and reads batches in groups     nothing is copied
                     (more threads: one plans at a time, all read;
                     the loop reads a group, too, where it would wait)

    num_workers=2    this process plans 0, 1, 2, ...                a few KB of integers a batch
                     worker 0 reads 0, 2, ...   worker 1 reads 1, 3, ...
                     this process makes batches of what they read: int32 in shared memory;
                     up to eight go there and back at a time

Workers hold no state, so it does not matter how many there are or which one fails; the state is
keyed to the batch last delivered, not to what was planned or read ahead.

Cost: planning about 0.4 us a sample; a hand-over of some batches 30 us from a thread, 200 us from a
worker.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from streampack.assemble import Batch
from streampack.config import Packing
from streampack.load.buffers import BYTES_PER_TOKEN, batches_ahead
from streampack.load.dataset import PackedStreamingDataset
from streampack.load.ending import ended_at_exit
from streampack.load.fetching import NO_FETCHES, ReadAhead
from streampack.load.groups import (
    ReadGroup,
    in_groups,
    most_together,
    read_group,
)
from streampack.load.handover import FoldingReader
from streampack.load.ring import Ring, RingReader
from streampack.load.tally import Tally
from streampack.load.workers import (
    ReadingWorkers,
    SharedMemory,
    WorkerOptions,
    check_socket_path,
    pin,
)
from streampack.plan import DevicePlan, EpochSequence, Progress
from streampack.read.prefetch import AT_HAND, work_ahead
from streampack.types import Int64Array, State

__all__ = ["PlannedLoading"]

# A hand-over costs as much for a small batch as for a large one, so several go together. A loop
# that waits for the first of them waits for all.
HANDOVER_TOKENS = 1 << 19
MOST_HANDED_OVER = 8

GROUPS_AT_HAND = 4  # that a thread plans before it reads one: planning comes in pieces of several


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Losses:
    """What is not delivered as it was chosen."""

    dropped: Int64Array
    """Samples left out, per stream, shape (num_streams,)."""
    substituted: int = 0
    """Slots that another stream served."""

    def __add__(self, other: _Losses) -> _Losses:
        return _Losses(
            dropped=self.dropped + other.dropped, substituted=self.substituted + other.substituted
        )

    @classmethod
    def none(cls, num_streams: int) -> _Losses:
        """Return no losses."""
        return cls(dropped=np.zeros(num_streams, np.int64))


@dataclass(slots=True, kw_only=True, eq=False)
class _Planned:
    """Batches that were planned together, and how many of them are delivered."""

    plan: DevicePlan
    snapshots: list[State]
    """After each of them."""
    losses: _Losses
    """Of this iteration so far."""
    packer_tokens: int
    """The most that the packers held so far."""
    finished: Int64Array | None
    """Rows (stream, shard) that are finished with the last of them."""
    num_delivered: int = 0
    num_counted: int = 0
    """Of those delivered, the ones that are in the tally."""

    @property
    def is_delivered(self) -> bool:
        """Whether all of them are delivered."""
        return self.num_delivered == self.plan.num_batches

    @property
    def progress(self) -> Progress:
        """Where the run stands after the one last delivered."""
        position = self.plan.positions[self.num_delivered - 1]
        return Progress(epoch=self.plan.epoch, position=position, snapshots=self.snapshots)

    def count(self, tally: Tally) -> None:
        """Count what is delivered and was not counted before."""
        packs, num_rows = self.plan.packs, self.plan.num_rows
        if self.num_counted < self.num_delivered:
            first, last = self.num_counted * num_rows, self.num_delivered * num_rows
            tally.add(packs.slice(first, min(last, len(packs))))
            self.num_counted = self.num_delivered


class _Plans:
    """The plans of one iteration, noted as they are asked for, and followed by the read-ahead."""

    def __init__(self, sequence: EpochSequence, packing: Packing, ahead: ReadAhead) -> None:
        self.sequence = sequence
        self.ahead = ahead
        self._drops = packing.overflow == "drop"
        # What the epoch had lost before this iteration, where it goes on from a state.
        self._before = _Losses(dropped=sequence.overlong, substituted=sequence.substituted)
        self._no_drops = np.zeros_like(self._before.dropped)
        self.waiting: deque[_Planned] = deque()
        self._num_asked, self._num_delivered = 0, 0
        self.most_waiting = 0
        """The most batches that were planned and not delivered."""

    def next(self, most: int) -> DevicePlan | None:
        """Return the plan of so many batches at most; None at the epoch's end."""
        sequence = self.sequence
        if not self._num_asked:
            self.ahead.look()  # not before: it starts threads, and by now the workers are forked
        plan = sequence.next(most)
        if plan is None:
            return None
        finished = self.ahead.look()
        losses = _Losses(
            dropped=self._dropped(),
            substituted=sequence.substituted - self._before.substituted,
        )
        self._num_asked += plan.num_batches
        self.most_waiting = max(self.most_waiting, self._num_asked - self._num_delivered)
        self.waiting.append(
            _Planned(
                plan=plan,
                snapshots=sequence.snapshots(),
                losses=losses,
                packer_tokens=sequence.buffered_tokens,
                finished=finished,
            )
        )
        return plan

    def one_by_one(self) -> Iterator[DevicePlan]:
        """Yield the plans of single batches."""
        while (plan := self.next(1)) is not None:
            yield plan

    def deliver(self) -> _Planned:
        """Note that one more batch is delivered; return those that were planned with it."""
        planned = self.waiting[0]
        planned.num_delivered += 1
        self._num_delivered += 1
        if planned.is_delivered:
            self.waiting.popleft()
        return planned

    def _dropped(self) -> Int64Array:
        if not self._drops:
            return self._no_drops
        return self.sequence.overlong - self._before.dropped


class PlannedLoading:
    """Iterates a `PackedStreamingDataset`; see `PackedDataLoader`.

    Args:
        dataset: What to iterate.
        options: How it is read.

    Raises:
        ConfigError: If `dataset.buffers` cannot hold one batch a worker, or shared memory cannot
            hold what the workers hand over.
    """

    def __init__(self, dataset: PackedStreamingDataset, options: WorkerOptions) -> None:
        num_workers = options.num_workers
        self.dataset = dataset
        self.num_workers = num_workers
        # Where there is no GPU there is nothing to pin for.
        self._pins = options.pin_memory and torch.cuda.is_available()
        self._read = dataset.reader(pinned=self._pins)
        self._num_threads = options.prefetch_threads
        at_once = self._at_once(num_workers)
        self._at_hand = AT_HAND if at_once == 1 else GROUPS_AT_HAND
        wanted = options.prefetch_factor
        if not num_workers:
            # What is at hand; and what threads and a loop that would wait make, and what is made.
            wanted = max(wanted, self._num_threads - 1 + 2 * self._at_hand)
        # Workers have read so much ahead, and more came over with the batch that is handed on.
        beside = 1 if num_workers else 0
        footprint = dataset.footprint(num_workers)
        ahead = batches_ahead(dataset.buffers, footprint, (wanted + beside) * at_once - beside)
        self._group = max(1, (ahead + beside) // (wanted + beside))
        self._ahead = min(ahead, wanted)
        self._workers: ReadingWorkers | None = None
        self._tally = Tally(dataset.recipe)
        # Where the run stands, and what was lost and held, but for what `_last` says.
        self._progress: Progress | None = None
        self._losses = _Losses.none(len(dataset.stream_names))
        self._packer_tokens = 0
        self._most_waiting = 0
        self._plans: _Plans | None = None  # of the iteration under way
        self._last: _Planned | None = None  # what the batch last delivered was planned with
        self._is_asked = False  # for an iteration, of which no batch was taken yet
        # Before the iteration under way.
        self._fetched: dict[str, Any] = dict.fromkeys(NO_FETCHES, 0)
        self._read_ahead: ReadAhead | None = None
        self._first_fetched = 0  # of those that the dataset fetched for lengths
        dataset.fetcher(num_workers)  # refuses a cache limit that is too small
        self._options = replace(options, prefetch_factor=self._ahead, pin_memory=False)
        if num_workers:
            self._make_workers()

    def _make_workers(self) -> None:
        self._handing = self._choose_handing(self.num_workers)
        self._workers = ReadingWorkers(self._handing, self._options, at_once=self._group)

    def _at_once(self, num_workers: int) -> int:
        """Return how many batches are read or handed over at a time, if there is room for them."""
        dataset, read = self.dataset, self._read
        batch_tokens = dataset.footprint().batch_tokens
        # What a limited cache must hold counts on little being planned ahead.
        if dataset.buffers.cache_limit is not None:
            return 1
        if not num_workers:
            return most_together(read, batch_tokens) if self._num_threads else 1
        fitting = HANDOVER_TOKENS // batch_tokens if read.is_light else 1
        return min(max(1, fitting), MOST_HANDED_OVER)

    def _choose_handing(self, num_workers: int) -> RingReader | FoldingReader:
        """Return what workers run and how their batches come over; refuse what has no room."""
        dataset, world, read = self.dataset, self.dataset.world, self._read
        batch_tokens = dataset.footprint().batch_tokens
        each = Ring.bytes_per_token(read) if read.is_light else BYTES_PER_TOKEN + 1
        # What workers have read ahead, as many more that are being handed on, and as many to spare.
        num_groups = num_workers * self._ahead + 2
        room = SharedMemory.asked(num_workers, world.num_local_ranks)
        while self._group > 1 and not room.has(2 * num_groups * self._group * batch_tokens * each):
            self._group //= 2  # half of it is left to others
        num_slots = num_groups * self._group
        room.check(num_slots * batch_tokens * each)
        check_socket_path(tempfile.gettempdir())
        if not read.is_light:
            # A worker has no GPU to pin for.
            return FoldingReader(reader=dataset.reader())
        return RingReader(reader=read, ring=Ring(num_slots, read, dataset.batch_size))

    def __len__(self) -> int:
        """Return the batches of this rank in a whole epoch: the one under way, or the next."""
        progress = self._reached
        return len(self.dataset) if progress is None else self.dataset.num_batches(progress.epoch)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no iteration under way, and workers of its own.
        kept = {"_fetched": self._fetched_ahead(), "_read_ahead": None, "_plans": None}
        return self.__dict__ | kept | {"_workers": None, "_handing": None}

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next epoch, or go on from the state that was loaded, at the first batch."""
        self._is_asked = True
        return ended_at_exit(self._deliver())

    def _begin(self) -> _Plans:
        if self.num_workers and not (self._workers and self._workers.are_of_this_process):
            self._make_workers()  # those before the fork, and what they write to, are the parent's
        self._settle()
        num_fetched = len(self.dataset.fetched_for_lengths)
        sequence = self.dataset.begin()
        recipe = self.dataset.recipe
        if self._progress is None:
            self._tally = Tally(recipe)
            self._losses = _Losses.none(len(recipe.streams))
            self._fetched = dict.fromkeys(NO_FETCHES, 0)
            self._first_fetched = num_fetched
        else:
            self._fetched = self._fetched_ahead()
        self._progress = Progress(epoch=sequence.epoch, position=sequence.position)
        self._read_ahead = ReadAhead(self.dataset.fetcher(self.num_workers), sequence)
        self._plans = _Plans(sequence, recipe.packing, self._read_ahead)
        self._is_asked = False
        return self._plans

    def _deliver(self) -> Generator[Batch, None, None]:
        # Here and not in iter(), which trainers call to see whether they can, and forget.
        plans = self._begin()
        tally = self._tally
        sequence = plans.sequence
        try:
            # No zip, no enumerate: they hold on to a batch until the next is there.
            for batch in self._batches(plans):
                planned = plans.deliver()
                # Where a later iteration has begun, or a state was loaded, those tell the place.
                if plans is self._plans:
                    self._last = planned
                    self._is_asked = False
                yield batch
                del batch
                if planned.is_delivered:
                    planned.count(tally)
                    plans.ahead.finish(planned.finished)
                plans.ahead.check()
            if plans is self._plans:
                rolls_on = self.dataset.recipe.mixing.epoch_end == "carry"
                snapshots = sequence.snapshots() if rolls_on else []
                self._settle()
                self._progress = Progress(epoch=sequence.epoch + 1, snapshots=snapshots)
        finally:
            plans.ahead.close()
            sequence.close()

    def _batches(self, plans: _Plans) -> Iterator[Batch]:
        if self._workers is not None:
            return self._from_workers(plans, self._workers)
        groups = in_groups(plans.next, self._group, plans.ahead)
        made: Iterator[ReadGroup] = map(self._read_group, groups)
        if self._num_threads:
            depth, num_threads = self._ahead, self._num_threads
            made = work_ahead(groups, self._read_group, depth, num_threads, self._at_hand)
        return chain.from_iterable(made)

    def _read_group(self, plan: DevicePlan) -> ReadGroup:
        group = read_group(self._read, plan)
        if self._pins:
            group.batches = deque(pin(batch) for batch in group.batches)
        return group

    def _from_workers(self, plans: _Plans, workers: ReadingWorkers) -> Iterator[Batch]:
        handing = self._handing
        for got in workers.results(handing.tasks(plans.one_by_one())):
            batch = handing.finish(plans.waiting[0].plan, got)
            yield pin(batch) if self._pins else batch
            del batch

    @property
    def _reached(self) -> Progress | None:
        """Where the run stands; None where it has not begun."""
        return self._last.progress if self._last is not None else self._progress

    def _totals(self) -> tuple[int, _Losses, int]:
        """Count what is delivered; return the most that waited, all losses, what packers held."""
        plans, last = self._plans, self._last
        most_waiting, losses, packers = self._most_waiting, self._losses, self._packer_tokens
        if plans is not None:
            most_waiting = max(most_waiting, plans.most_waiting)
        if last is not None:
            last.count(self._tally)
            losses, packers = losses + last.losses, max(packers, last.packer_tokens)
        return most_waiting, losses, packers

    def _settle(self) -> None:
        """Add the iteration that comes to its end to those before."""
        self._most_waiting, self._losses, self._packer_tokens = self._totals()
        self._progress = self._reached
        self._plans = self._last = None

    def state_dict(self) -> State:
        """Return where the run stands after the batch last delivered, as JSON."""
        progress = self._reached
        if progress is None:
            return self.dataset.state_dict()
        return self.dataset.state_at(self.dataset.next_start if self._is_asked else progress)

    def load_state_dict(self, state: State) -> None:
        """Go on from `state` at the next iteration.

        Raises:
            ResumeError: If it belongs to another sequence; the difference is named.
        """
        self.dataset.load_state_dict(state)
        self._settle()
        self._progress = None

    def stats(self) -> dict[str, Any]:
        """Return what this rank delivered since the loader was made or a state was loaded.

        Per stream: samples and tokens delivered, split, truncated, dropped, shares and target; and
        packs, tokens, fill, slots served by another stream, high-water marks of the buffers, and
        shards: fetched by this process (ahead of their need or for lengths), with their bytes;
        waited for, and how long; the most bytes of shards that were here ahead of their end.
        Dropped samples are counted as they are met, up to a chunk of 4,096 samples ahead, and each
        by one rank; slots that another stream served as far ahead as is read at once.
        """
        most_waiting, losses, packers = self._totals()
        # torch asks for one more plan before it hands a batch over.
        most_waiting = max(most_waiting - (self.num_workers > 0), 0)
        batch_tokens = self.dataset.footprint().batch_tokens
        waiting = most_waiting * batch_tokens
        per_worker = -(-most_waiting // max(self.num_workers, 1)) * batch_tokens
        return self._tally.stats(losses.dropped.tolist()) | {
            "substituted": losses.substituted,
            "shards": self._shards(),
            "buffers": {
                "worker_tokens": per_worker + (0 if self.num_workers else packers),
                "worker_bytes": per_worker * BYTES_PER_TOKEN,
                "rank_tokens": waiting + packers,
            },
        }

    def _shards(self) -> dict[str, Any]:
        """Return what was fetched, ahead of its need and for lengths."""
        counts = self._fetched_ahead()
        for_lengths = self.dataset.fetched_for_lengths[self._first_fetched :]
        counts["fetched"] += len(for_lengths)
        counts["fetched_bytes"] += sum(for_lengths)
        return counts

    def _fetched_ahead(self) -> dict[str, Any]:
        """Return what was fetched ahead before, and in the iteration under way."""
        before, now = self._fetched, self._read_ahead.stats() if self._read_ahead else {}
        counts = {key: value + now.get(key, 0) for key, value in before.items()}
        return counts | {"ahead_bytes": max(before["ahead_bytes"], now.get("ahead_bytes", 0))}
