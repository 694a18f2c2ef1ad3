"""`PackedDataLoader` for planned datasets: plan here, read in threads or stateless workers.

::

    num_workers=0    a thread plans and reads batches in groups; a loop that would block reads too
    num_workers=2    this process plans 0, 1, 2, ...                a few KB of integers per batch
                     worker 0 reads 0, 2, ...   worker 1 reads 1, 3, ...
                     this process makes batches from their rows: int32 in shared memory

Workers are stateless, so neither their number nor a failure affects the batches. The state refers
to the batch last delivered. See docs/adr/0008 for threads, 0014 for rows and 0023 for groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from streampack._threads import AT_HAND, ordered_thread_map
from streampack.batch.batch import Batch
from streampack.plan.device_plan import DevicePlan, Totals
from streampack.plan.recipe import Recipe
from streampack.plan.sequence import PackSequence
from streampack.planned.batch_groups import (
    ReadGroup,
    in_groups,
    most_together,
    read_group,
    task_groups,
)
from streampack.planned.cache_budget import NO_FETCHES, ReadAhead
from streampack.planned.deliveries import IterationPlans, PlannedBatches
from streampack.planned.engine import PlanEngine
from streampack.runtime.batch_reader import RingReader
from streampack.runtime.loader_session import LoaderSession, close_at_exit
from streampack.runtime.memory_budget import BYTES_PER_TOKEN, SharedMemory, max_prefetch
from streampack.runtime.rank_digest import digest_of_values
from streampack.runtime.stats import DeliveryStats, OverRanks, alone
from streampack.runtime.worker_main import serve_reads
from streampack.runtime.worker_pool import Pool
from streampack.runtime.worker_processes import WorkerOptions
from streampack.types import State

# A transfer costs as much for a small batch as for a large one, so several are sent together. A
# loop that waits for the first of them waits for all.
HANDOVER_TOKENS = 1 << 19
MOST_HANDED_OVER = 8

# Groups planned and not yet read. They are read while a thread plans a window of packs, which
# takes as long as reading several groups.
GROUPS_AT_HAND = 12


class PlannedLoading(LoaderSession[PlanEngine]):
    """Iterates over a `PackedStreamingDataset`; see `PackedDataLoader`."""

    def __init__(self, engine: PlanEngine, options: WorkerOptions) -> None:
        super().__init__(engine, options)
        self._asked_options = options
        self._num_threads = options.prefetch_threads
        self._fit()
        self._plans: IterationPlans | None = None  # of the current iteration
        self._last: PlannedBatches | None = None  # those of the batch last delivered
        self._begin_stats()

    def _begin_stats(self) -> None:
        self._is_new = True  # made, or given a state, and no batch delivered since
        self._read_ahead: ReadAhead | None = None
        recipe = self.engine.recipe
        self._tally = DeliveryStats(recipe)
        no_drops = np.zeros(len(recipe.streams), np.int64)
        self._totals = Totals(dropped=no_drops)  # without those of `_last`
        self._most_waiting = 0
        self._first_fetched = len(self.engine.spec.fetched_for_lengths)
        # Before the current iteration.
        self._fetched: dict[str, Any] = dict.fromkeys(NO_FETCHES, 0)

    def _fit(self) -> None:
        """Fit reader, prefetching and workers to the engine's packing and batch size.

        Raises a ConfigError if its buffers cannot hold one batch per worker, or shared memory
        cannot hold the workers' output.
        """
        engine, options = self.engine, self._asked_options
        num_workers = options.num_workers
        self._read = engine.reader(pinned=self._pins)
        most = self._most_together()
        self._at_hand = AT_HAND if most == 1 else GROUPS_AT_HAND
        wanted = options.prefetch_factor
        if not num_workers:
            # One in each thread and in a blocked loop, one ready, and the one delivered.
            wanted = max(wanted, self._num_threads + 3)
        # Workers hold this many prefetched batches; others arrived with the one being delivered.
        arrived = 1 if num_workers else 0
        footprint = engine.footprint(num_workers)
        ahead = max_prefetch(engine.buffers, footprint, (wanted + arrived) * most - arrived)
        self._group = max(1, (ahead + arrived) // (wanted + arrived))
        self._ahead = min(ahead, wanted)
        engine.check_cache(num_workers)
        self._options = replace(options, prefetch_factor=self._ahead, pin_memory=False)
        if self._workers is not None:
            self._workers.end()
        if num_workers:
            self._make_workers()
        # Last, so that an interrupted fit is repeated.
        self._fitted_to = engine.recipe.packing, engine.footprint()

    def _make_workers(self) -> None:
        self._handing = self._choose_handing()
        # A worker has no GPU to pin for.
        read = self._handing or self.engine.reader()
        self._workers = Pool(partial(serve_reads, read), self._options)

    def _most_together(self) -> int:
        """Return how many batches are read or transferred together, if there is room for them."""
        engine, read = self.engine, self._read
        batch_tokens = engine.footprint().batch_tokens
        # The size of a limited cache assumes that little is planned ahead.
        if engine.buffers.cache_limit is not None:
            return 1
        if not self.num_workers:
            return most_together(read, batch_tokens) if self._num_threads else 1
        fitting = HANDOVER_TOKENS // batch_tokens if read.is_cheap else 1
        return min(max(1, fitting), MOST_HANDED_OVER)

    def _choose_handing(self) -> RingReader | None:
        """Return what hands tokens over, or None if workers make whole batches."""
        engine, read = self.engine, self._read
        if not read.is_cheap:
            return None
        slot_tokens = engine.footprint().batch_tokens
        slot_bytes = slot_tokens * RingReader.bytes_per_token(read)
        # Groups prefetched by workers, plus two: one being delivered and one spare.
        num_groups = self.num_workers * self._ahead + 2
        room = SharedMemory(engine.world.num_local_ranks)
        while self._group > 1 and not room.has(2 * num_groups * self._group * slot_bytes):
            self._group //= 2  # leave half of it to others
        num_slots = num_groups * self._group
        room.check(num_slots * slot_bytes)
        return RingReader(read, num_slots, slot_tokens)

    def __len__(self) -> int:
        """Return the number of batches of this rank in the current epoch, or else the next."""
        return len(self.engine)

    def __getstate__(self) -> dict[str, Any]:
        kept = {"_fetched": self._fetched_ahead(), "_read_ahead": None, "_plans": None}
        return super().__getstate__() | kept | {"_handing": None}

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next epoch, or resume from a loaded state, at the first batch."""
        self.engine.ask()
        return close_at_exit(self._deliver())

    def _begin(self, sequence: PackSequence, recipe: Recipe, num_fetched: int) -> IterationPlans:
        """Record the beginning of an iteration.

        The dataset fetched `num_fetched` shards for lengths before.
        """
        self._settle()
        if self._is_new:
            self._first_fetched = num_fetched
        else:
            self._fetched = self._fetched_ahead()
        if self._tally.recipe is not recipe:
            self._tally.use(recipe)
        self._read_ahead = self.engine.read_ahead(sequence, self.num_workers)
        self._plans = IterationPlans(sequence, recipe, self._read_ahead)
        return self._plans

    def _deliver(self) -> Generator[Batch, None, None]:
        # Not in iter(), which trainers may call only as a check.
        if self.num_workers and not (self._workers and self._workers.is_of_this_process):
            self._make_workers()  # those from before a fork, and their ring, belong to the parent
        while (yield from self._iterate()) or self.engine.continues():
            pass  # another chapter follows, or the run was changed

    def _iterate(self) -> Generator[Batch, None, bool]:
        """Deliver an iteration; return whether a change of the run cut it short."""
        engine = self.engine
        num_fetched = len(engine.spec.fetched_for_lengths)
        num_changes = engine.state.changes
        with engine.iteration() as sequence, closing(sequence):
            sequence.stop = engine.end_of_shape(sequence.epoch)
            recipe, spec, run = engine.recipe, engine.state.spec, engine.state.run
            if self._fitted_to != (recipe.packing, engine.footprint()):
                self._fit()
            plans = self._begin(sequence, recipe, num_fetched)
            ahead, tally, num_moves = plans.ahead, self._tally, engine.state.moves
            origin_of, left = partial(engine.provenance, recipe, spec.context), engine.left
            with closing(ahead):
                # No zip, no enumerate: they keep a batch until the next arrives.
                for batch in self._batches(plans):
                    if num_moves != engine.state.moves:
                        raise engine.moved()
                    delivered = plans.deliver()
                    # Otherwise a later iteration has begun or a state was loaded; those count.
                    if plans is self._plans:
                        self._last, self._is_new = delivered, False
                    progress = delivered.progress
                    number = delivered.num_delivered - 1
                    left.leave(run, delivered.plan, delivered.snapshots)
                    self.recent.add(batch, partial(origin_of, delivered.plan, number))
                    # Last of all: an interrupt arrives before this, or once the loop has the batch.
                    engine.note(sequence, progress)
                    yield batch
                    del batch
                    if engine.state.changes != num_changes:
                        break  # what was read ahead is of the plan before the change
                    if delivered.is_delivered:
                        delivered.count(tally)
                        ahead.finish(delivered.finished)
                    ahead.check()
                if plans is self._plans:
                    if self._last is None:  # all steps were skipped
                        skipped = self._totals.skipped + sequence.num_skipped
                        self._totals, self._is_new = replace(self._totals, skipped=skipped), False
                    self._settle()
                is_cut = engine.state.changes != num_changes
                if not is_cut:
                    engine.note_end(sequence)
        return is_cut

    def _batches(self, plans: IterationPlans) -> Iterator[Batch]:
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
            group.batches = deque(map(self._pinned, group.batches))
        return group

    def _from_workers(self, plans: IterationPlans, workers: Pool) -> Iterator[Batch]:
        handing, one_by_one = self._handing, iter(partial(plans.next, 1), None)
        tasks = handing.tasks(one_by_one) if handing else one_by_one
        for got in workers.results(task_groups(tasks, self._group)):
            batch = handing.finish(plans.waiting[0].plan, got) if handing else got
            yield self._pinned(batch)
            del batch

    def _counted(self) -> tuple[Totals, int]:
        """Count delivered batches; return all totals, and the most batches that waited."""
        plans, last = self._plans, self._last
        most_waiting = max(self._most_waiting, plans.most_waiting if plans else 0)
        if last is None:
            return self._totals, most_waiting
        last.count(self._tally)
        return self._totals + last.totals, most_waiting

    def _settle(self) -> None:
        self._totals, self._most_waiting = self._counted()
        self._plans = self._last = None

    def state_dict(self) -> State:
        """Return the state after the batch last delivered, as JSON."""
        if self._plans is not None and self._plans.sequence is self.engine.state.current:
            return self.engine.state_here()  # ignoring other processes
        return self.engine.state_dict()

    def load_state_dict(self, state: State, *, replan: bool = False) -> None:
        """Resume from `state` at the next iteration."""
        self.engine.load_state_dict(state, replan=replan)
        self._settle()
        self._begin_stats()

    def stats(self, over_ranks: OverRanks = alone) -> dict[str, Any]:
        """Return statistics since the loader was made or a state was loaded.

        See `PackedDataLoader.stats`. Substituted slots are counted one group of batches ahead.
        """
        totals, most_waiting = self._counted()
        # torch requests one more plan before it delivers a batch.
        most_waiting = max(most_waiting - (self.num_workers > 0), 0)
        if self._num_threads and not self.num_workers:
            # Groups at hand are planned, but hold no tokens yet.
            most_waiting = min(most_waiting, self._ahead * self._group)
        batch_tokens = self.engine.footprint().batch_tokens
        waiting = most_waiting * batch_tokens
        straggler = totals.straggler
        per_worker = -(-most_waiting // max(self.num_workers, 1)) * batch_tokens
        return self._tally.stats(totals.dropped.tolist(), over_ranks) | {
            "substituted": totals.substituted,
            "skipped": totals.skipped,
            "omitted_packs": totals.omitted,
            "padding_packs": self._tally.padding_packs,
            "digest": digest_of_values(self.engine.fingerprint()),
            "straggler": straggler and dict(zip(("planned", "dealt"), straggler, strict=True)),
            "shards": self._shards(),
            "buffers": {
                "worker_tokens": per_worker + (0 if self.num_workers else totals.packer_tokens),
                "worker_bytes": per_worker * BYTES_PER_TOKEN,
                "rank_tokens": waiting + totals.packer_tokens,
            },
        }

    def _shards(self) -> dict[str, Any]:
        counts = self._fetched_ahead()
        for_lengths = self.engine.spec.fetched_for_lengths[self._first_fetched :]
        counts["fetched"] += len(for_lengths)
        counts["fetched_bytes"] += sum(for_lengths)
        tables = [sum(stream.cache.metadata.fetched) for stream in self.engine.spec.streams]
        made = [stream.num_made for stream in self.engine.spec.streams]
        tokenized, again = (sum(numbers) for numbers in zip(*made, strict=True))
        tokenizing = {"tokenized": tokenized, "tokenized_again": again}
        return counts | {"index_bytes": sum(tables)} | tokenizing

    def _fetched_ahead(self) -> dict[str, Any]:
        before, now = self._fetched, self._read_ahead.stats() if self._read_ahead else {}
        counts = {key: value + now.get(key, 0) for key, value in before.items()}
        most = max(before["ahead_bytes"], now.get("ahead_bytes", 0))
        return counts | {"ahead_bytes": most, "waiting": now.get("waiting", 0)}
