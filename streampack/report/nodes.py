"""What each node reads of a planned run: shards, bytes fetched, and the cache that they need.

::

    batch k --> place k % devices --> nodes with a rank there, or one that shares packs with it
    its segments ------> shards ----> read by these nodes

Exact for the steps planned. A loader also fetches up to a shuffle block ahead of its last batch.

Cost: one bisection for each segment. Memory: a byte for each shard and device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich import box
from rich.table import Column, Table

from streampack.gather.lookup_kernels import find_shards
from streampack.plan.device_plan import sharing_of, touched_lanes
from streampack.plan.reader import PlanPart
from streampack.planned.cache_budget import cache_needs, kept_bytes, least_limit
from streampack.planned.engine import PlanEngine
from streampack.types import Float64Array

COUNTS = {"shards": "shards", "shared_shards": "shared"}
BYTES = {"read_bytes": "read", "fetched_bytes": "fetched", "cache_bytes": "cache"}
BYTES |= {"least_cache_limit": "least cache_limit"}


class NodeReads:
    """Collects the shards that each node reads."""

    def __init__(self, engine: PlanEngine) -> None:
        world = engine.world
        self._engine = engine
        # Whether a node reads the batches of a place, shape (num_nodes, num_devices).
        self._places = np.zeros((world.num_nodes, world.num_devices), np.bool_)
        for own in map(world.at, world.loading):
            self._places[own.node, list(sharing_of(own, engine.spec.balance))] = True
        streams = engine.recipe.streams
        self._firsts = np.concatenate([stream.first_sample for stream in streams])
        # Where each stream's shards begin among all; like `first_sample`, one more than there are.
        self._bases = np.cumsum([0, *(len(stream.first_sample) for stream in streams)])
        self._used = np.zeros((world.num_devices, len(self._firsts)), np.bool_)

    def add(self, part: PlanPart) -> None:
        """Count the batches of a part of the plan."""
        plan = part.plan
        segments = np.ascontiguousarray(plan.packs.segments, np.int64)
        shards = np.empty(len(segments), np.int64)
        find_shards(segments, self._bases, self._firsts, shards)
        batches = part.slots // (plan.num_rows * plan.slots_per_pack)
        sizes = np.diff(plan.packs.ends, prepend=0)
        self._used[np.repeat(batches, sizes) % len(self._used), shards] = True

    def numbers(self) -> list[dict[str, int]]:
        """Return the numbers of each node; see `simulate`."""
        return self._numbers([self._used[places].any(axis=0) for places in self._places])

    def expected(self, passes: Float64Array) -> list[dict[str, int]]:
        """Return the numbers of each node once streams were used so often, shape (num_streams,).

        Expected ones, from the lanes that a node reads: a lane that is half used reads half of its
        shards.
        """
        engine, recipe = self._engine, self._engine.recipe
        used = np.zeros((len(self._places), len(self._firsts)))
        for own in map(engine.world.at, engine.world.loading):
            view = engine.spec.view(own)
            for number, first in enumerate(self._bases[:-1]):
                extents, shares = recipe.assignment(number)
                for lane in touched_lanes(recipe, view):
                    shards = extents[lane if shares is not None else 0].shards
                    used[own.node, first + shards] = min(float(passes[number]), 1.0)
        return self._numbers(list(used))

    def _numbers(self, used: Sequence[Any]) -> list[dict[str, int]]:
        spec, world = self._engine.spec, self._engine.world
        is_shared = np.sum([own > 0 for own in used], axis=0) > 1
        sizes = np.zeros((3, len(self._firsts)), np.int64)
        for number, (stream, first) in enumerate(zip(spec.streams, self._bases, strict=False)):
            at = slice(first, first + len(stream.raw_bytes))
            sizes[0, at] = stream.raw_bytes
            if stream.cache.is_remote:
                packed = stream.stored_bytes
                sizes[1, at] = np.where(packed > 0, packed, stream.raw_bytes)
            if stream.cache.needs_fetch:
                sizes[2, at] = kept_bytes(spec, number)
        numbers = []
        for node, own in enumerate(used):
            rank = world.at(node * world.num_local_ranks)
            needs = cache_needs(replace(spec, world=rank), self._engine.recipe)
            counts = [own.sum(), own[is_shared].sum(), *(sizes @ own)]
            counts.append(least_limit(needs, world))
            numbers.append(dict(zip(COUNTS | BYTES, map(int, counts), strict=True)))
        return numbers


def node_rows(nodes: Sequence[Mapping[str, int]]) -> list[list[str]]:
    """Return names of columns, and a row of text for each node."""
    rows = [["node", *COUNTS.values(), *BYTES.values()]]
    for number, node in enumerate(nodes):
        shards = [f"{node[key]:,}" for key in COUNTS]
        rows.append([f"{number:,}", *shards, *(shown_bytes(node[key]) for key in BYTES)])
    return rows


def node_table(nodes: Sequence[Mapping[str, int]]) -> Table:
    """Return a table of what each node reads, for a terminal."""
    names, *rows = node_rows(nodes)
    table = Table(*(Column(name, justify="right") for name in names), box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    return table


def shown_bytes(number: float) -> str:
    """Return an amount of bytes with its unit.

    >>> shown_bytes(0), shown_bytes(2_345_000), shown_bytes(7.2e12)
    ('0 B', '2.35 MB', '7.2 TB')
    """
    units = ["B", "kB", "MB", "GB", "TB"]
    size = min(int(np.log10(max(number, 1)) // 3), len(units) - 1)
    return f"{number / 1000**size:.3g} {units[size]}"
