"""How many samples a packer can be given at once, so that no full pack waits for any of them.

With max_seq_len=1000, 8 packs wanted and 1,500 tokens buffered by exact fit::

    8 packs      hold 8 * 999 tokens at least, so 6,491 more can close at most 7 of them
    the last     is closed by whichever sample comes next, or by one after it

So a source is never asked for a sample that the next batch may not need, however long it takes to
give one, and a packer, whose calls cost more than its samples, is called a few times a batch.

Cost: about 5 us a call.
"""

from __future__ import annotations

from streampack.config import Packing
from streampack.load.buckets import Bucketing
from streampack.pack.limits import PATIENCE, TOLERANCE
from streampack.pack.packer import Packer

__all__ = ["least_tokens", "room_for"]


def room_for(
    packer: Packer, num_packs: int, packing: Packing, bucketing: Bucketing | None
) -> tuple[int, int]:
    """Return tokens and samples that certainly leave the last of some packs to what follows.

    So many, and one sample more, can be taken at once.
    """
    samples = max(packing.buffer_samples - packer.num_buffered_samples - 1, 0)
    if bucketing is not None:
        # Once as many wait as may, any sample makes a batch leave.
        return packing.buffer_samples * packing.max_seq_len, samples
    if packing.max_samples_per_pack or packing.pad_to_multiple or packing.method == "two_tiers":
        return 0, 0
    tokens = least_tokens(packing, num_packs) - packer.num_buffered_tokens - 1
    return max(tokens, 0), samples


def least_tokens(packing: Packing, num_packs: int) -> int:
    """Return how many tokens it takes at least until a packer, empty at first, closes some packs.

    >>> least_tokens(Packing(max_seq_len=1000), 8), least_tokens(Packing(max_seq_len=1000), 1)
    (7992, 1000)
    """
    size, method = packing.max_seq_len, packing.method
    if method == "concat":
        return num_packs * size
    if method == "next_fit":
        # Two neighbours hold more than a pack.
        return (num_packs + 1) // 2 * size
    if method == "knapsack":
        return packing.buffer_limit + 1
    if method == "exact_fit":
        # A pack within the tolerance may close while less than a pack is buffered: it comes last.
        tolerance = size // TOLERANCE
        least = (num_packs - (tolerance >= PATIENCE)) * (size - tolerance)
    else:
        # What makes a pack close does not fit into it, and closes no other.
        least = num_packs * size // 2 if packing.guard is None else size
    # A full buffer closes packs as they are.
    return max(size, min(least, packing.buffer_limit + 1))
