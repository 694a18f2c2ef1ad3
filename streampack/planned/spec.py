"""What a dataset was asked for, and the part of the sequence that this rank gets.

::

    arguments --> DatasetSpec --> DeviceView --> PackSequence
                                      '--> "balance" in a state from inside a global batch

A balanced global batch is dealt as a whole. A state from inside it therefore fits only the world,
batch size and Balance that it was saved with; a state from its edge fits all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from streampack.balance import Balance
from streampack.batch.formats.registry import Formatter
from streampack.batch.slices import context_slice
from streampack.chapters import Chapter
from streampack.config import Mixing, Order, Packing
from streampack.config.combinations import check_combination
from streampack.errors import ResumeError
from streampack.gather.context_slice import ContextSlice
from streampack.plan.device_plan import DeviceView
from streampack.plan.recipe import Recipe
from streampack.streams import TokenStream
from streampack.types import State
from streampack.world import World


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DatasetSpec:
    """The specification of a dataset, from its arguments."""

    streams: tuple[TokenStream, ...]
    packing: Packing
    mixing: Mixing
    order: Order
    batch_size: int
    world: World
    balance: Balance | None = None
    chapters: tuple[Chapter, ...] = ()
    """The chapters of the run; empty: it has epochs."""
    skip: tuple[tuple[int, int], ...] = ()
    """Ranges [first, stop) of steps of a run of chapters that are not delivered."""
    context: ContextSlice | None = None
    """The slice of each row that this rank gets, or None for whole rows."""
    cache_limit: int | None = None
    """Cache limit in bytes for fetched shards on this node, or None for no limit."""
    keeps_packed: tuple[bool, ...]
    """For each stream, whether a fetched shard is kept next to its decompressed form."""
    loss_weights: tuple[float, ...] | None = None
    """The factor of each stream's losses, or None if all are 1."""
    fetched_for_lengths: list[int] = field(default_factory=list)
    """Bytes of each shard that was fetched to learn its lengths; grows."""

    @property
    def shape(self) -> tuple[Packing, int]:
        """What the shape of a batch depends on."""
        return self.packing, self.batch_size

    @property
    def size(self) -> str:
        """The size of a batch, as messages name it."""
        return f"{self.packing.size}, batch_size={self.batch_size}"

    @property
    def batch_tokens(self) -> int:
        """Token slots of a device batch."""
        return self.batch_size * self.packing.row_tokens

    def options_of_ranks(self) -> dict[str, Any]:
        """Return options that all ranks share, but not the packs."""
        world, balance = self.world, self.balance
        return {
            "batch_size": self.batch_size,
            "replication": world.replication,
            "nodes": world.num_nodes,
            "context_parallel": [world.context_parallel, world.context_layout],
            "balance": None if balance is None else [balance.within, balance.digest()],
        }

    def slice_for(self, convert: Formatter) -> ContextSlice | None:
        """Return the slice that this rank gets of each row in a batch format."""
        return context_slice(self.world, self.packing, convert, self.batch_tokens)

    def view(self, world: World | None = None) -> DeviceView:
        """Return the part of the sequence that a rank, or this one, gets."""
        return view_of(world or self.world, self.batch_size, self.balance)


def view_of(world: World, batch_size: int, balance: Balance | None) -> DeviceView:
    """Return the part of the sequence that a rank gets."""
    return DeviceView(
        place=world.place,
        num_devices=world.num_devices,
        batch_size=batch_size,
        balance=balance,
        sharing=sharing_of(world, balance),
    )


def sharing_of(world: World, balance: Balance | None) -> tuple[int, ...]:
    """Return the places of the devices that share packs with a rank's, in ascending order.

    >>> sharing_of(World(rank=1, num_ranks=4, ranks_per_node=2), Balance(within="node"))
    (0, 2)
    """
    if balance is None or balance.within == "rank":
        return (world.place,)
    if balance.within == "batch":
        return tuple(range(world.num_devices))
    return tuple(sorted({rank.place for rank in ranks_of_node(world)}))


def ranks_of_node(world: World) -> list[World]:
    """Return the ranks of this rank's node."""
    first = world.node * world.num_local_ranks
    return [replace(world, rank=rank) for rank in range(first, first + world.num_local_ranks)]


def check_whole_steps(recipe: Recipe, view: DeviceView) -> None:
    """Refuse a balanced global batch that is not a whole number of steps."""
    given = {"balance": view.balance, "global_batch_size": recipe.global_batch_size}
    check_combination({**given, "batch_size * devices": view.stride})


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
