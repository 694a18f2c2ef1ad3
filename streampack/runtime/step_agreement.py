"""Agree over all ranks, at each step, whether every rank has a batch.

::

    rank 0   has a batch  --.
    rank 1   has a batch  --+-- all_reduce of one integer --> 2 of 3: no rank takes the step
    rank 2   has none     --'

The sum also tells whether a rank failed, and whether all ranks are at the same step. It is summed
in a gloo group of its own, one for all loaders of the process. NCCL would make the training loop
wait for the GPU at every step, and the trainer's own collectives must not come between.

Cost: one all_reduce of one integer per step, on the CPU; see docs/iterables.md.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from streampack.errors import ConfigError, ResumeError, WorkerError
from streampack.runtime.rank_digest import other_ranks
from streampack.world import World, process_group

MAX_SUM = 2**62
MINUTES = 30
"""How long a rank waits for the others, as torch's other gloo groups do."""
_groups: dict[str, Any] = {}  # torch's default group, and the group made for it


class StepAgreement:
    """The ranks of torch's process group that take their steps together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sum = torch.zeros(1, dtype=torch.int64)

    def check(self) -> None:
        """Check that the ranks can agree; every rank must then call `all_have`.

        Raises:
            ConfigError: If there are other ranks, but torch's process group does not join them.
        """
        world = self._world
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

    def all_have(self, has_batch: bool, epoch: int, step: int) -> int:
        """Return how many ranks have a batch after `step` steps of `epoch`; all must call it.

        Raises:
            WorkerError: If another rank failed, or does not answer.
            ResumeError: If the ranks are not at the same step.
        """
        if self._world.num_ranks == 1:
            return int(has_batch)
        base = self._world.num_ranks + 1
        code = self._code(epoch, step)
        theirs, told = divmod(self._reduce(code * base**2 + has_batch), base**2)
        if theirs != code * self._world.num_ranks:
            raise ResumeError(
                f"ranks are at different steps, this one ({self._world.rank}) at step {step} of "
                f"epoch {epoch}; load states that were saved after the same step on every rank, "
                "and leave a loop early on all ranks or on none"
            )
        num_failed, num_having = divmod(told, base)
        if num_failed:
            raise WorkerError(
                f"{num_failed} of {self._world.num_ranks} ranks failed before step {step} of epoch "
                f"{epoch}, so no rank takes it; their own errors say why. Load the last state "
                "into every rank and restart the iteration"
            )
        return num_having

    def tell_failure(self, epoch: int, step: int) -> None:
        """Tell the other ranks that this one failed, in place of `all_have`.

        Raises:
            WorkerError: If they do not answer.
        """
        if self._world.num_ranks > 1:
            base = self._world.num_ranks + 1
            self._reduce(self._code(epoch, step) * base**2 + base)

    def _code(self, epoch: int, step: int) -> int:
        """Return a number of the step, so small that the sum over all ranks fits."""
        most = MAX_SUM // (self._world.num_ranks + 1) ** 3
        return (epoch * 1_000_003 + step) % max(most, 1)

    def _reduce(self, value: int) -> int:
        try:
            self._sum[0] = value
            distributed.all_reduce(self._sum, group=_group())
        except RuntimeError as error:
            raise WorkerError(
                f"steps='equal': another rank has ended, or gave no answer in {MINUTES} minutes "
                f"({error}); the log of the first rank that ended says why. Load the last state "
                "into every rank and restart the iteration"
            ) from error
        return int(self._sum[0])


def _group() -> Any:
    """Return the group to sum in. Collective at the first call: every rank must make it."""
    default = distributed.group.WORLD
    if not _groups or _groups["default"] is not default:
        own = distributed.new_group(backend="gloo", timeout=timedelta(minutes=MINUTES))
        _groups.update(default=default, own=own)
    return _groups["own"]
