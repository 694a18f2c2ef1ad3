"""The worlds in which a run was trained, as its states record them.

::

    "worlds": "[[0, 0, 8, 8, 1, 4, null, null], [0, 4096, 16, 8, 1, 2, null, null]]"
                epoch, position, ranks, ranks per node, replication, batch_size, balance

Packs do not depend on them. They say which rank got which row. They are one text, because a
distributed checkpoint loads only structures with as many entries as were saved.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from streampack.balance import Balance
from streampack.errors import ConfigError
from streampack.plan.device_plan import DeviceView
from streampack.plan.state_differences import CHECKS
from streampack.planned.spec import view_of
from streampack.types import State
from streampack.world import World


class RunWorld(NamedTuple):
    """A world of a run, and where it began."""

    epoch: int
    position: int
    num_ranks: int
    ranks_per_node: int
    replication: int
    batch_size: int
    within: str | None
    """Which ranks shared packs, or None if there was no balance."""
    cost: str | None
    """Digest of the balance's cost."""

    def world(self, rank: int) -> World:
        """Return a rank of this world."""
        return World(
            rank=rank,
            num_ranks=self.num_ranks,
            ranks_per_node=self.ranks_per_node,
            replication=self.replication,
        )

    def view(self, rank: int, balance: Balance | None = None) -> DeviceView:
        """Return the part of the sequence that a rank of this world got, with a balance or none."""
        return view_of(self.world(rank), self.batch_size, balance)


def run_world(epoch: int, position: int, world: World, view: DeviceView) -> RunWorld:
    """Return a world and a batch size as a state records them."""
    balance = view.balance
    return RunWorld(
        epoch=epoch,
        position=position,
        num_ranks=world.num_ranks,
        ranks_per_node=world.num_local_ranks,
        replication=world.replication,
        batch_size=view.batch_size,
        within=None if balance is None else balance.within,
        cost=None if balance is None else balance.digest(),
    )


def worlds_text(worlds: Sequence[RunWorld]) -> str:
    """Return worlds as the text in a state."""
    return json.dumps(worlds, separators=(",", ":"))


def worlds_in(state: State) -> list[RunWorld]:
    """Return the worlds of a state after a check; none of a state that records none."""
    try:
        worlds = [RunWorld(*row) for row in json.loads(state.get("worlds", "[]"))]
        for world in worlds:
            world.world(0)
            CHECKS.integer("worlds", world.batch_size, 1, 2**31)
    except (TypeError, ValueError, ConfigError) as error:
        raise CHECKS.error("worlds", state.get("worlds"), wanted="a list of worlds") from error
    return worlds
