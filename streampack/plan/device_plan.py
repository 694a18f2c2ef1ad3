"""The part of the canonical sequence that one device gets.

::

    stride      devices * batch_size slots = one step;   the device at place p takes the p-th batch
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from streampack.balance import Balance
from streampack.plan.lane_stream import skips_lanes
from streampack.plan.recipe import Recipe
from streampack.types import NO_PACKS, Int64Array, Packs
from streampack.world import World

AlikeBatches: TypeAlias = tuple[Packs, int, int]
"""Packs of one length, the batches that they are, and their length in slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """The part of the sequence that a device gets."""

    place: int = 0
    """Index of the device's batch within each step."""
    num_devices: int = 1
    """Number of device batches in a step."""
    batch_size: int = 1
    """Packs per device batch."""
    balance: Balance | None = None
    """How the packs of a global batch are dealt to `sharing`, or None if they are not dealt."""
    sharing: tuple[int, ...] = ()
    """Places of the devices that share packs, in ascending order, with this one."""

    @property
    def shared(self) -> list[DeviceView]:
        """The views of the devices that share packs, without balance; at least this one's."""
        places = self.sharing if self.balance is not None else (self.place,)
        return [replace(self, place=place, balance=None) for place in places]

    @property
    def stride(self) -> int:
        """Slots from one batch of a device to the next: those that all devices take in one step."""
        return self.num_devices * self.batch_size

    def first_slot(self, position: int) -> int:
        """Return the first slot of this device's batch in the step that begins at `position`.

        The device at place p takes the batches k with k mod num_devices == p, wherever the step
        begins. It therefore keeps its lanes after a resume with another number of devices.

        >>> [DeviceView(place=p, num_devices=2, batch_size=4).first_slot(12) for p in (0, 1)]
        [16, 12]
        """
        turn = (self.place - position // self.batch_size) % self.num_devices
        return position + turn * self.batch_size

    def slots_from(self, begins: Int64Array) -> Int64Array:
        """Return the slots of the device batches that begin at `begins`, along a last axis."""
        slots: Int64Array = begins[..., None] + np.arange(self.batch_size)
        return slots

    def locate(self, slot: int, position: int) -> tuple[int, int, int]:
        """Return the place that gets a slot, and batch and row there, in a step at `position`.

        The row is a slot's. Batches count from the first of the place in the step.

        >>> [DeviceView(num_devices=2, batch_size=4).locate(slot, 12) for slot in (12, 17, 21)]
        [(1, 0, 0), (0, 0, 1), (1, 1, 1)]
        """
        number, row = divmod(slot, self.batch_size)
        place = number % self.num_devices
        first = replace(self, place=place).first_slot(position)
        return place, (slot - first) // self.stride, row


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
    places, neighbours = world.places
    return tuple(sorted(places[device] for device in neighbours[world.device]))


def ranks_of_node(world: World) -> list[World]:
    """Return the ranks of this rank's node."""
    first = world.node * world.num_local_ranks
    return [world.at(rank) for rank in range(first, first + world.num_local_ranks)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DevicePlan:
    """The plan of one or more consecutive batches of a device."""

    packs: Packs
    """The packs, batch after batch. A padded last batch has fewer than num_rows packs, and is then
    the only batch."""
    num_rows: int
    """Packs per batch, including padding packs."""
    epoch: int
    positions: list[int]
    """For each batch: slots of the epoch delivered over all ranks after its step."""
    slots_per_pack: int = 1
    """Length of these packs, in slots."""
    num_batches: int = field(init=False)
    """Number of batches."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_batches", len(self.positions))

    @property
    def position(self) -> int:
        """Packs of the epoch delivered over all ranks after the last of these steps."""
        return self.positions[-1]

    def slice(self, first: int, last: int) -> DevicePlan:
        """Return the plan of batches [first, last)."""
        if first == 0 and last == len(self.positions):
            return self
        return DevicePlan(
            packs=self.packs.slice(first * self.num_rows, last * self.num_rows),
            num_rows=self.num_rows,
            epoch=self.epoch,
            positions=self.positions[first:last],
            slots_per_pack=self.slots_per_pack,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Totals:
    """What iterations dropped, substituted and omitted, and their high-water marks."""

    dropped: Int64Array
    """Dropped samples per stream, shape (num_streams,)."""
    substituted: int = 0
    """Slots that another stream served."""
    skipped: int = 0
    """Steps that were not delivered."""
    omitted: int = 0
    """Packs that the ends of epochs omitted."""
    packer_tokens: int = 0
    """High-water mark of the packers' buffers."""
    straggler: tuple[float, float] | None = None
    """Time of a global batch over the ideal, as planned and as dealt, or None if none was dealt."""

    def __add__(self, later: Totals) -> Totals:
        return Totals(
            dropped=self.dropped + later.dropped,
            substituted=self.substituted + later.substituted,
            skipped=self.skipped + later.skipped,
            omitted=self.omitted + later.omitted,
            packer_tokens=max(self.packer_tokens, later.packer_tokens),
            straggler=later.straggler or self.straggler,  # a mean of one iteration
        )


class BatchPacks:
    """The packs of consecutive batches of a device; each batch has packs of one length.

    The last batch may have fewer packs than the others. `slots_per_pack` is the length of each
    batch's packs, shape (num_batches,).

    Attributes:
        bounds: Packs before each batch, followed by their total; num_batches + 1 integers.
    """

    def __init__(self, packs: Packs, slots_per_pack: Int64Array, view: DeviceView) -> None:
        self.packs = packs
        self.slots_per_pack = slots_per_pack
        # Lists, because `take` is called for every batch.
        self.bounds: list[int] = [0, *np.cumsum(view.batch_size // slots_per_pack).tolist()]
        self.bounds[-1] = len(packs.ends)
        self._slots: list[int] = slots_per_pack.tolist()
        ends = np.append(np.flatnonzero(np.diff(slots_per_pack)) + 1, len(slots_per_pack))
        self._ends: list[int] = np.repeat(ends, np.diff(ends, prepend=0)).tolist()

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, first: int, most: int, num_slots: int | None = None) -> AlikeBatches:
        """Return up to `most` batches from `first` on, with packs of one length.

        Only the packs of `num_slots` slots are returned; all by default.
        """
        slots, last = self._slots[first], min(first + most, self._ends[first])
        begin, end = self.bounds[first], self.bounds[last]
        if num_slots is not None:
            end = min(end, begin + num_slots // slots)
        packs = self.packs if end - begin == self.bounds[-1] else self.packs.slice(begin, end)
        return packs, last - first, slots


NO_BATCHES = BatchPacks(NO_PACKS, np.zeros(0, np.int64), DeviceView())


def touched_lanes(recipe: Recipe, view: DeviceView, position: int = 0, before: int = 0) -> set[int]:
    """Return the lanes that a device plans from a position on, while no lane is dry.

    With balance, these are the lanes of all devices that share packs. All lanes if slots skip
    some of them.

    `before` is the number of slots of the run before the epoch, with carry.
    """
    lanes, lane_turn = recipe.num_lanes, recipe.lane_turn
    # Batches begin at first + n * stride. Only their offset within a cycle of lanes matters.
    spacing = math.gcd(lanes * lane_turn, view.stride)
    if spacing <= lane_turn or skips_lanes(recipe):
        return set(range(lanes))
    return {
        number % lanes
        for each in view.shared
        for start in range(
            (before + each.first_slot(position)) % spacing, lanes * lane_turn, spacing
        )
        for number in range(start // lane_turn, (start + view.batch_size - 1) // lane_turn + 1)
    }
