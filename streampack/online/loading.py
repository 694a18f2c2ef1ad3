"""Iterate an online dataset, with or without worker processes, in epochs or in loops of `steps`.

::

    worker 0   batch 0, its state    batch 2, its state ...
    worker 1   batch 1, its state    batch 3, its state ...
    here       batch 0, 1, 2, 3 ...                position = the latest state of each worker

What changes in a worker's state travels with its batch, so prefetched batches are not part of the
position, which the engine has. After a resume, the worker with the next batch delivers first.
Without workers, there is one state, that of this process.

Cost: the batch transfer, half a KB of state per batch, and up to 4 KB per window of samples; in
loops, one batch of memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import islice, repeat
from typing import Any, NamedTuple

import torch
from torch import distributed

from streampack._layout import process_group
from streampack.errors import ConfigError, DataError, ResumeError, StreampackError, WorkerError
from streampack.online.engine import Delivery, OnlineEngine
from streampack.online.state import LoopPosition, Position, read_workers
from streampack.runtime.loader_session import LoaderSession, close_at_exit
from streampack.runtime.memory_budget import max_prefetch
from streampack.runtime.provenance import Provenance
from streampack.runtime.rank_digest import MINUTES, cpu_group, digest_of_values, other_ranks
from streampack.runtime.stats import COUNTED, OverRanks, alone, delivery_report
from streampack.runtime.torch_worker import worker_here
from streampack.runtime.worker_pool import Pool
from streampack.runtime.worker_processes import WorkerOptions
from streampack.types import State
from streampack.world import World


def _serve(engine: OnlineEngine, ahead: int, start: Position) -> Callable[[Any], list[Delivery]]:
    """Set up a worker of a `Pool`; return what gives its next batch, with what changed in its
    state."""
    state = start.states[worker_here().number]
    engine.state = engine.state._replace(current=start)
    items = engine.deliveries(start, state, ahead)
    return lambda _: list(islice(items, 1))


class Read(NamedTuple):
    """A batch that was read, and is delivered once the engine notes its position."""

    batch: Any
    provenance: Provenance
    iteration: Position
    """Where it began."""
    position: Position
    """Behind the batch."""


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
        # Of loops of `steps`, which continue where the one before ended:
        self._reading: Iterator[Read] | None = None
        self._has_read = False  # a batch of the epoch that is being read
        self._held: Read | None = None  # a batch that is not delivered
        self._mark = engine.mark  # as of these

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_reading": None, "_held": None}

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
        num_moves = self.engine.state.moves
        self._check_current(number, num_moves)
        with closing(self._loop() if self.engine.plan.steps else self._epoch()) as batches:
            for batch in batches:
                yield batch  # it counts as delivered: a call here would let an interrupt lose it
                del batch  # free it before the next one is made
                self._check_current(number, num_moves)

    def _check_current(self, number: int, num_moves: int) -> None:
        if num_moves != self.engine.state.moves:
            raise self.engine.moved()
        # The workers, the sources and the saved state belong to one iteration only.
        if number != self._num_begun:
            raise ConfigError(
                "a later iteration of this loader has begun, and iterables serve only one "
                "at a time; end one before the next, or make a dataset and a loader for each"
            )

    def _loop(self) -> Generator[Any, None, None]:
        """Yield the batches of the next loop of `steps`."""
        engine, steps = self.engine, self.engine.plan.steps
        if steps == "equal":
            _check_group(engine.world)
        if self._mark != engine.mark:  # another loader reads, or a state was loaded
            self._reading = self._held = None
        if self._reading is None and self._held is None:  # or reading failed
            engine.reload()
        at, has_delivered = engine.state.loop.next, False
        while True:
            if held := self._next_of(at.epoch, at.step):
                if isinstance(steps, int):
                    held.provenance.step_of = partial(int, at.epoch * steps + at.step)
                at, has_delivered = LoopPosition(at.epoch, at.step + 1, is_begun=True), True
                engine.note(held.iteration, held.position, at)
                # The batch counts as delivered: a call here would let an interrupt lose it.
                self._held = None
                yield held.batch
                del held
            elif at.step and not has_delivered:
                # The state was taken after the loop's last batch, so continue with the next one.
                at = LoopPosition(at.epoch + 1, 0)
            else:
                break
        if self._mark == engine.mark:
            engine.state = engine.state._replace(loop=LoopPosition(at.epoch + 1, 0))

    def _next_of(self, epoch: int, step: int) -> Read | None:
        """Return what follows `step` batches of a loop, or None if all ranks end it there."""
        world, steps = self.engine.world, self.engine.plan.steps
        if steps != "equal":
            return self._hold(None) if step < (steps or 0) else None
        try:
            held = self._hold(epoch)
        except Exception:
            with suppress(StreampackError):  # the failure itself matters more
                _num_having(world, None, epoch, step)
            raise
        num = len(world.loading) - _num_having(world, held is not None, epoch, step)
        if num and not step:
            raise DataError(
                f"steps='equal': epoch {epoch} would have no step, since {num} of "
                f"{len(world.loading)} ranks have no batch{', this one' if held is None else ''}; "
                "give each rank and worker the samples of at least one batch, use fewer "
                "workers, or set Mixing(epoch_end='pad')"
            )
        return None if num else held

    def _hold(self, last_epoch: int | None) -> Read | None:
        """Read the next batch, unless one is held; return it if its epoch belongs to the loop."""
        num_empty, engine = 0, self.engine
        while self._held is None:
            if self._reading is None:
                if last_epoch is not None and engine.counter.next_epoch > last_epoch:
                    return None
                # A loader that is dropped ends its workers: what is suspended must not keep it.
                self._reading = close_at_exit(OnlineLoading._read(weakref.proxy(self)))
                self._has_read = False
            reading, self._reading = self._reading, None  # it stays so if reading fails
            held = next(reading, None)
            self._mark = engine.mark
            if held is not None:
                self._held, self._reading, self._has_read = held, reading, True
                break
            num_empty += not self._has_read
            if last_epoch is None and num_empty >= engine.most_empty_epochs:
                raise DataError(
                    f"steps={engine.plan.steps}: rank {engine.world.rank} has no batch in a whole "
                    "epoch, so it can take no steps; give each rank and worker the samples of at "
                    "least one batch, use fewer workers, or set Mixing(epoch_end='pad')"
                )
        is_own = last_epoch is None or self._held.position.epoch <= last_epoch
        return self._held if is_own else None

    def _epoch(self) -> Generator[Any, None, None]:
        with closing(self._read()) as reads:
            for batch, _, iteration, position in reads:
                self.engine.note(iteration, position)
                yield batch
                del batch

    def _read(self) -> Generator[Read, None, None]:
        """Read the next epoch, or the rest of the one in a loaded state."""
        engine, num_read = self.engine, 0
        with engine.iteration() as start:
            position = engine.whole_position(start, self.num_workers)
            for worker, native, change in self._deliveries(start, position):
                batch = engine.convert(self._pinned(native), self._ahead)
                provenance = engine.provenance(native)
                del native
                if self._finish is not None:
                    batch = self._finish(batch)
                self.recent.add(batch, provenance)
                position = position.after(worker, change)
                num_read += 1
                yield Read(batch, provenance, start, position)
                del batch  # free it before the next one is made
                engine.check_current(start)
            if not num_read and not start.states:
                engine.check_drops(start.epoch)
            engine.note(start, None)
        if not num_read and start.states:
            # The state was taken after the epoch's last batch, so continue with the next epoch.
            yield from self._read()

    def _deliveries(self, begun: Position, start: Position) -> Iterable[Delivery]:
        engine, ahead = self.engine, self._ahead
        if self.num_workers:
            if self._workers is None:
                self._workers = Pool(partial(_serve, engine, ahead), self._options)
            if begun.states:
                self._workers.end()  # new ones have sources that were not read yet
            return self._workers.results(repeat(None), first=start.next_worker, given=start)
        batches = engine.deliveries(begun, start.states[0], ahead)
        if ahead > 1 and self._options.prefetch_threads:
            return engine.read_ahead(batches, ahead)
        return batches

    def stats(self, over_ranks: OverRanks = alone) -> dict[str, Any]:
        """Return delivery statistics of the current epoch, or of the last one."""
        engine, flows = self.engine, self.engine.state.last.flows
        plan, footprint = engine.plan, engine.footprint(0)
        streams = range(len(plan.names))
        counts = {
            key: [sum(int(flow["counts"][stream][column]) for flow in flows) for stream in streams]
            for column, key in enumerate(COUNTED)
        }
        # Queues have all streams, or one each.
        sampled = [[each for own in flow["queues"] for each in own["streams"]] for flow in flows]
        counts["skipped"] = [sum(own[stream]["skipped"] for own in sampled) for stream in streams]
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
            "longest_wait": max([flow["longest_wait"] for flow in flows], default=0),
            "digest": digest_of_values(engine.fingerprint()),
            "pack_shuffle": engine.pack_window(self.num_workers),
            "buffers": {
                "worker_tokens": max(tokens) + waiting_tokens,
                "worker_bytes": max(num_bytes) + footprint.format_bytes,
                "rank_tokens": sum(tokens) + waiting_tokens * len(tokens),
            },
        }


def _check_group(world: World) -> None:
    """Refuse ranks that torch's process group does not join."""
    if len(world.loading) == 1 or other_ranks(world):
        return
    found, group = "torch.distributed is not initialised", process_group()
    if group is not None:
        found = f"torch.distributed has {group[1]}, and this process is rank {group[0]} of them"
    raise ConfigError(
        f"steps='equal' has to be agreed upon by {world.num_ranks} ranks, but {found} (here: "
        f"rank {world.rank}); call torch.distributed.init_process_group in all of them, or "
        "set steps to a number, such as steps=1000"
    )


