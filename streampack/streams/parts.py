"""The part of a stream that a `Stream` names: neighbouring shards, or one side of a held-out split.

::

    fraction=0.25    blocks of 4    | 0  1  2  3 | 4  5  6  7 | 8  9  (10 and 11, once they exist)
    held_out                        |       2    |       6    | 8

Each block of 1 / fraction samples, or shards, holds out one, at a place that a hash of the block's
number gives. So no table is kept, and what is appended to a stream moves nothing.

Cost: opening a stream 50 ns for each held-out sample; 50 us when a shard's samples are looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from streampack.errors import ConfigError
from streampack.rng import random_bits
from streampack.types import Int64Array

Side = Literal["train", "held_out"]
BLOCKS = 1 << 10  # words of randomness that are made together
AT_ONCE = 1 << 24  # samples


def chosen_part(chosen: slice, count: int, option: str, name: str) -> tuple[int, int]:
    """Return the first and one past the last of the shards or samples that a slice selects.

    Raises:
        ConfigError: If it selects none, or not neighbouring ones.
    """
    first, stop, step = chosen.indices(count)
    if step != 1 or stop <= first:
        raise ConfigError(
            f"stream {name!r}: {option}={chosen} selects none of its {count} {option}, or not "
            f"neighbouring ones; write slice(first, stop) with 0 <= first < stop <= {count}"
        )
    return first, stop


def held_out(first: int, stop: int, fraction: float) -> Int64Array:
    """Return the numbers in [first, stop) that are held out, in ascending order.

    >>> held_out(0, 8, 0.25).tolist(), held_out(4, 80, 0.25)[:2].tolist()
    ([2, 6], [6, 8])
    """
    low, high = max(int(first * fraction) - 1, 0), int(stop * fraction) + 1
    edges = np.floor(np.arange(low, high + 2) / fraction).astype(np.int64)
    chunks = range(low // BLOCKS, high // BLOCKS + 1)
    words = np.concatenate([random_bits(BLOCKS, 0, "held out", chunk) for chunk in chunks])
    words = words[low % BLOCKS :][: len(edges) - 1]
    numbers = edges[:-1] + (words % np.diff(edges).astype(np.uint64)).astype(np.int64)
    chosen: Int64Array = numbers[(numbers >= first) & (numbers < stop)]
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplePart:
    """One side of a split by samples: which samples of each shard belong to it."""

    side: Side
    fraction: float
    begins: Int64Array
    """The number of each shard's first sample in the whole stream, shape (num_shards,)."""
    counts: Int64Array
    """The samples that each shard stores, shape (num_shards,)."""
    own: Int64Array
    tokens: Int64Array | None = None
    """The tokens of these, shape (num_shards,); None if they are not known."""
    first_sample: Int64Array = field(init=False)
    """As of a stream: the first own sample of each shard, and one past the last."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "first_sample", np.concatenate([[0], np.cumsum(self.own)]))

    def rows(self, shard: int) -> Int64Array:
        """Return the places in a shard of its own samples, in ascending order."""
        first, count = int(self.begins[shard]), int(self.counts[shard])
        places = held_out(first, first + count, self.fraction) - first
        return places if self.side == "held_out" else np.delete(np.arange(count), places)

    def with_tokens(self, lengths_of: Callable[[int], Int64Array | None]) -> SamplePart:
        """Return the part with its tokens, from the lengths of all samples of a shard, if known."""
        tokens = np.empty(len(self.own), np.int64)
        for shard in range(len(tokens)):
            lengths = lengths_of(shard)
            if lengths is None:
                return self
            tokens[shard] = lengths[self.rows(shard)].sum()
        return replace(self, tokens=tokens)

    def take(self, shards: Int64Array) -> SamplePart:
        """Return the part of these shards alone."""
        begins, counts, own = self.begins[shards], self.counts[shards], self.own[shards]
        return replace(self, begins=begins, counts=counts, own=own)


def digest_text(part: SamplePart | None) -> bytes:
    """Return what a part adds to its stream's digest, which covers the shards."""
    return b"" if part is None else repr((part.side, part.fraction)).encode()


def chosen_shards(
    stream: Any, first_sample: Int64Array, name: str
) -> tuple[Int64Array | None, SamplePart | None]:
    """Return the shards that a `Stream` chooses, and which samples of them.

    `first_sample` is that of all shards, as in a stream. None: all shards, and all their samples.

    Raises:
        ConfigError: If the choice is empty.
    """
    first, stop = 0, len(first_sample) - 1
    chosen, side = getattr(stream, "shards", None), getattr(stream, "part", None)
    if chosen is not None:
        first, stop = chosen_part(chosen, stop, "shards", name)
    numbers, part = np.arange(first, stop), None
    if side is None:
        return (None if chosen is None else numbers), None
    if stream.unit == "shard":
        places = held_out(first, stop, stream.fraction)
        numbers = places if side == "held_out" else np.delete(numbers, places - first)
    else:
        part = SamplePart(
            side=side,
            fraction=stream.fraction,
            begins=first_sample[first:stop],
            counts=np.diff(first_sample)[first:stop],
            own=_own_counts(side, stream.fraction, first_sample[first : stop + 1]),
        )
        places = np.flatnonzero(part.own)
        numbers, part = numbers[places], part.take(places)
    if not len(numbers):
        way_out = "set unit='sample', or another" if stream.unit == "shard" else "set another"
        raise ConfigError(
            f"stream {name!r}: part={side!r} has none of its {stop - first} shards and "
            f"{first_sample[stop] - first_sample[first]} samples with "
            f"fraction={stream.fraction} by unit={stream.unit!r}; {way_out} fraction in both parts"
        )
    return numbers, part


def _own_counts(side: Side, fraction: float, first_sample: Int64Array) -> Int64Array:
    counts, stop = np.zeros(len(first_sample) - 1, np.int64), int(first_sample[-1])
    for first in range(int(first_sample[0]), stop, AT_ONCE):
        places = held_out(first, min(first + AT_ONCE, stop), fraction)
        shards = np.searchsorted(first_sample, places, "right") - 1
        counts += np.bincount(shards, minlength=len(counts))
    return counts if side == "held_out" else np.diff(first_sample) - counts
