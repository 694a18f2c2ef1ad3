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
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import distributed

from streampack._checks import read_count
from streampack._state import MAX_EPOCH, FieldChecks
from streampack.config import Mixing
from streampack.config.combinations import check_combination
from streampack.errors import (
    ConfigError,
    DataError,
    ResumeError,
    StreampackError,
    WorkerError,
)
from streampack.runtime.at_exit import close_at_exit
from streampack.runtime.epoch_counter import SharedEpochCounter
from streampack.runtime.provenance import Provenance
from streampack.runtime.rank_digest import other_ranks
from streampack.types import State
from streampack.world import World, process_group

Steps: TypeAlias = int | Literal["equal"]
"""Steps of a loop: as many on every rank, or until the first rank has delivered its epoch."""
CHECKS = FieldChecks("the state's loop.")
MAX_STEP = 2**63 - 1
MINUTES = 30
"""How long a rank waits for the others, as torch's other gloo groups do."""
_groups: dict[str, Any] = {}  # torch's default group, and the group made for it


class LoopPosition(NamedTuple):
    """A position in the loops of a rank."""

    epoch: int
    """Number of the loop; what the sources are at may lag behind."""
    step: int
    """Batches of the loop that were delivered."""


class Read(NamedTuple):
    """A batch that was read."""

    batch: Any
    epoch: int
    deliver: Callable[[], None]
    """Moves the position behind it. It is a function of Python, not a partial: Python looks for
    signals after a call of C, and an interrupt there would lose the batch."""
    origin: Provenance | None = None
    """The provenance of the batch, which learns its step; None: a loop over the dataset."""


def delivered(reading: Generator[Read, None, None]) -> Generator[Any, None, None]:
    """Yield the batches of an epoch, and deliver each one first."""
    with closing(reading):
        for batch, _, deliver, _ in reading:
            deliver()
            yield batch
            del batch  # free it before the next one is made


class Loops:
    """The position of a rank in its loops, as its states hold it."""

    def __init__(self, steps: Steps | None, most_empty: int = 1) -> None:
        self.steps = steps
        self.most_empty = most_empty
        """Epochs without a batch, one after the other, that end a loop of a number of steps."""
        self.num_moves = 0
        """Number of times that a state was loaded or the epoch set."""
        self.at = LoopPosition(0, 0)
        """Where the last loop is."""
        self.next = LoopPosition(0, 0)
        """Where the next loop begins."""

    def go_to(self, epoch: int, step: int = 0) -> None:
        self.at = self.next = LoopPosition(epoch, step)

    def state_dict(self) -> State:
        """Return the key of a state; none without `steps`."""
        if self.steps is None:
            return {}
        return {"loop": {"epoch": self.at.epoch, "step": self.at.step, "steps": self.steps}}

    def read(self, state: State) -> LoopPosition:
        """Return the position in a state of one worker, or of a loader.

        A state that was saved without `steps` is in the loop of its epoch. A ResumeError refuses
        loops that ended by another rule.
        """
        loop = state.get("loop")
        if loop is None:
            workers = state.get("workers", [state])
            epoch = max(int(worker["epoch"]) for worker in workers)
            flows = [each["flow"] for each in workers if each["flow"] and each["epoch"] == epoch]
            return LoopPosition(epoch, sum(int(flow["num_batches"]) for flow in flows))
        CHECKS.mapping("loop", loop)
        saved = loop.get("steps")
        if self.steps is not None and (saved == "equal") != (self.steps == "equal"):
            raise ResumeError(
                f"the state was saved with steps={saved!r:.80}, but this dataset has steps="
                f"{self.steps!r}; ranks would be in epochs of other numbers, so resume with "
                f"{'steps=' + repr('equal') if saved == 'equal' else 'a number of steps'}"
            )
        return LoopPosition(
            CHECKS.integer("epoch", loop.get("epoch"), 0, MAX_EPOCH),
            CHECKS.integer("step", loop.get("step"), 0, MAX_STEP),
        )


