"""Loops of equally many steps on every rank, over sources of unequal length.

::

    what rank 0 reads    [ epoch 0: 41 batches ][ epoch 1: 41 batches ] ...
    what rank 1 reads    [ epoch 0: 36 batches ][ epoch 1: 36 batches ] ...

    steps=30        loops of 30 batches on both
    steps="equal"   a loop ends when the first rank has delivered its epoch of that number: 36 steps

With "equal", all ranks sum before each step how many of them have a batch, how many failed, and
where they are. The sum uses a gloo group of its own, one for all loaders of the process: NCCL would
make the training loop wait for the GPU at every step, and the trainer's own collectives must not
come between.

Cost: none with a number of steps; with "equal", one all_reduce of four integers on the CPU at every
step, see docs/iterables.md. Memory: one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import distributed

from streampack.errors import ConfigError, DataError, ResumeError, StreampackError, WorkerError
from streampack.online.engine import OnlineEngine, OnlineIteration
from streampack.online.state import LoopPosition, Position
from streampack.runtime.at_exit import close_at_exit
from streampack.runtime.provenance import NativeOrigin
from streampack.runtime.rank_digest import MINUTES, cpu_group, other_ranks
from streampack.world import World, process_group


class Read(NamedTuple):
    """A batch that was read, and is delivered once the engine notes its position."""

    batch: Any
    origin: NativeOrigin
    iteration: OnlineIteration
    position: Position
    """Behind the batch."""


class EvenSteps:
    """Delivers what a rank reads, epoch after epoch, in loops; `read` reads the next epoch."""

    def __init__(
        self, engine: OnlineEngine, read: Callable[[], Generator[Read, None, None]]
    ) -> None:
        self._engine = engine
        self._read = read
        self._steps = engine.plan.steps
        self._reading: Iterator[Read] | None = None
        self._has_read = False  # a batch of the epoch that is being read
        self._held: Read | None = None  # a batch that is not delivered
        self._mark = engine.mark  # as of these

    def loop(self) -> Generator[Any, None, None]:
        """Yield the batches of the next loop."""
        engine = self._engine
        if self._steps == "equal":
            _check_group(engine.world)
        if self._mark != engine.mark:  # another loader reads, or a state was loaded
            self._reading = self._held = None
        if self._reading is None and self._held is None:  # or reading failed
            engine.reload()
        at, has_delivered = engine.loop.next, False
        while True:
            if self._has_next(at.epoch, at.step):
                at, has_delivered = LoopPosition(at.epoch, at.step + 1, is_begun=True), True
                yield self._deliver(at)
            elif at.step and not has_delivered:
                # The state was taken after the loop's last batch, so continue with the next one.
                at = LoopPosition(at.epoch + 1, 0)
            else:
                break
        if self._mark == engine.mark:
            engine.loop = LoopPosition(at.epoch + 1, 0)

    def _deliver(self, at: LoopPosition) -> Any:
        engine, held = self._engine, self._held
        if held is None:
            raise RuntimeError("no batch was read")
        if isinstance(self._steps, int):
            held.origin.step = at.epoch * self._steps + at.step - 1
        engine.note(held.iteration, held.position)
        # The batch counts as delivered: a call here would let an interrupt lose it.
        engine.loop, self._held = at, None
        return held.batch

    def _has_next(self, epoch: int, step: int) -> bool:
        if self._steps != "equal":
            return step < (self._steps or 0) and self._hold(None)
        world = self._engine.world
        try:
            has_batch = self._hold(epoch)
        except Exception:
            with suppress(StreampackError):  # the failure itself matters more
                _num_having(world, None, epoch, step)
            raise
        num_having = _num_having(world, has_batch, epoch, step)
        if num_having < world.num_ranks and not step:
            num = world.num_ranks - num_having
            raise DataError(
                f"steps='equal': epoch {epoch} would have no step, since {num} of "
                f"{world.num_ranks} ranks have no batch{'' if has_batch else ', this one'}; "
                "give each rank and worker the samples of at least one batch, use fewer "
                "workers, or set Mixing(epoch_end='pad')"
            )
        return num_having == world.num_ranks

    def _hold(self, last_epoch: int | None) -> bool:
        """Read the next batch, unless one is held; return whether its epoch belongs to the loop."""
        num_empty, engine = 0, self._engine
        while self._held is None:
            if self._reading is None:
                if last_epoch is not None and engine.counter.next_epoch > last_epoch:
                    return False
                self._reading, self._has_read = close_at_exit(self._read()), False
            reading, self._reading = self._reading, None  # it stays so if reading fails
            held = next(reading, None)
            self._mark = engine.mark
            if held is not None:
                self._held, self._reading, self._has_read = held, reading, True
                break
            num_empty += not self._has_read
            if last_epoch is None and num_empty >= engine.most_empty_epochs:
                raise DataError(
                    f"steps={self._steps}: rank {engine.world.rank} has no batch in a whole "
                    "epoch, so it can take no steps; give each rank and worker the samples of at "
                    "least one batch, use fewer workers, or set Mixing(epoch_end='pad')"
                )
        return last_epoch is None or self._held.position.epoch <= last_epoch


def _check_group(world: World) -> None:
    """Refuse ranks that torch's process group does not join."""
    if world.num_ranks == 1 or other_ranks(world):
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
    not answer, and a ResumeError that the ranks are not at the same step.
    """
    if world.num_ranks == 1:
        return int(bool(has_batch))
    sums = torch.tensor([bool(has_batch), has_batch is None, epoch, step], dtype=torch.int64)
    try:
        distributed.all_reduce(sums, group=cpu_group())
    except RuntimeError as error:
        raise WorkerError(
            f"steps='equal': another rank has ended, or gave no answer in {MINUTES} minutes "
            f"({error}); the log of the first rank that ended says why. Load the last state "
            "into every rank and restart the iteration"
        ) from error
    num_having, num_failed, *places = sums.tolist()
    if places != [epoch * world.num_ranks, step * world.num_ranks]:
        raise ResumeError(
            f"ranks are at different steps, this one ({world.rank}) at step {step} of epoch "
            f"{epoch}; load states that were saved after the same step on every rank, and leave a "
            "loop early on all ranks or on none"
        )
    if num_failed:
        raise WorkerError(
            f"{num_failed} of {world.num_ranks} ranks failed before step {step} of epoch {epoch}, "
            "so no rank takes it; their own errors say why. Load the last state into every rank "
            "and restart the iteration"
        )
    return int(num_having)
