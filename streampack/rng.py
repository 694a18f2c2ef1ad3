"""Randomness as a pure function of (seed, path), without a generator and its state.

::

    permutation(5, 17, "draw", 0, 3)     always the same five numbers, in every process

This uses only the raw bits of Philox, which NumPy guarantees across versions. NumPy does not
guarantee the output of ``Generator`` or ``default_rng``.

A permutation sorts distinct keys: random high bits, the index in the low bits. Because the keys are
uniform, as many buckets as keys nearly sort them. One insertion sort finishes the job::

    keys in 8 buckets    |6 .|.|9 a 3|. .|  ...      bucket: the leading bits
    insertion sort       |. 6|.|3 9 a|. .|  ...      keys move by a place or two

For a few elements, the call and the generator object cost a hundred times the work. Many small
permutations are therefore made in one call, by `shuffle_blocks`.

Cost: about 10 ns an element, most of it for the random bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from streampack._numba import compiled, compiled_inline, kernel_allocating
from streampack.philox import UInt64Array, random_bits
from streampack.types import Int64Array

ONE = np.uint64(1)
WORD = np.uint64(64)
MAX_SMALL = 128  # elements of a permutation that is made in one call with others
MAX_BITS = 22  # of a bucket's number: caps the number of buckets for long inputs


def random_keys(ends: Iterable[str], seed: int, *path: int | str) -> UInt64Array:
    """Return the Philox keys of many paths, shape (n, 2).

    Each path is `path`, of at least one part, and one of `ends`: an integer, or several joined
    with ", ".
    """
    common = repr((seed, *path))[:-1]
    hash_of = hashlib.blake2b
    keys = [hash_of(f"{common}, {end})".encode(), digest_size=16).digest() for end in ends]
    return np.frombuffer(b"".join(keys), "<u8").astype(np.uint64).reshape(-1, 2)


def permutation(length: int, seed: int, *path: int | str) -> Int64Array:
    """Return a shuffled ``arange(length)``, shape (length,), the same for the same (seed, path).

    >>> sorted(permutation(5, 17, "here").tolist())
    [0, 1, 2, 3, 4]
    """
    if length < 2:
        return np.arange(length)  # fast path: many small streams have a single shard
    # Random high bits and the index in the low bits make all keys distinct, so every sorting
    # algorithm gives the same order. A plain integer sort is several times faster than argsort.
    shift = np.uint64((length - 1).bit_length())
    keys = (random_bits(length, seed, *path) >> shift) << shift
    keys |= np.arange(length, dtype=np.uint64)
    keys.sort()
    return (keys & ((np.uint64(1) << shift) - np.uint64(1))).astype(np.int64)


@compiled_inline
def _sort(bits: UInt64Array, num_bits: int, keys: UInt64Array, ends: npt.NDArray[np.int32]) -> None:
    """Write to `keys`, sorted, the bits above `num_bits` with the index in the low bits.

    `ends` is scratch space for the buckets; its length is a power of 2.
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


@kernel_allocating
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


