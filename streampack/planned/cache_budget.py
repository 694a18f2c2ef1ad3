"""Limit a rank's prefetch to its share of the node's cache limit.

::

    cache_limit  >=  two adjacent shuffle blocks of every lane and stream that the node reads
                     + what is planned and not yet delivered: two windows of shuffled packs, and
                       the samples that wait from the one before
                     + one shard in flight for each thread and worker of its ranks

    excess       -> more threads, up to 4 per rank, and one for each process that tokenizes
    blocks of a rank's own lanes / blocks of the node's   -> its share of the prefetch limit

With less, shards would be evicted just before they are read, and fetched repeatedly. So less is
refused, and the message names the least that works. Local, uncompressed streams
need nothing.

Cost: O(shards), once per dataset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from streampack.errors import ConfigError
from streampack.gather.shard_prefetch import (
    FETCH_THREADS,
    FetchLimits,
    ShardPrefetcher,
    cached_bytes,
)
from streampack.plan.device_plan import DevicePlan, ranks_of_node, touched_lanes
from streampack.plan.lane_stream import LaneStream
from streampack.plan.recipe import Recipe
from streampack.plan.sequence import PackSequence
from streampack.plan.shard_tracker import ShardDelta
from streampack.planned.spec import DatasetSpec
from streampack.types import Int64Array
from streampack.world import World

NO_FETCHES = ("fetched", "fetched_bytes", "waited_for", "waited_s", "ahead_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWorkingSet:
    """The concurrent cache needs of a rank and its node, in bytes."""

    node_bytes: int = 0
    """Two shuffle blocks of all streams of the node's lanes, and planned samples, in any epoch."""
    own_bytes: int = 0
    """The same for this rank's lanes, in one epoch."""
    shard_bytes: int = 0
    """The largest shard, compressed plus raw, or with the decoded unit that it is made of."""
    raw_part: float = 1.0
    """Fraction of a kept shard's bytes that is not its compressed form."""


def kept_bytes(spec: DatasetSpec, number: int) -> Int64Array:
    """Return the bytes of each fetched shard of a stream once it is read, shape (num_shards,)."""
    stream = spec.streams[number]
    return cached_bytes(stream) if stream.cache.location.download.keep_zip else stream.raw_bytes


def lane_cycle(spec: DatasetSpec, recipe: Recipe) -> int:
    """Return after how many epochs every device reads the same lanes again.

    More than 1 only if lanes continue across epochs that are not whole steps of all ranks.
    """
    if recipe.mixing.epoch_end != "carry":
        return 1
    spacing = math.gcd(recipe.num_lanes * recipe.lane_turn, spec.view().stride)
    return spacing // math.gcd(spacing, recipe.packs_per_carry_epoch)


def cache_needs(spec: DatasetSpec, recipe: Recipe, epoch: int = 0) -> CacheWorkingSet:
    """Return the cache needs of this rank in an epoch, and the most of its node in any epoch."""
    fetched = {n: stream for n, stream in enumerate(spec.streams) if stream.cache.needs_fetch}
    if not fetched:
        return CacheWorkingSet()
    kept = {n: kept_bytes(spec, n) for n in fetched}
    lane_bytes = [
        sum(LaneStream(recipe, n, lane).most_bytes(sizes) for n, sizes in kept.items())
        for lane in range(recipe.num_lanes)
    ]
    ranks = ranks_of_node(spec.world)

    def bytes_of(readers: list[World], epoch: int) -> int:
        """Return the bytes that these ranks need together in an epoch."""
        is_carry = recipe.mixing.epoch_end == "carry"
        before = epoch * recipe.packs_per_carry_epoch if is_carry else 0
        lanes = set()
        for rank in readers:
            lanes |= touched_lanes(recipe, spec.view(rank), before=before)
        return sum(lane_bytes[lane] for lane in lanes)

    raw = sum(int(stream.raw_bytes.sum()) for stream in fetched.values())
    return CacheWorkingSet(
        node_bytes=max(bytes_of(ranks, epoch) for epoch in range(lane_cycle(spec, recipe))),
        own_bytes=bytes_of([spec.world], epoch),
        shard_bytes=max(int(cached_bytes(s).max()) + s.unit_bytes for s in fetched.values()),
        raw_part=raw / max(sum(int(sizes.sum()) for sizes in kept.values()), 1),
    )


