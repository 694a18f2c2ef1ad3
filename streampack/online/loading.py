"""`PackedDataLoader` over online datasets: the workers that pack, and their combined state.

::

    worker 0   batch 0, its state    batch 2, its state ...
    worker 1   batch 1, its state    batch 3, its state ...
    here       batch 0, 1, 2, 3 ...                state = the latest state of each worker

A worker's state travels with its batch, so prefetched batches are not part of the loader's state.
After a resume, the worker with the next batch delivers first.

Cost: the batch transfer, and a state of up to 30 KB per batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any

from torch.utils.data import get_worker_info

from streampack.batch.batch import Batch
from streampack.errors import ConfigError, ResumeError
from streampack.online.engine import OnlineEngine, OnlineIteration
from streampack.online.even_steps import EvenSteps, Read, delivered
from streampack.online.state import LoaderPosition, read_position, saved_state
from streampack.runtime.at_exit import close_at_exit
from streampack.runtime.loader_session import LoaderSession
from streampack.runtime.memory_budget import max_prefetch
from streampack.runtime.rank_digest import digest_of_values
from streampack.runtime.stats import COUNTED, OverRanks, alone, delivery_report
from streampack.runtime.worker_pool import Pool
from streampack.runtime.worker_processes import WorkerOptions
from streampack.types import State


@dataclass(frozen=True, slots=True, eq=False)
class _InTransit:
    """A worker's state in transit, wrapped so that torch does not search it for tensors."""

    state: State


Start = tuple[LoaderPosition | None, int]  # a position, or None: the start of this epoch
Delivered = tuple[int, Batch, _InTransit]  # worker, batch, the worker's state after it


@dataclass(frozen=True, slots=True, eq=False)
class _WithStates:
    """The work of a `Pool` worker: batches, each with the worker's state after it."""

    engine: OnlineEngine
    ahead: int
    """The most batches not yet delivered."""

    def __call__(self, given: Start) -> Callable[[Any], list[Delivered]]:
        items = self._items(*given)
        return lambda _: list(islice(items, 1))

    def _items(self, start: LoaderPosition | None, epoch: int) -> Iterator[Delivered]:
        info, engine = get_worker_info(), self.engine
        worker = info.id if info else 0
        # A worker that missed an iteration would count one less than the others.
        engine.epoch_of_loader = epoch
        if start is not None:
            engine.load_state_dict(start.states[worker])
        with engine.iteration() as iteration:
            for batch, state in engine.native_batches(iteration, self.ahead):
                engine.note(iteration, state)
                yield worker, batch, _InTransit(state)
                del batch  # free it before the next one is made