@compiled
def _high_word(a: np.uint64, b: np.uint64) -> np.uint64:
    """Return the upper 64 bits of the 128-bit product."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> half) + (other >> half)


@compiled
def _philox(counter: np.uint64, key: UInt64Array, words: UInt64Array) -> None:
    """Write the four words of one counter: Philox4x64-10, as in ``np.random.Philox(key=...)``."""
    c0, c1, c2, c3 = counter, np.uint64(0), np.uint64(0), np.uint64(0)
    k0, k1 = key[0], key[1]
    for _ in range(10):
        high0 = _high_word(np.uint64(0xD2E7470EE14C6C93), c0)
        high1 = _high_word(np.uint64(0xCA5A826395121157), c2)
        low0, low1 = np.uint64(0xD2E7470EE14C6C93) * c0, np.uint64(0xCA5A826395121157) * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += np.uint64(0x9E3779B97F4A7C15)
        k1 += np.uint64(0xBB67AE8584CAA73B)
    words[0], words[1], words[2], words[3] = c0, c1, c2, c3


@compiled
def _small_order(key: UInt64Array, num: int, keys: UInt64Array, words: UInt64Array) -> None:
    """Write a shuffled ``arange(num)`` to `keys`, equal to `_sort` on the same key's bits."""
    num_bits = np.uint64(0)
    while (num - 1) >> np.int64(num_bits) > 0:
        num_bits += ONE
    low = (ONE << num_bits) - ONE
    for place in range(num):
        if place % 4 == 0:
            _philox(np.uint64(place // 4 + 1), key, words)
        bits = (words[place % 4] & ~low) | np.uint64(place)
        hole = place
        while hole > 0 and keys[hole - 1] > bits:
            keys[hole] = keys[hole - 1]
            hole -= 1
        keys[hole] = bits
    for place in range(num):
        keys[place] &= low


@kernel_allocating
def shuffle_blocks(
    blocks: Int64Array,
    rows: Int64Array,
    stops: Int64Array,
    part_keys: UInt64Array,
    block_keys: UInt64Array,
    size: int,
) -> Int64Array:
    """Return blocks of shuffled passes: first parts are shuffled, then the rows of each block.

    Args:
        blocks: Index of each block within its pass, shape (n,).
        rows: The rows of one pass, shape (num_rows, 2); at most MAX_SMALL rows with `part_keys`.
        stops: End of each part of the rows, shape (num_parts,).
        part_keys: Philox key of each block's pass, shape (n, 2). (0, 2): parts stay in order.
        block_keys: Philox key of each block, shape (n, 2). (0, 2): its rows stay in order.
        size: Rows per block, at most MAX_SMALL.

    Returns:
        Shape (n, size, 2). The tail of a shorter last block is uninitialised.
    """
    out = np.empty((len(blocks), size, 2), np.int64)
    words, order = np.empty(4, np.uint64), np.empty(MAX_SMALL, np.uint64)
    line = np.empty(MAX_SMALL, np.uint64)
    for i in range(len(blocks)):
        first = blocks[i] * size
        num = min(size, len(rows) - first)
        if len(part_keys):
            _small_order(part_keys[i], len(stops), order, words)
            at = 0
            for place in range(len(stops)):
                part = np.int64(order[place])
                begin = stops[part - 1] if part > 0 else 0
                for row in range(begin, stops[part]):
                    line[at] = np.uint64(row)
                    at += 1
        if len(block_keys):
            _small_order(block_keys[i], num, order, words)
        for place in range(num):
            row_of = first + (np.int64(order[place]) if len(block_keys) else place)
            if len(part_keys):
                row_of = np.int64(line[row_of])
            out[i, place, 0] = rows[row_of, 0]
            out[i, place, 1] = rows[row_of, 1]
    return out


def _num_bits(length: int) -> int:
    return max(length - 1, 1).bit_length()


def deal_places(counts: Int64Array, seed: int, *path: int | str) -> Int64Array:
    """Shuffle items of several owners, and return the sorted places of each owner's items.

    `counts` has the number of items of each owner. The places of the first owner's items come
    first, in ascending order, then the next owner's; shape (sum(counts),).

    >>> places = deal_places(np.array([2, 1]), 17, "here").tolist()
    >>> sorted(places), places[0] < places[1]
    ([0, 1, 2], True)
    """
    length = int(counts.sum())
    places = np.empty(length, np.int64)
    _deal_places(random_bits(length, seed, *path), _num_bits(length), counts, places)
    return places


class SortScratch:
    """Reusable buffers to sort at most `length` rows. Fresh memory would double the cost."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rows = np.empty((length, 2), np.int64)
        self.sorting = (
            np.empty(length, np.uint64),
            np.empty(1 << min(_num_bits(length), MAX_BITS), np.int32),
        )


def shuffle_rows(
    length: int, scratch: SortScratch, out: Int64Array, seed: int, *path: int | str
) -> None:
    """Shuffle the first `length` rows of ``scratch.rows`` into `out`, shape (length, 2)."""
    _shuffle_rows(
        random_bits(length, seed, *path), _num_bits(length), scratch.sorting, scratch.rows, out
    )
