"""Bound the number of samples that a packer can take in one call without delaying a full pack.

With max_seq_len=1000, 8 packs wanted and 1,500 tokens buffered by exact fit::

    8 packs      hold 8 * 999 tokens at least, so 6,491 more can close at most 7 of them
    the last     is closed by the next sample, or by one after it

So a slow source is never asked for a sample that the next batch may not need. A packer call costs
more than the samples it takes, and it is called only a few times per batch.

Cost: about 5 us a call.
"""

from __future__ import annotations

from streampack.config import Bucketing, Packing
from streampack.pack.buffered import PATIENCE, TOLERANCE
from streampack.pack.packer import Packer


class Lookahead:
    """The tokens and samples that cannot close the last of the packs that a packer still owes."""

    def __init__(self, packing: Packing, bucketing: Bucketing | None, most_packs: int) -> None:
        self._most_samples = packing.buffer_samples - 1
        self._least = [least_tokens(packing, num) for num in range(most_packs + 1)]
        # Once the buffer is full, every sample completes a batch.
        self._of_buckets = packing.buffer_samples * packing.max_seq_len if bucketing else None
        self._is_unknown = bool(packing.max_samples_per_pack or packing.pad_to_multiple)
        self._is_unknown |= packing.method == "two_tiers"

    def certain(self, packer: Packer, num_packs: int) -> tuple[int, int]:
        """Return the tokens and samples that cannot close the last of the next `num_packs` packs.

        One sample more than that can be added in a single call.
        """
        samples = max(self._most_samples - packer.num_buffered_samples, 0)
        if self._of_buckets is not None:
            return self._of_buckets, samples
        if self._is_unknown:
            return 0, 0
        return max(self._least[num_packs] - packer.num_buffered_tokens - 1, 0), samples


def least_tokens(packing: Packing, num_packs: int) -> int:
    """Return the fewest tokens with which an empty packer can close `num_packs` packs.

    >>> [least_tokens(Packing(max_seq_len=1000, method="exact_fit"), n) for n in (8, 1)]
    [7992, 1000]
    """
    size, method = packing.max_seq_len, packing.method
    if method == "concat":
        return num_packs * size
    if method == "next_fit":
        # Two consecutive packs hold more than max_seq_len tokens.
        return (num_packs + 1) // 2 * size
    if method == "knapsack":
        return packing.buffer_limit + 1
    if method == "exact_fit":
        # A pack within the tolerance may close with less than a pack buffered: only the last one.
        tolerance = size // TOLERANCE
        least = (num_packs - (tolerance >= PATIENCE)) * (size - tolerance)
    else:
        # The sample that closes a pack does not fit into it, and closes no other pack.
        least = num_packs * size // 2 if packing.guard is None else size
    # A full buffer closes packs early.
    return max(size, min(least, packing.buffer_limit + 1))
