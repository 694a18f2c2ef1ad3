"""Permutations out of random bits, by buckets instead of comparisons.

``rng.permutation`` sorts keys: random bits above, the place below, so that all keys differ. They
are random, so as many buckets as keys nearly sort them, and one insertion sort does the rest::

    keys in 8 buckets    |6 .|.|9 a 3|. .|  ...      bucket: the leading bits
    insertion sort       |. 6|.|3 9 a|. .|  ...      keys move by a place or two

Cost: about 10 ns an element, most of it the random bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streampack.compiled import compiled, compiled_to_make
from streampack.rng import random_bits
from streampack.types import Int64Array

__all__ = ["Scratch", "deal_places", "shuffle_rows"]

ONE = np.uint64(1)
WORD = np.uint64(64)
MAX_BITS = 22  # of a bucket's number; more rows than that share buckets

UInt64Array = npt.NDArray[np.uint64]


@compiled
def _sort(bits: UInt64Array, num_bits: int, keys: UInt64Array, ends: npt.NDArray[np.int32]) -> None:
    """Write into `keys`, in order, the bits above `num_bits` with the places below them.

    `ends` is room for as many buckets, a power of 2.
    """
    low = (ONE << np.uint64(num_bits)) - ONE
    num_buckets = len(ends)
    down = WORD
    while num_buckets > 1:
        num_buckets >>= 1
        down -= ONE
    ends[:] = 0
    for place in range(len(bits)):
        ends[bits[place] >> down] += np.int32(1)
    before = np.int32(0)
    for bucket in range(len(ends)):
        size = ends[bucket]
        ends[bucket] = before
        before += size
    for place in range(len(bits)):
        bucket_of = bits[place] >> down
        keys[ends[bucket_of]] = (bits[place] & ~low) | np.uint64(place)
        ends[bucket_of] += np.int32(1)
    for place in range(1, len(bits)):
        key = keys[place]
        hole = place
        while hole > 0 and keys[hole - 1] > key:
            keys[hole] = keys[hole - 1]
            hole -= 1
        keys[hole] = key


@compiled_to_make
def _deal_places(bits: UInt64Array, num_bits: int, counts: Int64Array, places: Int64Array) -> None:
    keys = np.empty(len(bits), np.uint64)
    _sort(bits, num_bits, keys, np.empty(1 << min(num_bits, MAX_BITS), np.int32))
    low = (ONE << np.uint64(num_bits)) - ONE
    owners = np.empty(len(bits), np.int32)
    nexts = np.empty(len(counts), np.int64)
    first = 0
    for owner in range(len(counts)):
        nexts[owner] = first
        for item in range(first, first + counts[owner]):
            owners[item] = owner
        first += counts[owner]
    for place in range(len(bits)):
        owner_of = owners[keys[place] & low]
        places[nexts[owner_of]] = place
        nexts[owner_of] += 1


@compiled
def _shuffle_rows(
    bits: UInt64Array,
    num_bits: int,
    scratch: tuple[UInt64Array, npt.NDArray[np.int32]],
    rows: Int64Array,
    out: Int64Array,
) -> None:
    keys, ends = scratch
    _sort(bits, num_bits, keys, ends[: 1 << min(num_bits, MAX_BITS)])
    low = (ONE << np.uint64(num_bits)) - ONE
    for place in range(len(bits)):
        row = keys[place] & low
        out[place, 0] = rows[row, 0]
        out[place, 1] = rows[row, 1]


def _num_bits(length: int) -> int:
    return max(length - 1, 1).bit_length()


def deal_places(counts: Int64Array, seed: int, *place: int | str) -> Int64Array:
    """Shuffle items that belong to owners, and return the places of each owner's, in order.

    Args:
        counts: Items of each owner, shape (n,).
        seed: The run's seed.
        place: What this is for.

    Returns:
        The places of the first owner's items, growing, then the next one's; shape (sum(counts),).

    >>> places = deal_places(np.array([2, 1]), 17, "here").tolist()
    >>> sorted(places), places[0] < places[1]
    ([0, 1, 2], True)
    """
    length = int(counts.sum())
    places = np.empty(length, np.int64)
    _deal_places(random_bits(length, seed, *place), _num_bits(length), counts, places)
    return places


class Scratch:
    """What sorting needs meanwhile, kept for the next time: fresh memory would cost as much again.

    Args:
        length: Rows that are shuffled at most.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.rows = np.empty((length, 2), np.int64)
        self.sorting = (
            np.empty(length, np.uint64),
            np.empty(1 << min(_num_bits(length), MAX_BITS), np.int32),
        )


def shuffle_rows(
    length: int, scratch: Scratch, out: Int64Array, seed: int, *place: int | str
) -> None:
    """Write the first rows of ``scratch.rows`` to `out` (length, 2), shuffled."""
    _shuffle_rows(
        random_bits(length, seed, *place), _num_bits(length), scratch.sorting, scratch.rows, out
    )
