"""What a dataset was asked for, and the part of the sequence that this rank gets.

::

    arguments --> DatasetSpec --> DeviceView --> PackSequence
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from streampack.balance import Balance
from streampack.batch.formats.registry import Formatter
from streampack.batch.slices import context_slice
from streampack.chapters import Chapter
from streampack.config import Mixing, Order, Packing
from streampack.gather.context_slice import ContextSlice
from streampack.plan.device_plan import DeviceView, view_of
from streampack.streams import TokenStream
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
            "dp_size and dp_ranks": [world.dp_size, world.dp_ranks],
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
