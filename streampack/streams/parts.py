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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streampack.config.held_out import HeldOut
from streampack.errors import ConfigError
from streampack.philox import held_out
from streampack.types import Int64Array

AT_ONCE = 1 << 24  # samples


def chosen_part(chosen: slice, count: int, option: str, name: str) -> tuple[int, int]:
    """Return the first and one past the last of the shards or samples that a slice selects.

    Raises:
        ConfigError: If it selects none, or not neighbouring ones.
    """
    first, stop, step = chosen.indices(count)
    if step != 1 or stop <= first:
        raise ConfigError(
            f"stream {name!r}: only={chosen} selects none of its {count} {option}, or not "
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
    """The samples of a part: which samples of each shard belong to it."""

    held_out: HeldOut | None
    only: tuple[int, int] | None
    """The first sample of the stream and one past the last, or None for all."""
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
        places = np.arange(count)
        if self.held_out is not None:
            held = held_out(first, first + count, self.held_out.fraction, of.names[shard]) - first
            places = held if self.held_out.side == "held_out" else np.delete(places, held)
        if self.only is not None:
            low, high = self.only
            places = places[(places >= low - first) & (places < high - first)]
        return places

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
    text = b"" if part.only is None else repr(("only", *part.only)).encode()
    if part.held_out is None:
        return text
    by_file = ("by file",) if any(part.numbering.names) else ()
    return text + repr((part.held_out.side, part.held_out.fraction, *by_file)).encode()


def chosen_shards(
    held: HeldOut | None,
    numbering: Numbering,
    name: str,
    only: slice | None = None,
    samples: slice | None = None,
) -> tuple[Int64Array, SamplePart | None]:
    """Return the shards of a part of a stream, and which samples of them, or None for all.

    `numbering` is that of all shards. `only` selects shards, and `samples` samples of the stream.

    Raises:
        ConfigError: If the choice is empty.
    """
    first, stop = 0, len(numbering.names)
    if only is not None:
        first, stop = chosen_part(only, stop, "shards", name)
    bounds = samples and chosen_part(samples, int(numbering.counts.sum()), "samples", name)
    numbers, part = np.arange(first, stop), None
    if held is None and bounds is None:
        return numbers, None
    numbering = numbering.take(numbers)
    if held is not None and held.by == "shard":
        is_held = np.zeros(len(numbers), np.bool_)
        for file, places in numbering.files():
            low, high = numbering.shards[places][[0, -1]].tolist()
            found = held_out(low, high + 1, held.fraction, file)
            is_held[places] = np.isin(numbering.shards[places], found)
        own = np.flatnonzero(is_held == (held.side == "held_out"))
        numbers, numbering = numbers[own], numbering.take(own)
    by_row = held if held is not None and held.by == "row" else None
    if len(numbers) and (by_row is not None or bounds is not None):
        counts = numbering.counts.copy()
        if by_row is not None:
            counts = _held_out_counts(by_row.fraction, numbering)
            counts = counts if by_row.side == "held_out" else numbering.counts - counts
        part = SamplePart(held_out=by_row, only=bounds, numbering=numbering, own=counts)
        for shard in range(len(numbers)) if bounds is not None else ():
            counts[shard] = len(part.rows(shard))
        places = np.flatnonzero(counts)
        numbers, part = numbers[places], replace(part, own=counts).take(places)
    if not len(numbers):
        way_out = "set by='row', or another" if held and held.by == "shard" else "set another"
        raise ConfigError(
            f"stream {name!r}: {held} has none of its {stop - first} shards and "
            f"{numbering.counts.sum()} samples; {way_out} fraction on both sides"
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
