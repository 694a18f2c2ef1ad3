"""The worlds in which a run was trained, as its states record them, and the states that fit one.

::

    "worlds": "[[0, 0, 8, 8, 1, 4, null, null], [0, 4096, 16, 8, 1, 2, null, null]]"
                epoch, position, ranks, ranks per node, replication, batch_size, balance

The dp_ranks of a World, if it has them, take the place of replication.

Packs do not depend on them. They say which rank got which row. They are one text, because a
distributed checkpoint loads only structures with as many entries as were saved.

A balanced global batch is dealt as a whole. A state from inside it has its "balance" too, and fits
only the world, batch size and Balance that it was saved with; a state from its edge fits all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple, Self

from streampack.balance import Balance
from streampack.errors import ConfigError, ResumeError
from streampack.plan.device_plan import DeviceView, view_of
from streampack.plan.recipe import MAX_PACKS, Recipe
from streampack.plan.state import Progress, check_value, wrong_value
from streampack.types import State
from streampack.world import World


class RunWorld(NamedTuple):
    """A world of a run, and where it began."""

    epoch: int
    position: int
    num_ranks: int
    ranks_per_node: int
    replication: int | list[int]
    batch_size: int
    within: str | None
    """Which ranks shared packs, or None if there was no balance."""
    cost: str | None
    """Digest of the balance's cost."""

    @classmethod
    def of(cls, epoch: int, position: int, world: World, view: DeviceView) -> Self:
        """Return a world and a batch size as a state records them."""
        balance = view.balance
        within, cost = (None, None) if balance is None else (balance.within, balance.digest())
        sharing = world.replication if world.dp_ranks is None else list(world.dp_ranks)
        sizes = world.num_ranks, world.num_local_ranks
        if world.dp_size is not None and world.dp_ranks is None:
            sizes = world.dp_size, len(world.places[1][0])  # its ranks are not known
        return cls(epoch, position, *sizes, sharing, view.batch_size, within, cost)

    def world(self, rank: int) -> World:
        """Return a rank of this world."""
        return World(
            rank=rank,
            num_ranks=self.num_ranks,
            ranks_per_node=self.ranks_per_node,
            replication=self.replication if not isinstance(self.replication, list) else 1,
            dp_ranks=self.replication if isinstance(self.replication, list) else None,
        )

    def view(self, rank: int, balance: Balance | None = None) -> DeviceView:
        """Return the part of the sequence that a rank of this world got, with a balance or none."""
        return view_of(self.world(rank), self.batch_size, balance)


def worlds_in(state: State) -> list[RunWorld]:
    """Return the worlds of a state after a check; none of a state that records none."""
    try:
        worlds = [RunWorld(*row) for row in json.loads(state.get("worlds", "[]"))]
        for world in worlds:
            world.world(0)
            check_value("worlds", world.batch_size, range(1, 2**31 + 1))
    except (TypeError, ValueError, ConfigError) as error:
        raise wrong_value("worlds", state.get("worlds"), "a list of worlds") from error
    return worlds


def balance_in_state(recipe: Recipe, view: DeviceView, position: int) -> State:
    """Return what a state at this position records of a balance; empty at a global batch's edge."""
    if view.balance is None or position % recipe.global_batch_size == 0:
        return {}
    return {
        "balance": {
            "within": view.balance.within,
            "cost": view.balance.digest(),
            "devices": view.num_devices,
            "sharing": len(view.sharing),
            "batch_size": view.batch_size,
        }
    }


def check_balance(
    state: State, recipe: Recipe, view: DeviceView, num_packs: Callable[[], int]
) -> None:
    """Refuse a state from inside a global batch that was saved with another balance.

    `recipe` is that of the state. `num_packs` returns the packs in its epoch, and is called only
    before a refusal. The ResumeError names the last edge.
    """
    size, position = recipe.global_batch_size, state["position"]
    saved, own = state.get("balance"), balance_in_state(recipe, view, position).get("balance")
    edge = position // size * size
    if saved == own or edge == position or edge + size > num_packs():
        return
    raise ResumeError(
        f"the state is inside a global batch, at position {position}, and was saved with "
        f"balance={saved!r:.200}, but this dataset has {own!r}; resume with the saved balance, "
        f"batch_size and ranks, or from the edge of the global batch: set the state's 'position' "
        f"to {edge}"
    )


def check_resized(saved: Recipe, own: Recipe, progress: Progress) -> None:
    """Check that a change of the global batch size leaves the packs unchanged.

    `own` is the recipe of the state with the new size. The ResumeError names both sizes, and sizes
    that work.
    """
    size, before = own.global_batch_size, saved.global_batch_size
    if size == before:
        return
    epoch, position = progress.epoch, progress.position
    is_same = own.is_mixed and own.packs_per_carry_epoch == saved.packs_per_carry_epoch
    if (position and not own.is_mixed) or (own.is_endless and epoch and not is_same):
        why = (
            "another size gives other packs, as batches have one stream or epochs of whole batches "
            "came before; "
        )
    elif position % size:
        sizes = nearest_divisors(position, size)
        why = f"position {position} is not a multiple of it; set it to {sizes}, or "
    else:
        return
    raise ResumeError(
        f"the state was saved with global_batch_size={before}, but this dataset asks for {size}, "
        f"and {why}omit it to keep {before}"
    )


def check_at_batch(begin: int, position: int, view: DeviceView) -> None:
    """Refuse a state with a `position` inside a batch; the sequence begins at `begin`."""
    batch_size = view.batch_size
    if begin % batch_size:
        raise ResumeError(
            f"the state's position {position} is not a multiple of batch_size="
            f"{batch_size}; set batch_size to "
            f"{nearest_divisors(position, batch_size)}, on any number of ranks"
        )


def nearest_divisors(position: int, size: int) -> str:
    """Return, as text, the batch sizes nearest to `size` that divide `position`.

    >>> nearest_divisors(60, 8), nearest_divisors(12, 24)
    ('6 or 10', '12')
    """
    least, most = min(size, position), min(position, MAX_PACKS)
    below = next(n for n in range(least, 0, -1) if position % n == 0)
    above = next((n for n in range(size, most + 1) if position % n == 0), None)
    return f"{below}" if above is None else f"{below} or {above}"