def least_limit(needs: CacheWorkingSet, world: World, num_workers: int = 0) -> int:
    """Return the smallest cache limit of a node, in bytes; 0 if it fetches nothing."""
    # Each process that reads may have one shard in flight, compressed and raw.
    return needs.node_bytes + (1 + num_workers) * world.num_local_ranks * needs.shard_bytes


def fetch_limits(
    cache_limit: int | None,
    needs: CacheWorkingSet,
    world: World,
    *,
    num_workers: int = 0,
    planner: int | None = None,
    most_threads: int = FETCH_THREADS,
) -> FetchLimits:
    """Return the limits of the prefetch in a process that plans.

    `planner` is the index of this worker, if each of `num_workers` plans for itself; None: the
    training process plans. `most_threads` fetch in it. A limit below the working set is refused.
    """
    ranks = world.num_local_ranks
    limits = FetchLimits(num_threads=most_threads, turn=world.rank % ranks, num_turns=ranks)
    if planner is not None:
        # Every worker prefetches for itself: the turn of a rank divides into those of its workers.
        turn = limits.turn * num_workers + planner
        limits = FetchLimits(num_threads=1, turn=turn, num_turns=ranks * num_workers)
        num_workers -= 1  # that read in addition to the one that plans
    if cache_limit is None or not needs.node_bytes:
        return limits
    in_flight = ranks * needs.shard_bytes
    least = least_limit(needs, world, num_workers)
    if cache_limit < least:
        # A dataset does not know yet how many workers its loader will have.
        more = "" if num_workers else f" (and {in_flight} more for each of num_workers)"
        raise ConfigError(
            f"Buffers(cache_limit={cache_limit}) cannot hold two shuffle blocks of what this node "
            f"reads, with what is planned meanwhile ({needs.node_bytes}), and a shard in flight "
            f"for each of its readers; set cache_limit to at least {least}{more}, or lower "
            "Order.shuffle_block_size or num_workers"
        )
    spare = (cache_limit - least) // max(in_flight, 1)
    # Every further thread has one more shard in flight on each rank.
    num_threads = min(1 + spare, most_threads)
    left = cache_limit - (num_threads + num_workers) * in_flight
    # The rank's part of the bytes left, without compressed files kept next to raw ones.
    own = left * needs.own_bytes / needs.node_bytes * needs.raw_part
    return replace(limits, num_threads=min(num_threads, limits.num_threads), cache_bytes=int(own))


class ReadAhead:
    """The prefetch of one iteration; does nothing if there is nothing to fetch.

    With `is_patient`, shards of later blocks wait for the first delivery: to make them would delay
    it.
    """

    def __init__(
        self, fetcher: ShardPrefetcher | None, sequence: PackSequence, *, is_patient: bool = False
    ) -> None:
        self._fetcher = fetcher
        self._sequence = sequence
        self.is_patient = is_patient
        self._put_off: ShardDelta | None = None
        if fetcher is not None:
            fetcher.end_with(self)

    def look(self) -> Int64Array | None:
        """Follow the plan to its current end; call it in the thread that plans.

        Return rows (stream, shard) that are finished once everything planned is delivered. Raise
        the failure of a thread, if any.
        """
        if self._fetcher is None:
            return None
        self._fetcher.check()
        changes = self._sequence.shards_ahead()
        needs = changes or self._put_off
        self._put_off = needs if self.is_patient else None
        if needs is not None and self.is_patient:
            needs = replace(needs, ahead=needs.ahead[: needs.num_first])
        self._fetcher.update_plan(needs)
        return None if changes is None else changes.finished

    def has(self, plan: DevicePlan) -> bool:
        """Return whether the shards of a plan are local."""
        return self._fetcher is None or self._fetcher.has(plan.packs)

    def need_for(self, plan: DevicePlan) -> None:
        """Wait until the shards of a plan are local."""
        if self._fetcher is not None:
            self._fetcher.wait_for_packs(plan.packs)

    def finish(self, finished: Int64Array | None) -> None:
        """Mark the shards that `look` returned as delivered."""
        if self._fetcher is not None and finished is not None:
            self._fetcher.finish(finished)

    def check(self) -> None:
        """Raise the failure of a thread, if any."""
        if self._fetcher is not None:
            self._fetcher.check()

    def close(self) -> None:
        """End the threads."""
        if self._fetcher is not None:
            self._fetcher.close()

    def stats(self) -> dict[str, Any]:
        """Return the fetches and waits of this process."""
        return self._fetcher.stats() if self._fetcher else dict.fromkeys(NO_FETCHES, 0)
