"""Find the shards that segments lie in, and which of them are here or open.

::

    first_samples   0  500  900 | 0  120  300      two streams, the last number of each: its samples
    bases           0            3            6
    segment         stream 0, sample 731           --> shard 1, by bisection

Cost: some 50 ns a segment with a thousand shards.
"""

from __future__ import annotations

from streampack.compiled import compiled, compiled_brief
from streampack.types import SAMPLE, STREAM, BoolArray, Int64Array

__all__ = ["are_here", "find_places", "find_shards"]


@compiled
def _at_or_below(sorted_numbers: Int64Array, low: int, high: int, number: int) -> int:
    """Return the last place from `low` on, below `high`, that holds `number` or less; or `low`."""
    while high - low > 1:
        middle = (low + high) // 2
        if sorted_numbers[middle] <= number:
            low = middle
        else:
            high = middle
    return low


@compiled
def find_shards(
    segments: Int64Array, bases: Int64Array, first_samples: Int64Array, shards: Int64Array
) -> int:
    """Find the shard of every segment by bisection.

    Args:
        segments: Segment rows, shape (n, 6).
        bases: Where each stream begins in `first_samples`, shape (num_streams + 1,).
        first_samples: First sample of each shard, and the number of samples, stream by stream.
        shards: Filled with indices into `first_samples`, shape (n,).

    Returns:
        The first segment whose stream or sample does not exist, or -1.
    """
    for k in range(len(segments)):
        stream, sample = segments[k, STREAM], segments[k, SAMPLE]
        if stream < 0 or stream >= len(bases) - 1:
            return k
        last = bases[stream + 1] - 1
        if sample < 0 or sample >= first_samples[last]:
            return k
        shards[k] = _at_or_below(first_samples, bases[stream], last, sample)
    return -1


@compiled_brief
def are_here(
    segments: Int64Array, bases: Int64Array, first_samples: Int64Array, is_here: BoolArray
) -> bool:
    """Tell whether the shards of all segments are marked; others as of `find_shards`.

    Args:
        segments: Segment rows of samples that exist, shape (n, 6).
        bases: Where each stream begins in `first_samples`, shape (num_streams + 1,).
        first_samples: First sample of each shard, and the number of samples, stream by stream.
        is_here: The marks, beside `first_samples`.
    """
    for k in range(len(segments)):
        stream = segments[k, STREAM]
        low, high = bases[stream], bases[stream + 1] - 1
        if not is_here[_at_or_below(first_samples, low, high, segments[k, SAMPLE])]:
            return False
    return True


@compiled_brief
def find_places(
    segments: Int64Array,
    bases: Int64Array,
    first_samples: Int64Array,
    place_of: Int64Array,
    used: Int64Array,
    now: int,
    rows: Int64Array,
) -> tuple[int, bool]:
    """Find the place row of every segment among those of the open shards.

    Args:
        segments: Segment rows, shape (n, 6).
        bases: Where each stream begins in `first_samples`, shape (num_streams + 1,).
        first_samples: First sample of each shard, and the number of samples, stream by stream.
        place_of: Of each shard its place row, or -1 where it is not open; beside `first_samples`.
        used: Set to `now` for those that are read, shape (m,).
        now: A number that grows from call to call.
        rows: Filled with place rows, shape (n,); with shards where one is not open.

    Returns:
        The first segment that does not exist, or -1; and whether all shards are open.
    """
    bad = find_shards(segments, bases, first_samples, rows)
    if bad >= 0:
        return bad, False
    for k in range(len(segments)):
        if place_of[rows[k]] < 0:
            return -1, False
    for k in range(len(segments)):
        rows[k] = place_of[rows[k]]
        used[rows[k]] = now
    return -1, True
