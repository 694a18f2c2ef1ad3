"""The rows that the ranks of a run got in a step: packs of a global batch, dealt as they were.

::

    slots of a global batch    0 1 2 3 | 4 5 6 7      2 devices, batches of 2
    device                     0 0 1 1 | 0 0 1 1
    its batch in the step      0 0 0 0 | 1 1 1 1
    row                        0 1 0 1 | 0 1 0 1

Where the world changed inside a step, each pack went to the world at its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from streampack.balance import Within
from streampack.errors import ConfigError
from streampack.plan.deal import Dealer
from streampack.plan.device_plan import BatchPacks
from streampack.plan.reader import SlotPack
from streampack.plan.run_worlds import RunWorld
from streampack.planned.engine import PlanEngine
from streampack.types import Int64Array, Packs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A row of a batch."""

    ranks: tuple[int, ...]
    """The ranks that got it; several if they share batches. They are numbers of `dp_rank` if the
    run's `World(dp_rank=...)` does not tell which ranks these are."""
    batch: int
    """Which of their batches in the step, from 0."""
    row: int
    """Its row in that batch."""
    segments: Int64Array
    """Its segments: stream, pass, sample, start, length and total; shape (n, 6). `total` is the
    sample's length."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRows:
    """The rows of a step of a run."""

    step: int
    """The global batch, counted from 0 over all epochs or chapters."""
    epoch: int
    """Its epoch or chapter, as in batches."""
    position: int
    """Packs of the epoch or chapter before it, over all ranks."""
    is_skipped: bool
    """Whether the run skipped the step, so that no rank got these rows."""
    rows: list[Row]
    """Its rows, by rank. Rows of padding are omitted."""


def places_of(world: RunWorld) -> dict[int, tuple[int, ...]]:
    """Return the ranks at each place of a world."""
    ranks: dict[int, tuple[int, ...]] = {}
    whole = world.world(0)
    for rank, device in enumerate(whole.devices):
        place = whole.places[0][device]
        ranks[place] = (*ranks.get(place, ()), rank)
    return ranks


def rows_of(engine: PlanEngine, number: int, packs: Sequence[SlotPack], position: int) -> list[Row]:
    """Return the rows of a global batch that begins at a position, in order of rank."""
    size = engine.run.recipe(number).global_batch_size
    is_padded = sum(pack.num_slots for pack in packs) < size
    rows: list[Row] = []
    for world, first, stop in worlds_between(engine, number, position, position + size):
        here = [pack for pack in packs if first <= pack.slot < stop]
        if world.within is not None and not is_padded:
            rows += _dealt(engine, number, world, here)
        else:
            rows += planned_rows(world, here, position)
    rows = [row for row in rows if len(row.segments)]  # not those of padding
    return sorted(rows, key=lambda row: (row.ranks, row.batch, row.row))


def worlds_between(
    engine: PlanEngine, number: int, first: int, stop: int
) -> list[tuple[RunWorld, int, int]]:
    """Return the worlds of the run between two positions, each with its first and last slot."""
    worlds = engine.worlds(number)
    begins = [first if (w.epoch, w.position) <= (number, first) else w.position for w in worlds]
    known = [
        (world, begin)
        for world, begin in zip(worlds, begins, strict=True)
        if (world.epoch, world.position) < (number, stop)
    ]
    ends = [begin for _, begin in known[1:]] + [stop]
    return [
        (world, begin, end) for (world, begin), end in zip(known, ends, strict=True) if begin < end
    ]


def planned_rows(world: RunWorld, packs: Sequence[SlotPack], position: int) -> Iterator[Row]:
    """Yield the rows of packs that stay where they are planned, in a step at a position."""
    places, view = places_of(world), world.view(0)
    for pack in packs:
        place, batch, row = view.locate(pack.slot, position)
        row //= pack.num_slots
        yield Row(ranks=places[place], batch=batch, row=row, segments=pack.segments)


def _dealt(
    engine: PlanEngine, number: int, world: RunWorld, packs: Sequence[SlotPack]
) -> Iterator[Row]:
    balance = engine.spec.balance
    if balance is None or balance.digest() != world.cost:
        raise ConfigError(
            f"the step was dealt with a Balance of within={world.within!r} and another cost than "
            f"balance={balance!r:.80}; look back with the cost that the run had then"
        )
    balance = replace(balance, within=cast(Within, world.within))
    recipe = engine.run.recipe(number)
    by_slot, first = {pack.slot: pack for pack in packs}, packs[0].slot
    for ranks in places_of(world).values():
        view = world.view(ranks[0], balance)
        dealer = Dealer(recipe, view, balance)
        slots = dealer.slots(first).tolist()
        shared = [by_slot[slot] for slot in slots if slot in by_slot]
        segments = [pack.segments for pack in shared]
        together = BatchPacks(
            Packs(segments=np.concatenate(segments), ends=np.cumsum([len(s) for s in segments])),
            np.array([p.num_slots for p in shared if view.locate(p.slot, first)[2] == 0]),
            view,
        )
        dealt = dealer.deal(together)
        for batch in range(len(dealt)):
            own = dealt.take(batch, 1)[0]
            for row in range(len(own)):
                yield Row(ranks=ranks, batch=batch, row=row, segments=own[row])
