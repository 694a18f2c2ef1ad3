"""How far a rank may fetch shards ahead, under the node's cache limit.

::

    cache_limit  >=  two neighbouring shuffle blocks of every lane and stream that the node touches
                     + what is planned and not yet delivered, up to 8,192 samples of each
                     + one shard in flight for each thread and worker of its ranks

    what is over   -> more threads, up to 4 a rank
    blocks of a rank's own lanes / blocks of the node's   -> its part of what may be looked ahead

Less than that would evict shards that are about to be read and fetch them again and again, so it is
refused, and the least that works is named. Streams that lie here, uncompressed, count nothing.

Cost: O(shards), once a dataset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from streampack.errors import ConfigError
from streampack.load.build import Blueprint
from streampack.plan import DevicePlan, DeviceView, EpochSequence, Recipe, touched_lanes
from streampack.read import FETCH_THREADS, FetchLimits, ShardFetcher, cached_bytes
from streampack.types import Int64Array
from streampack.world import World

__all__ = ["NO_FETCHES", "CacheNeeds", "ReadAhead", "cache_needs", "fetch_limits", "make_fetcher"]

NO_FETCHES = ("fetched", "fetched_bytes", "waited_for", "waited_s", "ahead_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNeeds:
    """What a rank and its node need of the cache at once, in bytes."""

    node_bytes: int = 0
    """Two shuffle blocks of all that the node's lanes read, and what is planned beside them."""
    own_bytes: int = 0
    """The same for this rank's lanes."""
    shard_bytes: int = 0
    """The largest shard, packed and raw."""
    raw_part: float = 1.0
    """Of what is kept of a shard, the part that is not its compressed form."""
    ranks_per_node: int = 1
    """Processes that share the node's limit."""


def _ranks_of_node(world: World) -> list[World]:
    first = world.node * world.num_local_ranks
    return [replace(world, rank=rank) for rank in range(first, first + world.num_local_ranks)]


def cache_needs(blueprint: Blueprint, recipe: Recipe) -> CacheNeeds:
    """Return what this rank and its node need of the cache, where it has a limit."""
    world = blueprint.world
    fetched = [n for n, stream in enumerate(blueprint.streams) if stream.needs_fetch]
    if not fetched or blueprint.cache_limit is None:
        return CacheNeeds(ranks_per_node=world.num_local_ranks)

    def lanes_of(rank: World) -> set[int]:
        return touched_lanes(
            recipe,
            DeviceView(
                place=rank.place, num_devices=rank.num_devices, batch_size=blueprint.batch_size
            ),
        )

    ranks = _ranks_of_node(world)
    own_lanes = lanes_of(world)
    node_lanes = set().union(*(lanes_of(rank) for rank in ranks))
    kept = {n: _kept_bytes(blueprint, n) for n in fetched}
    lane_bytes = {
        lane: sum(recipe.lane_stream(n, lane).most_bytes(kept[n]) for n in fetched)
        for lane in node_lanes
    }
    raw = sum(int(blueprint.streams[n].raw_bytes.sum()) for n in fetched)
    largest = max(int(cached_bytes(blueprint.streams[n]).max()) for n in fetched)
    return CacheNeeds(
        node_bytes=sum(lane_bytes.values()),
        own_bytes=sum(lane_bytes[lane] for lane in own_lanes),
        shard_bytes=largest,
        raw_part=raw / max(sum(int(each.sum()) for each in kept.values()), 1),
        ranks_per_node=len(ranks),
    )


def _kept_bytes(blueprint: Blueprint, number: int) -> Int64Array:
    stream = blueprint.streams[number]
    return cached_bytes(stream) if blueprint.keeps_packed[number] else stream.raw_bytes


