"""Divide an integer into integer parts.

::

    apportion(10, [3, 3, 1])            ->  [4, 5, 1]     no part ever shrinks as 10 grows
    largest_remainders(10, [1/2, 1/2])  ->  [5, 5]        nearest to the requested shares

`apportion` is for totals that grow over time (draws, epochs): the difference between two results is
never negative. `largest_remainders` is closer to the shares, and is for totals divided only once.

Cost: O(number of parts).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from streampack.types import Int64Array


def apportion(total: int, sizes: Sequence[int] | Int64Array) -> list[int]:
    """Split `total` over `sizes`: whole rounds first, then successive splits of the remainder.

    The counts sum to `total`, which is 0 if all sizes are, and none decreases as it grows.

    >>> apportion(7, [2, 2, 2])
    [2, 2, 3]
    >>> [apportion(t, [1, 3]) for t in (1, 2, 3, 4, 5)]
    [[0, 1], [0, 2], [0, 3], [1, 3], [1, 4]]
    """
    left = sum(map(int, sizes))
    rounds, rest = divmod(int(total), max(left, 1))
    counts = []
    for size in map(int, sizes):
        part = rest * size // left if left else 0
        counts.append(rounds * size + part)
        rest -= part
        left -= size
    return counts


def largest_remainders(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Split `total` by `shares`, which sum to 1.

    The remainder goes to the parts with the largest fractions. Ties go to the lower index, and a
    share of 0 gets nothing.

    >>> largest_remainders(3, [Fraction(1, 2), Fraction(1, 2), Fraction(0)])
    [2, 1, 0]
    """
    exact = [total * share for share in shares]
    counts = [int(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for index in [i for i in order if shares[i] > 0][: total - sum(counts)]:
        counts[index] += 1
    return counts


def scaled_shares(amounts: Sequence[int] | Int64Array, scale: int) -> Int64Array:
    """Return the shares of `amounts` as integers that sum to `scale`, shape (len(amounts),).

    Every positive amount gets a share of at least 1.

    >>> scaled_shares([1, 1, 2], 8).tolist()
    [2, 2, 4]
    """
    total = sum(int(amount) for amount in amounts)
    shares = np.array(
        largest_remainders(scale, [Fraction(int(amount), total) for amount in amounts]), np.int64
    )
    # Not np.asarray(amounts) > 0: amounts may exceed numpy's largest integer type.
    lost = (shares == 0) & np.array([amount > 0 for amount in amounts])
    shares[lost] = 1
    shares[np.argmax(shares)] -= int(lost.sum())
    return shares
