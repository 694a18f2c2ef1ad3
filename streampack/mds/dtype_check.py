"""Detection of `bytes` columns that are read with the wrong type, from their values.

::

    written as int64, read as int32     7 0 912 0 33 0      error: the upper halves are zeros
    written as int32, read as int64     30 bytes            error: not a multiple of 8

A stream with unusual but correct values can be read with ``Shards(check_dtypes=False)``.

Cost: once per stream and process, 256 bytes of each of the first 1,000 samples of a shard; 15 ms.
"""

from __future__ import annotations

from math import gcd

import numpy as np

from streampack.errors import DataError
from streampack.types import ByteArray, Int64Array

MAX_SAMPLES = 1000
MAX_BYTES = 256  # of each sample
WORD = 8  # bytes of the widest type
LEAST_VALUES = 64  # needed for a pattern to count
MOST_UPPER = 32  # upper halves below this belong to ids below 2 million
LIKELY = {1: "uint8", 2: "uint16", 4: "int32", 8: "int64"}  # by the bytes of a value


def check_tokens_dtype(
    data: ByteArray, begins: Int64Array, num_bytes: Int64Array, dtype: str, where: str
) -> None:
    """Refuse a type of token ids that the values contradict, with the evidence and a likely type.

    In the shard's bytes, shape (num_bytes_of_shard,), the values of each sample start at `begins`
    and take `num_bytes`; shapes (num_samples,). `where` names the stream and the column.
    """
    width, size = np.dtype(dtype).itemsize, itemsize_of(num_bytes)
    begins, num_bytes = begins[:MAX_SAMPLES], num_bytes[:MAX_SAMPLES]
    # The last word of a sample may end in an EOS of 0.
    counts = np.minimum(np.maximum(num_bytes // WORD - 1, 0), MAX_BYTES // WORD)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = WORD * (np.arange(int(counts.sum())) - firsts)
    places = np.repeat(begins, counts) + offsets
    words = np.ascontiguousarray(data[places[:, None] + np.arange(WORD)])  # (n, 8)
    for wider in (8, 4, 2):
        if wider > width and size % wider == 0 and (text := _of_wider(words, wider, width)):
            likely = LIKELY[wider]
            raise DataError(
                f"{where}: is read as {dtype}, but was likely written as {likely}: {text}; "
                f"write that type with the column, tokens='tokens:{likely}', or, for token files, "
                f"dtype={likely!r}; if {dtype} is right, set check_dtypes=False"
            )


def itemsize_of(num_bytes: Int64Array) -> int:
    """Return the largest power of 2, up to 8, that divides the bytes of every sample.

    >>> itemsize_of(np.array([12, 8]))
    4
    """
    return gcd(int(np.gcd.reduce(num_bytes)) if len(num_bytes) else 0, WORD)


def _of_wider(words: ByteArray, wider: int, width: int) -> str | None:
    """Describe evidence that the values are parts of wider ones with almost empty upper halves."""
    if not len(words):
        return None
    pairs = words.reshape(-1).view(f"<u{wider // 2}").reshape(-1, 2)
    lows, highs = pairs[:, 0], pairs[:, 1]
    # Upper halves that are only the sign of the whole value.
    ones = np.iinfo(highs.dtype).max
    if not ((highs == 0) | ((highs == ones) & (lows > ones // 2))).all():
        # For vocabularies over 65,536 the upper halves are small numbers: 0, 1, 2 or so.
        is_small = wider < WORD and int(highs.max()) < MOST_UPPER
        if not is_small or len(np.unique(lows)) < 4 * MOST_UPPER:
            return None
    if int(((lows != 0) & (lows != ones)).sum()) < LEAST_VALUES:
        return None
    step = wider // width
    fraction = "every other one" if step == 2 else f"{step // 2} of every {step}"
    upper = "0" if not highs.any() else f"{highs.min()} to {highs.max()}"
    return (
        f"of {words.size // width} values looked at, {fraction} would be the upper "
        f"half of a {LIKELY[wider]}, and these are {upper}"
    )
