"""Iterate an online dataset, with or without worker processes.

::

    worker 0   batch 0, its state    batch 2, its state ...
    worker 1   batch 1, its state    batch 3, its state ...
    here       batch 0, 1, 2, 3 ...                position = the latest state of each worker

A worker's state travels with its batch, so prefetched batches are not part of the position, which
the engine has. After a resume, the worker with the next batch delivers first. Without workers,
there is one state, that of this process.

Cost: the batch transfer, and a state of up to 30 KB per batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice, repeat
from typing import Any

from torch.utils.data import get_worker_info

from streampack.errors import ConfigError
from streampack.online.engine import Delivery, OnlineEngine, OnlineIteration
from streampack.online.even_steps import EvenSteps, Read
from streampack.online.state import Position, read_workers
from streampack.runtime.at_exit import close_at_exit
from streampack.runtime.loader_session import LoaderSession
from streampack.runtime.memory_budget import max_prefetch
from streampack.runtime.rank_digest import digest_of_values
from streampack.runtime.stats import COUNTED, OverRanks, alone, delivery_report
from streampack.runtime.worker_pool import Pool
from streampack.runtime.worker_processes import WorkerOptions
from streampack.types import State


def _serve(engine: OnlineEngine, ahead: int, start: Position) -> Callable[[Any], list[Delivery]]:
    """Set up a worker of a `Pool`; return what gives its next batch, with its state after that."""
    info = get_worker_info()
    state = start.states[info.id if info else 0]
    items = engine.deliveries(engine.adopt(start), state, ahead)
    return lambda _: list(islice(items, 1))


class OnlineLoading(LoaderSession[OnlineEngine]):
    """Iterates an online dataset with or without workers; see `PackedDataLoader`.

    `finish` changes each batch before it is delivered.
    """

    def __init__(
        self,
        engine: OnlineEngine,
        options: WorkerOptions,
        finish: Callable[[Any], Any] | None = None,
    ) -> None:
        footprint = engine.footprint(options.num_workers)
        self._ahead = max_prefetch(engine.buffers, footprint, options.prefetch_factor)
        super().__init__(engine, replace(options, prefetch_factor=self._ahead))
        self._finish = finish
        self._num_begun = 0
        self._even_steps: EvenSteps | None = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_even_steps": None}

    def __len__(self) -> int:
        steps = self.engine.plan.steps
        if isinstance(steps, int):
            return steps
        raise TypeError(f"a {self.engine.kind} has no len(): its samples are not known ahead")

    def state_dict(self) -> State:
        position = self.engine.whole_position(self.engine.position, self.num_workers)
        return position.state_dict(self.num_workers) | self.engine.loop_state()

    def load_state_dict(self, state: State) -> None:
        states, next_worker = read_workers(state, self.num_workers)
        self.engine.load(states, next_worker, state)

    def __iter__(self) -> Iterator[Any]:
        self._num_begun += 1
        if self.engine.plan.steps is None:
            self.engine.ask()
        return close_at_exit(self._deliver(self._num_begun))

    def _deliver(self, number: int) -> Generator[Any, None, None]:
        # Not in iter(): some trainers call it only to test for support, and drop the result.
        num_moves = self.engine.num_moves
        self._check_current(number, num_moves)
        with closing(self._loop() if self.engine.plan.steps else self._epoch()) as batches:
            for batch in batches:
                yield batch  # it counts as delivered: a call here would let an interrupt lose it
                del batch  # free it before the next one is made
                self._check_current(number, num_moves)

    def _check_current(self, number: int, num_moves: int) -> None:
        if num_moves != self.engine.num_moves:
            raise self.engine.moved()
        # The workers, the sources and the saved state belong to one iteration only.
        if number != self._num_begun:
            raise ConfigError(
                "a later iteration of this loader has begun, and iterables are gone through by one "
                "at a time; end one before the next, or make a dataset and a loader for each"
            )

    def _loop(self) -> Generator[Any, None, None]:
        if self._even_steps is None:
            # A loader that is dropped ends its workers: what is suspended must not keep it alive.
            this = weakref.proxy(self)
            self._even_steps = EvenSteps(self.engine, lambda: OnlineLoading._read(this))
        return self._even_steps.loop()

    def _epoch(self) -> Generator[Any, None, None]:
        with closing(self._read()) as reads:
            for batch, _, iteration, position in reads:
                self.engine.note(iteration, position)
                yield batch
                del batch

    def _read(self) -> Generator[Read, None, None]:
        """Read the next epoch, or the rest of the one in a loaded state."""
        engine, num_read = self.engine, 0
        with engine.iteration() as iteration:
            position = engine.whole_position(iteration.start, self.num_workers)
            for worker, native, state in self._deliveries(iteration, position):
                batch = engine.convert(self._pinned(native), self._ahead)
                origin = engine.origin(native)
                del native
                if self._finish is not None:
                    batch = self._finish(batch)
                self.recent.add(batch, origin)
                position = position.after(worker, state)
                num_read += 1
                yield Read(batch, origin, iteration, position)
                del batch  # free it before the next one is made
                engine.check_current(iteration)
            if not num_read and not iteration.start.states:
                engine.check_drops(iteration.start.epoch)
            engine.note(iteration, None)
        if not num_read and iteration.start.states:
            # The state was taken after the epoch's last batch, so continue with the next epoch.
            yield from self._read()

    def _deliveries(self, iteration: OnlineIteration, start: Position) -> Iterable[Delivery]:
        engine, ahead = self.engine, self._ahead
        if self.num_workers:
            if self._workers is None:
                self._workers = Pool(partial(_serve, engine, ahead), self._options)
            if iteration.start.states:
                self._workers.end()  # new ones have sources that were not read yet
            return self._workers.results(repeat(None), first=start.next_worker, given=start)
        batches = engine.deliveries(iteration, start.states[0], ahead)
        if ahead > 1 and self._options.prefetch_threads:
            return engine.read_ahead(batches, ahead)
        return batches

    def stats(self, over_ranks: OverRanks = alone) -> dict[str, Any]:
        """Return delivery statistics of the current epoch, or of the last one."""
        engine, flows = self.engine, self.engine.last.flows
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
