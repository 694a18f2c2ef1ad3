"""Randomness as a pure function of (seed, place): nothing is stored, so nothing has to be saved.

::

    permutation(5, 17, "draw", 0, 3)     always the same five numbers, in every process

Built on the raw bits of Philox, which NumPy promises between versions, and on nothing that
``Generator`` or ``default_rng`` make of them.

Cost: about 10 ns an element (one vectorised sort).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from streampack.types import Int64Array

__all__ = ["permutation", "random_bits"]


def random_bits(length: int, seed: int, *place: int | str) -> npt.NDArray[np.uint64]:
    """Return `length` random 64-bit words, the same for the same (seed, place).

    >>> random_bits(2, 17, "here").tolist() == random_bits(2, 17, "here").tolist()
    True
    """
    text = repr((seed, *place)).encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
    return np.random.Philox(key=key).random_raw(length)


def permutation(length: int, seed: int, *place: int | str) -> Int64Array:
    """Return a shuffled ``arange(length)``, shape (length,), the same for the same (seed, place).

    >>> sorted(permutation(5, 17, "here").tolist())
    [0, 1, 2, 3, 4]
    """
    if length < 2:
        return np.arange(length)  # many small streams have one shard each
    # Random high bits, the index in the low ones: all keys differ, so any sort gives the same
    # order, and a plain sort of integers is several times quicker than an argsort.
    shift = np.uint64((length - 1).bit_length())
    keys = (random_bits(length, seed, *place) >> shift) << shift
    keys |= np.arange(length, dtype=np.uint64)
    keys.sort()
    return (keys & ((np.uint64(1) << shift) - np.uint64(1))).astype(np.int64)
