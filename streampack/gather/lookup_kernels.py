"""Find the shards of segments, and which of them are local or open.

::

    first_samples   0  500  900 | 0  120  300      two streams; the last number is the sample count
    bases           0            3            6
    segment         stream 0, sample 731           --> shard 1, by bisection

Cost: about 50 ns per segment with a thousand shards.
"""

from __future__ import annotations

from streampack._numba import compiled_inline, kernel_holding_gil
from streampack.types import SAMPLE, STREAM, Int64Array

# Columns of the times of each open shard: its last read, and the last size check of its file.
READ, CHECKED = range(2)

# Least interval between size checks of a file: checks at every gather would take 3 to 7 %.
CHECK_NS = 10_000_000


@compiled_inline
def _at_or_below(sorted_numbers: Int64Array, low: int, high: int, number: int) -> int:
    """Return the last index in [low, high) with `number` or less, or `low`."""
    while high - low > 1:
        middle = (low + high) // 2
        if sorted_numbers[middle] <= number:
            low = middle
        else:
            high = middle
    return low


@kernel_holding_gil
def find_shards(
    segments: Int64Array, bases: Int64Array, first_samples: Int64Array, shards: Int64Array
) -> int:
    """Find the shard of every segment by bisection.

    Args:
        segments: Segment rows, shape (n, 6).
        bases: Index of each stream's first entry in `first_samples`, shape (num_streams + 1,).
        first_samples: First sample of each shard, then the number of samples, for each stream.
        shards: Filled with indices into `first_samples`, shape (n,).

    Returns the first segment with a stream or sample that does not exist, or -1.
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


@kernel_holding_gil
def find_rows(
    segments: Int64Array,
    bases: Int64Array,
    first_samples: Int64Array,
    row_of: Int64Array,
    times: Int64Array,
    now_ns: int,
    rows: Int64Array,
) -> tuple[int, bool, bool]:
    """Find the address row of each segment's shard; as `find_shards`.

    Args:
        row_of: Address row of each shard, or -1 if it is not open; indexed like `first_samples`.
        times: Monotonic times of open shards, READ and CHECKED, shape (m, 2). READ is set to
            `now_ns` for those that are read.
        rows: Filled with address rows, shape (n,); with shards if one is not open.

    Returns the first segment that does not exist, or -1; whether all shards are open; and whether
    a size check is due for one of them.
    """
    bad = find_shards(segments, bases, first_samples, rows)
    if bad >= 0:
        return bad, False, False
    for k in range(len(segments)):
        if row_of[rows[k]] < 0:
            return -1, False, False
    is_due = False
    for k in range(len(segments)):
        rows[k] = row_of[rows[k]]
        times[rows[k], READ] = now_ns
        is_due |= times[rows[k], CHECKED] < now_ns - CHECK_NS
    return -1, True, is_due