class EvenSteps:
    """Reads a rank's epochs and delivers them in loops.

    `reader.read_epoch()` reads the next epoch, or from a loaded state; after `reader.reload()`, it
    continues at the position if an epoch was left there.
    """

    def __init__(
        self, loops: Loops, reader: Any, world: World, counter: SharedEpochCounter
    ) -> None:
        self._loops = loops
        self._counter = counter
        self._reader = reader
        self._world = world
        self._reading: Iterator[Read] | None = None
        self._has_read = False  # a batch of the epoch that is being read
        self._held: Read | None = None  # a batch that is not delivered
        self._num_moves = loops.num_moves  # as of these

    def loop(self) -> Generator[Any, None, None]:
        """Yield the batches of the next loop."""
        if self._loops.steps == "equal":
            _check_group(self._world)
        if not self._is_current:
            self._reading = self._held = None
        if self._reading is None and self._held is None:  # or reading failed
            self._reader.reload()
        self._num_moves = self._loops.num_moves
        (epoch, step), has_delivered = self._loops.next, False
        while True:
            if self._has_next(epoch, step):
                step, has_delivered = step + 1, True
                yield self._deliver(LoopPosition(epoch, step))
            elif step and not has_delivered:
                # The state was taken after the loop's last batch, so continue with the next one.
                epoch, step = epoch + 1, 0
            else:
                break
        if self._is_current:
            self._loops.go_to(epoch + 1)

    @property
    def _is_current(self) -> bool:
        return self._num_moves == self._loops.num_moves

    def _deliver(self, at: LoopPosition) -> Any:
        loops, held, following = self._loops, self._held, LoopPosition(at.epoch + 1, 0)
        if held is None:
            raise RuntimeError("no batch was read")
        if held.origin is not None and isinstance(loops.steps, int):
            held.origin.step_of = partial(int, at.epoch * loops.steps + at.step - 1)
        # The batch counts as delivered with the first line: no call may come after it.
        if self._is_current:
            held.deliver()
            loops.at, loops.next = at, following
        self._held = None
        return held.batch

    def _has_next(self, epoch: int, step: int) -> bool:
        steps = self._loops.steps
        if steps != "equal":
            return step < (steps or 0) and self._read(None)
        try:
            has_batch = self._read(epoch)
        except Exception:
            with suppress(StreampackError):  # the failure itself matters more
                _num_having(self._world, None, epoch, step)
            raise
        num_having = _num_having(self._world, has_batch, epoch, step)
        if num_having < self._world.num_ranks and not step:
            num = self._world.num_ranks - num_having
            raise DataError(
                f"steps='equal': epoch {epoch} would have no step, since {num} of "
                f"{self._world.num_ranks} ranks have no batch{'' if has_batch else ', this one'}; "
                "give each rank and worker at least batch_size packs of samples, use fewer "
                "workers, or set Mixing(epoch_end='pad')"
            )
        return num_having == self._world.num_ranks

    def _read(self, last_epoch: int | None) -> bool:
        """Read the next batch, unless one is held; return whether its epoch belongs to the loop."""
        num_empty, loops = 0, self._loops
        while self._held is None:
            if self._reading is None:
                if last_epoch is not None and self._counter.next_epoch > last_epoch:
                    return False
                self._reading, self._has_read = close_at_exit(self._reader.read_epoch()), False
            reading, self._reading = self._reading, None  # it stays so if reading fails
            moves = loops.num_moves
            self._held = next(reading, None)
            self._num_moves += loops.num_moves - moves  # by the reading itself
            if self._held is not None:
                self._reading, self._has_read = reading, True
                break
            num_empty += not self._has_read
            if last_epoch is None and num_empty >= loops.most_empty:
                raise DataError(
                    f"steps={loops.steps}: rank {self._world.rank} has no batch in a whole "
                    "epoch, so it can take no steps; give each rank and worker at least batch_size "
                    "packs of samples, use fewer workers, or set Mixing(epoch_end='pad')"
                )
        return last_epoch is None or self._held.epoch <= last_epoch


def check_steps(steps: object, mixing: Mixing | None) -> Steps | None:
    """Return `steps` as an int, "equal" or None; refuse values that do not go with the mixing.
    >>> check_steps("equal", None), check_steps(1000, None)
    ('equal', 1000)
    """
    if steps is None:
        return None
    mixing = mixing or Mixing()
    number: Steps = "equal"
    if steps != "equal":
        number = read_count("steps", steps, "write a number of steps, such as 1000, or 'equal'")
    given = {"stop": mixing.stop, "batching_method": mixing.batching_method}
    check_combination({"steps": number, **given})
    return number


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
        distributed.all_reduce(sums, group=_group())
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


def _group() -> Any:
    """Return the group to sum in. Collective at the first call: every rank must make it."""
    default = distributed.group.WORLD
    if not _groups or _groups["default"] is not default:
        own = distributed.new_group(backend="gloo", timeout=timedelta(minutes=MINUTES))
        _groups.update(default=default, own=own)
    return _groups["own"]
