"""`PackedDataLoader` for planned datasets: plan here, read in threads or stateless workers.

::

    num_workers=0    a thread plans and reads batches in groups     nothing is copied
                     (several threads: one plans at a time, all read;
                     a loop that would block reads a group too)

    num_workers=2    this process plans 0, 1, 2, ...                a few KB of integers per batch
                     worker 0 reads 0, 2, ...   worker 1 reads 1, 3, ...
                     this process makes batches from their rows: int32 in shared memory;
                     up to eight are transferred together

Workers are stateless, so neither their number nor a failure affects the batches. The state refers
to the batch last delivered, not to planned or prefetched ones.

Cost: planning about 0.4 us per sample; a transfer of several batches 30 us from a thread, 200 us
from a worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from streampack.batch.batch import Batch
from streampack.config import Packing
from streampack.plan import DevicePlan, EpochSequence, Progress
from streampack.planned.batch_groups import ReadGroup, in_groups, most_together, read_group
from streampack.planned.cache_budget import NO_FETCHES, ReadAhead
from streampack.planned.dataset import PackedStreamingDataset
from streampack.runtime.at_exit import close_at_exit
from streampack.runtime.flat_batch import WholeReader
from streampack.runtime.memory_budget import BYTES_PER_TOKEN, max_prefetch
from streampack.runtime.reading_workers import Reads, SharedMemory, pin, task_groups
from streampack.runtime.shared_ring import Ring, RingReader
from streampack.runtime.stats import DeliveryStats
from streampack.runtime.thread_map import AT_HAND, ordered_thread_map
from streampack.runtime.worker_pool import Pool, WorkerOptions
from streampack.types import Int64Array, State

# A transfer costs as much for a small batch as for a large one, so several are sent together. A
# loop that waits for the first of them waits for all.
HANDOVER_TOKENS = 1 << 19
MOST_HANDED_OVER = 8

GROUPS_AT_HAND = 4  # groups planned before one is read: planning yields several at a time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Losses:
    """Samples dropped and slots substituted."""

    dropped: Int64Array
    """Dropped samples per stream, shape (num_streams,)."""
    substituted: int = 0
    """Slots that another stream served."""

    def __add__(self, other: _Losses) -> _Losses:
        return _Losses(
            dropped=self.dropped + other.dropped, substituted=self.substituted + other.substituted
        )

    @classmethod
    def none(cls, num_streams: int) -> _Losses:
        """Return zero losses."""
        return cls(dropped=np.zeros(num_streams, np.int64))


@dataclass(slots=True, kw_only=True, eq=False)
class _Planned:
    """Batches that were planned together."""

    plan: DevicePlan
    snapshots: list[State]
    """Progress after each batch."""
    losses: _Losses
    """Losses of this iteration so far."""
    packer_tokens: int
    """High-water mark of the packers' buffers so far."""
    finished: Int64Array | None
    """Rows (stream, shard) that are finished with the last batch."""
    num_counted: int = 0
    """Number of delivered batches already counted in the statistics."""

    def count(self, num_delivered: int, tally: DeliveryStats) -> None:
        """Count delivered batches that were not counted before."""
        packs, num_rows = self.plan.packs, self.plan.num_rows
        if self.num_counted < num_delivered:
            first, last = self.num_counted * num_rows, num_delivered * num_rows
            tally.add(packs.slice(first, min(last, len(packs))))
            self.num_counted = num_delivered


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Delivered:
    """The batch last delivered, as part of a planned group."""

    planned: _Planned
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


class _Plans:
    """The plans of one iteration, recorded as they are requested, and followed by the prefetch."""

    def __init__(self, sequence: EpochSequence, packing: Packing, ahead: ReadAhead) -> None:
        self.sequence = sequence
        self.ahead = ahead
        self._drops = packing.overflow == "drop"
        # Losses of the epoch before this iteration, if it resumes from a state.
        self._before = _Losses(dropped=sequence.overlong, substituted=sequence.substituted)
        self._no_drops = np.zeros_like(self._before.dropped)
        self.waiting: deque[_Planned] = deque()
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

    def deliver(self) -> _Delivered:
        """Record the delivery of one more batch."""
        self._num_of_first += 1
        self._num_delivered += 1
        delivered = _Delivered(planned=self.waiting[0], number=self._num_of_first)
        if delivered.is_last:
            self.waiting.popleft()
            self._num_of_first = 0
        return delivered

    def _dropped(self) -> Int64Array:
        if not self._drops:
            return self._no_drops
        return self.sequence.overlong - self._before.dropped