class OnlineLoading(LoaderSession[OnlineEngine]):
    """Iterates an online dataset with or without workers; see `PackedDataLoader`."""

    def __init__(self, engine: OnlineEngine, options: WorkerOptions) -> None:
        footprint = engine.footprint(options.num_workers)
        self._ahead = max_prefetch(engine.buffers, footprint, options.prefetch_factor)
        super().__init__(engine, replace(options, prefetch_factor=self._ahead))
        self._num_begun = 0
        # With workers: where the next iteration starts, and the position once past it.
        self._start: LoaderPosition | None = None
        self._at: LoaderPosition | None = None
        self._num_moves = engine.loops.num_moves  # as of these two
        # The latest state of each worker, for the stats; kept until the next epoch's first batch.
        self._flows: list[State | None] = [None] * max(options.num_workers, 1)
        self._even_steps: EvenSteps | None = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_even_steps": None}

    def __len__(self) -> int:
        steps = self.engine.plan.steps
        if isinstance(steps, int):
            return steps
        raise TypeError(f"a {self.engine.kind} has no len(): its samples are not known ahead")

    def state_dict(self) -> State:
        return self._state(self._position())

    def _position(self) -> LoaderPosition:
        if not self.num_workers:
            return LoaderPosition([self.engine.position()])
        self._follow()
        return self._at or self._next()

    def _state(self, at: LoaderPosition) -> State:
        return at.state_dict(self.num_workers) | self.engine.loops.state_dict()

    def _next(self) -> LoaderPosition:
        if self._start is not None:
            return self._start
        slices = (self.engine.slice_of(n, self.num_workers) for n in range(self.num_workers))
        return LoaderPosition([self.engine.next_state(own) for own in slices])

    def _follow(self) -> None:
        """Drop the position if the dataset was given a state or an epoch since."""
        if self._num_moves != self.engine.loops.num_moves:
            self._num_moves = self.engine.loops.num_moves
            self._start = self._at = None
            self._end_workers()  # running workers would not see the change

    def load_state_dict(self, state: State) -> None:
        engine, at = self.engine, read_position(state, self.num_workers)
        for worker, worker_state in enumerate(at.states):
            engine.check(worker_state, engine.slice_of(worker, len(at.states)))
        loop = engine.loops.read(state)
        self._num_begun += 1  # a running iteration no longer sets the position
        engine.num_moves += 1  # nor does one over the dataset
        self._resume(at)
        engine.loops.go_to(*loop)

    def _resume(self, at: LoaderPosition) -> None:
        engine = self.engine
        self._flows = at.flows
        if not self.num_workers:
            engine.load_state_dict(at.states[0])
            return
        engine.restart(at.epoch)
        self._follow()
        self._start = LoaderPosition(list(map(saved_state, at.states)), at.next_worker)
        if any(at.flows):
            engine.move_away()

    def __iter__(self) -> Iterator[Any]:
        self._num_begun += 1
        self._follow()
        if self.engine.plan.steps is None:
            if self._at is not None:
                self._start = None  # a batch was delivered since
            self._at = None
            if not self.num_workers:
                self.engine.ask()
        return close_at_exit(self._deliver(self._num_begun))

    def _deliver(self, number: int) -> Generator[Any, None, None]:
        # Not in iter(): some trainers call it only to test for support, and drop the result.
        self._check_current(number)
        batches = self._loop() if self.engine.plan.steps else delivered(self.read_epoch())
        for batch in self.engine.until_moved(batches):
            yield batch  # it counts as delivered: a call here would let an interrupt lose it
            del batch  # free it before the next one is made
            self._check_current(number)

    def _loop(self) -> Generator[Any, None, None]:
        if self._even_steps is None:
            # A loader that is dropped ends its workers: what is suspended must not keep it alive.
            reader, engine = weakref.proxy(self), self.engine
            self._even_steps = EvenSteps(engine.loops, reader, engine.world, engine.counter)
        return self._even_steps.loop()

    def read_epoch(self) -> Generator[Read, None, None]:
        read = OnlineLoading._from_workers if self.num_workers else OnlineLoading._from_here
        return read(weakref.proxy(self))

    def _from_here(self) -> Generator[Read, None, None]:
        engine = self.engine
        is_ahead = self._ahead > 1 and self._options.prefetch_threads
        read = engine.read_ahead if is_ahead else engine.native_batches
        with engine.iteration() as iteration:
            for native, state in read(iteration, self._ahead):
                batch = engine.convert(self._pinned(native), self._ahead)
                origin = engine.provenance(native)
                self.recent.add(batch, origin)
                del native

                def note(to: State = state) -> None:
                    self._note(iteration, to)

                yield Read(batch, int(state["epoch"]), note, origin)
                del batch  # free it before the next one is made
            engine.note(iteration, None)

    def _note(self, iteration: OnlineIteration, state: State) -> None:
        self._flows = [state["flow"]]
        self.engine.note(iteration, state)

    def _from_workers(self) -> Generator[Read, None, None]:
        engine, start, num_batches = self.engine, self._start, 0
        before = at = self._next()
        try:
            for worker, native, told in self._items(start, engine.counter.next_epoch):
                batch = engine.convert(self._pinned(native), self._ahead)
                origin = engine.provenance(native)
                self.recent.add(batch, origin)
                del native
                at = at.after(worker, told.state)
                num_batches += 1

                def move(to: LoaderPosition = at, is_first: bool = num_batches == 1) -> None:
                    self._move_to(to, is_first=is_first)

                yield Read(batch, at.epoch, move, origin)
                del batch  # free it before the next one is made
            if start is None and not num_batches:
                engine.check_drops(at.epoch)
        except GeneratorExit:
            raise
        except BaseException:
            if not num_batches or (self._at is None and self._num_moves == engine.loops.num_moves):
                self._undo(before)
            raise
        if self._num_moves == engine.loops.num_moves:
            engine.restart(1 + at.epoch)
            self._num_moves = engine.loops.num_moves
            self._start = self._at = None
        if start is not None and not num_batches:
            # The state was taken after the epoch's last batch, so continue with the next epoch.
            yield from self.read_epoch()

    def _move_to(self, at: LoaderPosition, *, is_first: bool) -> None:
        self._flows = at.flows
        if is_first:
            self.engine.move_away()
            self._num_moves = self.engine.loops.num_moves
        # Set last: an interrupt comes before this, or after the caller has the batch.
        if self._num_moves == self.engine.loops.num_moves:
            self._at = at

    def _undo(self, before: LoaderPosition) -> None:
        flows, loops = self._flows, self.engine.loops
        at, following = loops.at, loops.next
        with suppress(ResumeError):  # the start may have failed on this very state
            self.load_state_dict(self._state(before))
        loops.at, loops.next = at, following
        self._flows = flows
        self._end_workers()

    def reload(self) -> None:
        if not self.num_workers:
            self.engine.reload()
        elif self._at is not None:
            self._resume(self._at)
        elif self._start is None:
            self.engine.check_not_moved_away()

    def _check_current(self, number: int) -> None:
        # The workers, the sources and the saved state belong to one iteration only.
        if number != self._num_begun:
            raise ConfigError(
                "a later iteration of this loader has begun, or a state was loaded, and iterables "
                "are gone through by one at a time; end one before the next, or make a dataset and "
                "a loader for each"
            )

    def _items(self, start: LoaderPosition | None, epoch: int) -> Iterator[Delivered]:
        if self._workers is None:
            self._workers = Pool(_WithStates(self.engine, self._ahead), self._options)
        first = 0
        if start is not None:
            self._workers.end()  # running workers must no longer write to the epoch counter
            first = start.next_worker
        return self._workers.results(repeat(None), first=first, given=(start, epoch))

    def stats(self, over_ranks: OverRanks = alone) -> dict[str, Any]:
        """Return delivery statistics of the current epoch, or of the last one."""
        engine, flows = self.engine, [flow for flow in self._flows if flow]
        plan, footprint = engine.plan, engine.footprint(0)
        streams = range(len(plan.names))
        counts = {
            key: [sum(int(flow["counts"][stream][column]) for flow in flows) for stream in streams]
            for column, key in enumerate(COUNTED)
        }
        counts["skipped"] = [
            sum(flow["sources"][stream]["bad"] for flow in flows) for stream in streams
        ]
        report = delivery_report(
            plan.names,
            counts,
            [amount or 0 for amount in plan.amounts.amounts],
            packs=sum(flow["num_packs"] for flow in flows),
            slots=sum(flow["num_slots"] for flow in flows),
            over_ranks=over_ranks,
        )
        # The high water already includes the batch under construction, one of those ahead.
        waiting_tokens = (self._ahead - 1) * footprint.batch_tokens
        tokens = [flow["high_water_tokens"] for flow in flows] or [0]
        num_bytes = [flow["high_water_bytes"] for flow in flows] or [0]
        return report | {
            "substituted": sum(flow["substituted"] for flow in flows),
            "digest": digest_of_values(engine.fingerprint()),
            "pack_shuffle": engine.pack_window(self.num_workers),
            "buffers": {
                "worker_tokens": max(tokens) + waiting_tokens,
                "worker_bytes": max(num_bytes) + footprint.format_bytes,
                "rank_tokens": sum(tokens) + waiting_tokens * len(tokens),
            },
        }
