"""The part of a stream that a `Stream` names: neighbouring shards, or one side of a held-out split.

::

    fraction=0.25    blocks of 4    | 0  1  2  3 | 4  5  6  7 | 8  9  (10 and 11, once they exist)
    held_out                        |       2    |       6    | 8

Each block of 1 / fraction samples, or shards, holds out one, at a place that a hash of the block's
number gives. So no table is kept, and what is appended to a stream moves nothing. Token files are
numbered each by itself, and their names are hashed too: any lists of files agree.

Cost: opening a stream 50 ns for each held-out sample; 50 us when a shard's samples are looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streampack.errors import ConfigError
from streampack.philox import held_out
from streampack.types import Int64Array, Side

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


class Numbering(NamedTuple):
    """The numbers that decide on which side of a split shards and samples are; shapes (n,)."""

    names: npt.NDArray[np.object_]
    """The name of each shard's token file, without its folder, or an empty one."""
    shards: Int64Array
    """The number of each shard in its file, or else its stream."""
    begins: Int64Array
    """The number there of each shard's first sample."""
    counts: Int64Array
    """The samples that each shard stores."""

    @classmethod
    def of_stream(cls, first_sample: Int64Array) -> Numbering:
        """Number the shards and samples of a whole stream; shape (num_shards + 1,)."""
        counts = np.diff(first_sample)
        names = np.full(len(counts), "", np.object_)
        return cls(names, np.arange(len(counts)), first_sample[:-1], counts)

    def take(self, numbers: Int64Array) -> Numbering:
        """Return these shards alone."""
        names, shards, begins, counts = self
        return Numbering(names[numbers], shards[numbers], begins[numbers], counts[numbers])

    def files(self) -> Iterator[tuple[str, Int64Array]]:
        """Yield the name of each file, and the places of its shards, which are neighbours."""
        for name, places in groupby(range(len(self.names)), self.names.__getitem__):
            yield name, np.array(list(places))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplePart:
    """One side of a split by samples: which samples of each shard belong to it."""

    side: Side
    fraction: float
    numbering: Numbering
    own: Int64Array
    tokens: Int64Array | None = None
    """The tokens of these, shape (num_shards,); None if they are not known."""
    first_sample: Int64Array = field(init=False)
    """As of a stream: the first own sample of each shard, and one past the last."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "first_sample", np.concatenate([[0], np.cumsum(self.own)]))

    def rows(self, shard: int) -> Int64Array:
        """Return the places in a shard of its own samples, in ascending order."""
        of, count = self.numbering, int(self.numbering.counts[shard])
        first = int(of.begins[shard])
        places = held_out(first, first + count, self.fraction, of.names[shard]) - first
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
        return replace(self, numbering=self.numbering.take(shards), own=self.own[shards])


def digest_text(part: SamplePart | None) -> bytes:
    """Return what a part adds to its stream's digest, which covers the shards."""
    if part is None:
        return b""
    by_file = ("by file",) if any(part.numbering.names) else ()
    return repr((part.side, part.fraction, *by_file)).encode()


def chosen_shards(
    stream: Any, numbering: Numbering, name: str
) -> tuple[Int64Array | None, SamplePart | None]:
    """Return the shards that a `Stream` chooses, and which samples of them.

    `numbering` is that of all shards. None: all shards, and all their samples.

    Raises:
        ConfigError: If the choice is empty.
    """
    first, stop = 0, len(numbering.names)
    chosen, side = getattr(stream, "shards", None), getattr(stream, "part", None)
    if chosen is not None:
        first, stop = chosen_part(chosen, stop, "shards", name)
    numbers, part = np.arange(first, stop), None
    if side is None:
        return (None if chosen is None else numbers), None
    numbering = numbering.take(numbers)
    if stream.unit == "shard":
        is_held = np.zeros(len(numbers), np.bool_)
        for file, places in numbering.files():
            low, high = numbering.shards[places][[0, -1]].tolist()
            held = held_out(low, high + 1, stream.fraction, file)
            is_held[places] = np.isin(numbering.shards[places], held)
        numbers = numbers[is_held == (side == "held_out")]
    else:
        counts = _held_out_counts(stream.fraction, numbering)
        own = counts if side == "held_out" else numbering.counts - counts
        part = SamplePart(side=side, fraction=stream.fraction, numbering=numbering, own=own)
        places = np.flatnonzero(part.own)
        numbers, part = numbers[places], part.take(places)
    if not len(numbers):
        way_out = "set unit='sample', or another" if stream.unit == "shard" else "set another"
        raise ConfigError(
            f"stream {name!r}: part={side!r} has none of its {stop - first} shards and "
            f"{numbering.counts.sum()} samples with fraction={stream.fraction} "
            f"by unit={stream.unit!r}; {way_out} fraction in both parts"
        )
    return numbers, part


def _held_out_counts(fraction: float, numbering: Numbering) -> Int64Array:
    counts = np.zeros(len(numbering.names), np.int64)
    for name, own in numbering.files():
        begins, stop = numbering.begins[own], int((numbering.begins + numbering.counts)[own[-1]])
        for first in range(int(begins[0]), stop, AT_ONCE):
            places = held_out(first, min(first + AT_ONCE, stop), fraction, name)
            shards = np.searchsorted(begins, places, "right") - 1
            counts[own] += np.bincount(shards, minlength=len(begins))
    return counts
