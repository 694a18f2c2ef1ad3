"""Assign a stream's samples to lanes, once, in contiguous stretches of about equal raw bytes.

Six shards over two lanes. The seed orders the shards, and a cut may fall inside a shard::

    shards in seeded order    [ 4 ][ 0 ][ 5 ][ 2 ][ 1 ][ 3 ]
    stretch                   0 ----------->|1 ----------->
    lane                      0              1

A lane reads the same shards in every pass, so the cache of its node stays valid. Lanes take them by
digit reversal (with 4 lanes: stretches 0, 2, 1, 3), so that the lanes of a node have neighbouring
stretches: see docs/adr/0001.

Cost: O(shards) a lane. No sample is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from streampack.rng import permutation
from streampack.types import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extents:
    """Parts of shards, in stored or seeded order."""

    shards: Int64Array
    """The shard of each part, shape (n,)."""
    firsts: Int64Array
    """Index within the shard of each part's first sample, shape (n,)."""
    counts: Int64Array
    """Number of samples of each part, all positive, shape (n,)."""
    num_samples: int = field(init=False)
    """Number of samples in all parts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_samples", int(self.counts.sum()))

    def num_bytes(self, samples: Int64Array, raw_bytes: Int64Array) -> int:
        """Return the bytes of all parts, given the samples and bytes of each shard of the stream.

        A cut shard counts in proportion to its samples.

        >>> half = Extents(shards=np.array([1]), firsts=np.array([0]), counts=np.array([3]))
        >>> half.num_bytes(np.array([9, 6]), np.array([900, 50]))
        25
        """
        parts = raw_bytes[self.shards] * (self.counts / samples[self.shards])
        # Truncate each part to whole bytes: the result of a float sum depends on the processor.
        return int(parts.astype(np.int64).sum())

    def take(self, order: Int64Array) -> Extents:
        """Return the parts in another order."""
        return Extents(
            shards=self.shards[order], firsts=self.firsts[order], counts=self.counts[order]
        )

    def between(self, first: int, last: int) -> Extents:
        """Return the parts that hold samples [first, last) of this sequence."""
        stops = np.cumsum(self.counts)
        starts = stops - self.counts
        begins, ends = np.maximum(starts, first), np.minimum(stops, last)
        kept = ends > begins
        return Extents(
            shards=self.shards[kept],
            firsts=(self.firsts + begins - starts)[kept],
            counts=(ends - begins)[kept],
        )


def stretch_of_lane(lane: int, num_lanes: int) -> int:
    """Return the stretch of a lane: its digits in the prime factors of num_lanes, reversed.

    >>> [stretch_of_lane(lane, 4) for lane in range(4)]
    [0, 2, 1, 3]
    """
    stretch, width, rest, prime = 0, num_lanes, num_lanes, 2
    while rest > 1:
        while rest % prime == 0:
            rest //= prime
            width //= prime
            lane, digit = divmod(lane, prime)
            stretch += digit * width
        prime += 1
    return stretch


def assign_to_lanes(
    samples: Int64Array,
    raw_bytes: Int64Array,
    num_lanes: int,
    seed: int,
    seed_path: tuple[int | str, ...],
) -> list[Extents]:
    """Return the extents of each lane, given the samples and raw bytes of a stream's shards.

    Each sample is in exactly one lane. The seed orders the shards; if it is negative, they stay in
    stored order. `seed_path` identifies the stream, for the seed.

    >>> [e.num_samples for e in assign_to_lanes(np.array([6, 6]), np.array([60, 60]), 3, 1, (0,))]
    [4, 4, 4]
    """
    num_shards = len(samples)
    order = np.arange(num_shards)
    if seed >= 0 and num_shards > 1:
        order = permutation(num_shards, seed, "deal", *seed_path)
    whole = Extents(
        shards=order, firsts=np.zeros(num_shards, np.int64), counts=samples[order].astype(np.int64)
    )
    if not whole.counts.all():
        whole = whole.take(np.flatnonzero(whole.counts))
    if num_lanes == 1:
        return [whole]
    stops = np.cumsum(whole.counts)
    bytes_stops = np.cumsum(raw_bytes[whole.shards])
    # Cut by bytes: find the shard, then interpolate to a sample inside it.
    cuts = [0]
    for stretch in range(1, num_lanes):
        target = int(bytes_stops[-1]) * stretch // num_lanes
        shard = int(np.searchsorted(bytes_stops, target, side="right"))
        shard = min(shard, len(stops) - 1)
        size, count = int(raw_bytes[whole.shards[shard]]), int(whole.counts[shard])
        inside = (target - (int(bytes_stops[shard]) - size)) * count // max(size, 1)
        cuts.append(max(cuts[-1], int(stops[shard]) - count + min(inside, count)))
    cuts.append(int(stops[-1]))
    stretches = [whole.between(first, last) for first, last in pairwise(cuts)]
    return [stretches[stretch_of_lane(lane, num_lanes)] for lane in range(num_lanes)]