class PlannedLoading:
    """Iterates over a `PackedStreamingDataset`; see `PackedDataLoader`.

    Args:
        dataset: The dataset.
        options: Options of prefetching and workers.

    Raises:
        ConfigError: If `dataset.buffers` cannot hold one batch per worker, or shared memory cannot
            hold the workers' output.
    """

    def __init__(self, dataset: PackedStreamingDataset, options: WorkerOptions) -> None:
        num_workers = options.num_workers
        self.dataset = dataset
        self.num_workers = num_workers
        # Without a GPU, there is nothing to pin for.
        self._pins = options.pin_memory and torch.cuda.is_available()
        self._read = dataset.reader(pinned=self._pins)
        self._num_threads = options.prefetch_threads
        at_once = self._at_once(num_workers)
        self._at_hand = AT_HAND if at_once == 1 else GROUPS_AT_HAND
        wanted = options.prefetch_factor
        if not num_workers:
            # Queued groups; one in each thread and in a blocked loop; and the one delivered.
            wanted = max(wanted, self._num_threads - 1 + 2 * self._at_hand)
        # Workers hold this many prefetched batches; others arrived with the one being delivered.
        beside = 1 if num_workers else 0
        footprint = dataset.footprint(num_workers)
        ahead = max_prefetch(dataset.buffers, footprint, (wanted + beside) * at_once - beside)
        self._group = max(1, (ahead + beside) // (wanted + beside))
        self._ahead = min(ahead, wanted)
        self._workers: Pool | None = None
        self._tally = DeliveryStats(dataset.recipe)
        self._is_new = True  # made, or given a state, and no batch delivered since
        # Losses and high-water marks, without those of `_last`.
        self._losses = _Losses.none(len(dataset.stream_names))
        self._packer_tokens = 0
        self._most_waiting = 0
        self._plans: _Plans | None = None  # of the current iteration
        self._last: _Delivered | None = None  # the batch last delivered
        # Before the current iteration.
        self._fetched: dict[str, Any] = dict.fromkeys(NO_FETCHES, 0)
        self._read_ahead: ReadAhead | None = None
        self._first_fetched = 0  # index of the first shard that the dataset fetched for lengths
        dataset.fetcher(num_workers)  # refuses a cache limit that is too small
        self._options = replace(options, prefetch_factor=self._ahead, pin_memory=False)
        if num_workers:
            self._make_workers()

    def _make_workers(self) -> None:
        self._handing = self._choose_handing(self.num_workers)
        self._workers = Pool(Reads(self._handing), self._options)

    def _at_once(self, num_workers: int) -> int:
        """Return how many batches are read or transferred together, if there is room for them."""
        dataset, read = self.dataset, self._read
        batch_tokens = dataset.footprint().batch_tokens
        # The size of a limited cache assumes that little is planned ahead.
        if dataset.buffers.cache_limit is not None:
            return 1
        if not num_workers:
            return most_together(read, batch_tokens) if self._num_threads else 1
        fitting = HANDOVER_TOKENS // batch_tokens if read.is_cheap else 1
        return min(max(1, fitting), MOST_HANDED_OVER)

    def _choose_handing(self, num_workers: int) -> RingReader | WholeReader:
        """Return the workers' function and result reader; refuse a ring without room."""
        dataset, read = self.dataset, self._read
        if not read.is_cheap:
            # A worker has no GPU to pin for.
            return WholeReader(reader=dataset.reader())
        slot_bytes = dataset.footprint().batch_tokens * Ring.bytes_per_token(read)
        # Groups prefetched by workers, plus two: one being delivered and one spare.
        num_groups = num_workers * self._ahead + 2
        room = SharedMemory.asked(dataset.world.num_local_ranks)
        while self._group > 1 and not room.has(2 * num_groups * self._group * slot_bytes):
            self._group //= 2  # leave half of it to others
        num_slots = num_groups * self._group
        room.check(num_slots * slot_bytes)
        return RingReader(reader=read, ring=Ring(num_slots, read, dataset.batch_size))

    def __len__(self) -> int:
        """Return the number of batches of this rank in the current epoch, or else the next."""
        return len(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no current iteration, and its own workers.
        kept = {"_fetched": self._fetched_ahead(), "_read_ahead": None, "_plans": None}
        return self.__dict__ | kept | {"_workers": None, "_handing": None}

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next epoch, or resume from a loaded state, at the first batch."""
        self.dataset.ask()
        return close_at_exit(self._deliver())

    def _begin(self, sequence: EpochSequence, num_fetched: int) -> _Plans:
        """Record the beginning of an iteration.

        Args:
            sequence: The sequence that it delivers.
            num_fetched: Shards that the dataset had fetched for lengths before it.
        """
        self._settle()
        recipe = self.dataset.recipe
        if self._is_new:
            self._tally = DeliveryStats(recipe)
            self._losses = _Losses.none(len(recipe.streams))
            self._fetched = dict.fromkeys(NO_FETCHES, 0)
            self._first_fetched = num_fetched
        else:
            self._fetched = self._fetched_ahead()
        self._read_ahead = ReadAhead(self.dataset.fetcher(self.num_workers), sequence)
        self._plans = _Plans(sequence, recipe.packing, self._read_ahead)
        return self._plans

    def _deliver(self) -> Generator[Batch, None, None]:
        # Not in iter(), which trainers may call only as a check.
        if self.num_workers and not (self._workers and self._workers.is_of_this_process):
            self._make_workers()  # those from before a fork, and their ring, belong to the parent
        dataset = self.dataset
        num_fetched = len(dataset.fetched_for_lengths)
        sequence = dataset.begin()
        ahead: ReadAhead | None = None
        try:
            plans = self._begin(sequence, num_fetched)
            ahead, tally = plans.ahead, self._tally
            # No zip, no enumerate: they keep a batch until the next arrives.
            for batch in self._batches(plans):
                delivered = plans.deliver()
                # Otherwise a later iteration has begun or a state was loaded, and those count.
                if plans is self._plans:
                    self._last, self._is_new = delivered, False
                # Last of all: an interrupt arrives before this, or once the loop has the batch.
                dataset.note(sequence, delivered.progress)
                yield batch
                del batch
                if delivered.is_last:
                    delivered.count(tally)
                    ahead.finish(delivered.planned.finished)
                ahead.check()
            if plans is self._plans:
                self._settle()
            dataset.note(sequence, None)
        except GeneratorExit:
            raise
        except BaseException:
            dataset.abandon()
            raise
        finally:
            if ahead is not None:
                ahead.close()
            sequence.close()

    def _batches(self, plans: _Plans) -> Iterator[Batch]:
        if self._workers is not None:
            return self._from_workers(plans, self._workers)
        groups = in_groups(plans.next, self._group, plans.ahead)
        made: Iterator[ReadGroup] = map(self._read_group, groups)
        if self._num_threads:
            depth, num_threads = self._ahead, self._num_threads
            made = ordered_thread_map(groups, self._read_group, depth, num_threads, self._at_hand)
        return chain.from_iterable(made)

    def _read_group(self, plan: DevicePlan) -> ReadGroup:
        group = read_group(self._read, plan)
        if self._pins:
            group.batches = deque(pin(batch) for batch in group.batches)
        return group

    def _from_workers(self, plans: _Plans, workers: Pool) -> Iterator[Batch]:
        handing = self._handing
        for got in workers.results(task_groups(handing.tasks(plans.one_by_one()), self._group)):
            batch = handing.finish(plans.waiting[0].plan, got)
            yield pin(batch) if self._pins else batch
            del batch

    def _totals(self) -> tuple[int, _Losses, int]:
        """Count delivered batches; return the most that waited, all losses, and buffer peaks."""
        plans, last = self._plans, self._last
        most_waiting, losses, packers = self._most_waiting, self._losses, self._packer_tokens
        if plans is not None:
            most_waiting = max(most_waiting, plans.most_waiting)
        if last is not None:
            last.count(self._tally)
            losses, packers = losses + last.planned.losses, max(packers, last.planned.packer_tokens)
        return most_waiting, losses, packers

    def _settle(self) -> None:
        """Add the iteration that ends to the earlier ones."""
        self._most_waiting, self._losses, self._packer_tokens = self._totals()
        self._plans = self._last = None

    def state_dict(self) -> State:
        """Return the state after the batch last delivered, as JSON."""
        if self._plans is not None and self.dataset.is_told_by(self._plans.sequence):
            return self.dataset.state_here()  # ignoring other processes
        return self.dataset.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Resume from `state` at the next iteration.

        Raises:
            ResumeError: If it belongs to another sequence; the message names the difference.
        """
        self.dataset.load_state_dict(state)
        self._settle()
        self._is_new = True

    def stats(self) -> dict[str, Any]:
        """Return statistics of this rank since the loader was made or a state was loaded.

        See `PackedDataLoader.stats`. Substituted slots are counted one group of batches ahead.
        """
        most_waiting, losses, packers = self._totals()
        # torch requests one more plan before it delivers a batch.
        most_waiting = max(most_waiting - (self.num_workers > 0), 0)
        batch_tokens = self.dataset.footprint().batch_tokens
        waiting = most_waiting * batch_tokens
        per_worker = -(-most_waiting // max(self.num_workers, 1)) * batch_tokens
        return self._tally.stats(losses.dropped.tolist()) | {
            "substituted": losses.substituted,
            "digest": self.dataset.digest,
            "shards": self._shards(),
            "buffers": {
                "worker_tokens": per_worker + (0 if self.num_workers else packers),
                "worker_bytes": per_worker * BYTES_PER_TOKEN,
                "rank_tokens": waiting + packers,
            },
        }

    def _shards(self) -> dict[str, Any]:
        """Return counts of shards fetched in advance and for lengths."""
        counts = self._fetched_ahead()
        for_lengths = self.dataset.fetched_for_lengths[self._first_fetched :]
        counts["fetched"] += len(for_lengths)
        counts["fetched_bytes"] += sum(for_lengths)
        return counts

    def _fetched_ahead(self) -> dict[str, Any]:
        """Return the shards prefetched before and in the current iteration."""
        before, now = self._fetched, self._read_ahead.stats() if self._read_ahead else {}
        counts = {key: value + now.get(key, 0) for key, value in before.items()}
        return counts | {"ahead_bytes": max(before["ahead_bytes"], now.get("ahead_bytes", 0))}