def _num_having(world: World, has_batch: bool | None, epoch: int, step: int) -> int:
    """Return how many ranks have a batch after `step` steps of `epoch`; all must call it.

    `has_batch` is None where this rank failed. A WorkerError tells that another rank failed or does
    not answer, and a ResumeError that the ranks are not at the same step. The sum uses a gloo group
    of its own: NCCL would make the training loop wait for the GPU at every step, and the trainer's
    own collectives must not come between.
    """
    num_ranks = len(world.loading)
    if num_ranks == 1:
        return int(bool(has_batch))
    sums = torch.tensor([bool(has_batch), has_batch is None, epoch, step], dtype=torch.int64)
    try:
        distributed.all_reduce(sums, group=cpu_group(world))
    except RuntimeError as error:
        raise WorkerError(
            f"steps='equal': another rank has ended, or gave no answer in {MINUTES} minutes "
            f"({error}); the log of the first rank that ended says why. Load the last state "
            "into every rank and restart the iteration"
        ) from error
    num_having, num_failed, *places = sums.tolist()
    if places != [epoch * num_ranks, step * num_ranks]:
        raise ResumeError(
            f"ranks are at different steps, this one ({world.rank}) at step {step} of epoch "
            f"{epoch}; load states that were saved after the same step on every rank, and leave a "
            "loop early on all ranks or on none"
        )
    if num_failed:
        raise WorkerError(
            f"{num_failed} of {num_ranks} ranks failed before step {step} of epoch {epoch}, "
            "so no rank takes it; their own errors say why. Load the last state into every rank "
            "and restart the iteration"
        )
    return int(num_having)
