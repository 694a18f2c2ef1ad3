"""The part of the sequence that this rank gets, and with whom it shares packs.

::

    World, batch_size, Balance --> DeviceView --> PackSequence
                                       '--> "balance" in a state from inside a global batch

A balanced global batch is dealt as a whole. A state from inside it therefore fits only the world,
batch size and Balance that it was saved with; a state from its edge fits all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from streampack.balance import Balance
from streampack.config.combinations import check_combination
from streampack.errors import ResumeError
from streampack.plan import DeviceView, Recipe
from streampack.types import State
from streampack.world import World


def device_view(world: World, batch_size: int, balance: Balance | None = None) -> DeviceView:
    """Return the view of a rank.

    >>> world = World(rank=1, num_ranks=4, ranks_per_node=2)
    >>> device_view(world, 8, Balance(within="node")).sharing
    (0, 2)
    """
    place, num_devices = world.place, world.num_devices
    sharing = {place}
    if balance is not None and balance.within == "node":
        sharing = {rank.place for rank in ranks_of_node(world)}
    elif balance is not None and balance.within == "batch":
        sharing = set(range(num_devices))
    return DeviceView(
        place=place,
        num_devices=num_devices,
        batch_size=batch_size,
        balance=balance,
        sharing=tuple(sorted(sharing)),
    )


def ranks_of_node(world: World) -> list[World]:
    """Return the ranks of this rank's node."""
    first = world.node * world.num_local_ranks
    return [replace(world, rank=rank) for rank in range(first, first + world.num_local_ranks)]


def check_whole_steps(recipe: Recipe, view: DeviceView) -> None:
    """Refuse a balanced global batch that is not a whole number of steps."""
    given = {"balance": view.balance, "global_batch_size": recipe.global_batch_size}
    check_combination({**given, "batch_size * devices": view.window})


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
        f"the state lies inside a global batch, at position {position}, and was saved with "
        f"balance={saved!r:.200}, but this dataset has {own!r}; resume with the saved balance, "
        f"batch_size and ranks, or from the edge of the global batch: set the state's 'position' "
        f"to {edge}"
    )