def fetch_limits(
    cache_limit: int | None, needs: CacheNeeds, *, num_workers: int = 0, turn: int = 0
) -> FetchLimits:
    """Return how much one rank may fetch ahead.

    Args:
        cache_limit: Bytes of the node; None: no limit.
        needs: What the rank and its node need.
        num_workers: Processes of each rank that read beside the one that plans.
        turn: Which rank of the node this is.

    Raises:
        ConfigError: If the limit is below the working set; the least that works is named.
    """
    ranks = needs.ranks_per_node
    limits = FetchLimits(turn=turn, num_turns=ranks)
    if cache_limit is None or not needs.node_bytes:
        return limits
    least = needs.node_bytes + ranks * (1 + num_workers) * needs.shard_bytes
    if cache_limit < least:
        raise ConfigError(
            f"Buffers(cache_limit={cache_limit}) cannot hold two shuffle blocks of what this node "
            f"reads and what is planned beside them ({needs.node_bytes}), and a shard in flight "
            f"for each of its readers; set cache_limit to at least {least}, or lower "
            "Order.shuffle_block_size or num_workers"
        )
    in_flight = ranks * needs.shard_bytes
    spare = (cache_limit - least) // max(in_flight, 1)
    num_threads = min(1 + spare, FETCH_THREADS)
    left = cache_limit - (num_threads + num_workers) * in_flight
    own = left * needs.own_bytes / needs.node_bytes * needs.raw_part
    return replace(limits, num_threads=num_threads, cache_bytes=int(own))


def make_fetcher(
    blueprint: Blueprint,
    needs: CacheNeeds,
    *,
    num_workers: int = 0,
    planner: int | None = None,
) -> ShardFetcher | None:
    """Return what fetches ahead for a process that plans; None where nothing is to be fetched.

    Args:
        blueprint: What is read.
        needs: What this rank and its node need of the cache.
        num_workers: Worker processes of the rank.
        planner: Where each worker plans for itself, which one this is; None: the training process.

    Raises:
        ConfigError: If the limit is below the working set.
    """
    if not any(stream.needs_fetch for stream in blueprint.streams):
        return None
    world, cache_limit = blueprint.world, blueprint.cache_limit
    turn = world.rank % needs.ranks_per_node
    if planner is None:
        limits = fetch_limits(cache_limit, needs, num_workers=num_workers, turn=turn)
    else:
        limits = fetch_limits(cache_limit, needs, num_workers=num_workers - 1)
        limits = replace(
            limits,
            num_threads=1,
            turn=turn * num_workers + planner,
            num_turns=needs.ranks_per_node * num_workers,
        )
    return ShardFetcher(blueprint.streams, limits)


class ReadAhead:
    """The read-ahead of one iteration; where nothing is to be fetched it does nothing.

    Args:
        fetcher: What fetches, or None.
        sequence: What is iterated.
    """

    def __init__(self, fetcher: ShardFetcher | None, sequence: EpochSequence) -> None:
        self._fetcher = fetcher
        self._sequence = sequence

    def look(self) -> Int64Array | None:
        """Follow the plan as far as it has come; call it where the plans are asked for.

        Returns:
            Rows (stream, shard) that are finished once all that was planned is delivered.

        Raises:
            DataError: If a thread failed to fetch a shard.
        """
        if self._fetcher is None:
            return None
        self._fetcher.check()
        needs = self._sequence.shards_ahead()
        self._fetcher.follow(needs)
        return None if needs is None else needs.finished

    def has(self, plan: DevicePlan) -> bool:
        """Whether the shards of a plan are here."""
        return self._fetcher is None or self._fetcher.has(plan.packs)

    def need_for(self, plan: DevicePlan) -> None:
        """Wait until the shards of a plan are here."""
        if self._fetcher is not None:
            self._fetcher.need_for(plan.packs)

    def finish(self, finished: Int64Array | None) -> None:
        """Say that what `look` returned is delivered."""
        if self._fetcher is not None and finished is not None:
            self._fetcher.finish(finished)

    def check(self) -> None:
        """Raise what went wrong in a thread, if anything did."""
        if self._fetcher is not None:
            self._fetcher.check()

    def close(self) -> None:
        """End the threads."""
        if self._fetcher is not None:
            self._fetcher.close()

    def stats(self) -> dict[str, Any]:
        """Return what was fetched and waited for in this process."""
        return self._fetcher.stats() if self._fetcher else dict.fromkeys(NO_FETCHES, 0)
