"""Random bits as a pure function of (seed, path), and the samples that they hold out.

Apart from `rng` for processes that need no numba, which takes half of their start.

Cost: a hash and a generator for each call, then a few ns a word.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from streampack.types import Int64Array

BLOCKS = 1 << 10  # words of randomness of held-out numbers that are made together

UInt64Array = npt.NDArray[np.uint64]


def random_bits(length: int, seed: int, *path: int | str) -> UInt64Array:
    """Return `length` random 64-bit words, the same for the same (seed, path).

    >>> random_bits(2, 17, "here").tolist() == random_bits(2, 17, "here").tolist()
    True
    """
    text = repr((seed, *path)).encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
    return np.random.Philox(key=key).random_raw(length)


def held_out(first: int, stop: int, fraction: float, name: str = "") -> Int64Array:
    """Return the numbers in [first, stop) that are held out, in ascending order.

    `name` is that of the file that they number; empty for a whole stream.

    >>> held_out(0, 8, 0.25).tolist(), held_out(4, 80, 0.25)[:2].tolist()
    ([2, 6], [6, 8])
    """
    low, high = max(int(first * fraction) - 1, 0), int(stop * fraction) + 1
    edges = np.floor(np.arange(low, high + 2) / fraction).astype(np.int64)
    path = ("held out", name) if name else ("held out",)
    chunks = range(low // BLOCKS, high // BLOCKS + 1)
    words = np.concatenate([random_bits(BLOCKS, 0, *path, chunk) for chunk in chunks])
    words = words[low % BLOCKS :][: len(edges) - 1]
    numbers = edges[:-1] + (words % np.diff(edges).astype(np.uint64)).astype(np.int64)
    chosen: Int64Array = numbers[(numbers >= first) & (numbers < stop)]
    return chosen
