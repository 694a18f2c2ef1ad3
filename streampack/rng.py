"""Randomness as a pure function of (seed, place), without a generator whose state to save.

::

    permutation(5, 17, "draw", 0, 3)     always the same five numbers, in every process

This uses only the raw bits of Philox, which NumPy guarantees across versions. NumPy does not
guarantee the output of ``Generator`` or ``default_rng``.

Cost: about 10 ns an element (one vectorised sort).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from streampack.types import Int64Array


def random_bits(length: int, seed: int, *place: int | str) -> npt.NDArray[np.uint64]:
    """Return `length` random 64-bit words, the same for the same (seed, place).

    >>> random_bits(2, 17, "here").tolist() == random_bits(2, 17, "here").tolist()
    True
    """
    text = repr((seed, *place)).encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
    return np.random.Philox(key=key).random_raw(length)


def random_keys(ends: Iterable[str], seed: int, *place: int | str) -> npt.NDArray[np.uint64]:
    """Return the Philox keys of many places, shape (n, 2).

    Each place is `place`, of at least one part, and one of `ends`: an integer, or several joined
    with ", ".
    """
    common = repr((seed, *place))[:-1]
    hash_of = hashlib.blake2b
    keys = [hash_of(f"{common}, {end})".encode(), digest_size=16).digest() for end in ends]
    return np.frombuffer(b"".join(keys), "<u8").astype(np.uint64).reshape(-1, 2)


def permutation(length: int, seed: int, *place: int | str) -> Int64Array:
    """Return a shuffled ``arange(length)``, shape (length,), the same for the same (seed, place).

    >>> sorted(permutation(5, 17, "here").tolist())
    [0, 1, 2, 3, 4]
    """
    if length < 2:
        return np.arange(length)  # fast path: many small streams have a single shard
    # Random high bits and the index in the low bits make all keys distinct, so every sorting
    # algorithm gives the same order. A plain integer sort is several times faster than argsort.
    shift = np.uint64((length - 1).bit_length())
    keys = (random_bits(length, seed, *place) >> shift) << shift
    keys |= np.arange(length, dtype=np.uint64)
    keys.sort()
    return (keys & ((np.uint64(1) << shift) - np.uint64(1))).astype(np.int64)
