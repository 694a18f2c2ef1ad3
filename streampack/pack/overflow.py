"""Convert samples to segments, and apply the overflow rule to those longer than a pack.

With max_seq_len=4 and samples A (3 tokens) and B (10)::

    split       A A A | B B B B | B B B B | B B       pieces in order, each a segment
    truncate    A A A | B B B B                       the rest of B is never read
    drop        A A A                                 B is never read
    error       A A A   DataError names B

A sample without tokens has no segment.

Cost: about 5 ns a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streampack._numba import compiled
from streampack.errors import DataError
from streampack.types import (
    LENGTH,
    NO_SEGMENTS,
    NUM_COLUMNS,
    PASS,
    SAMPLE,
    START,
    STREAM,
    TOKENS,
    TOTAL,
    Int64Array,
)


@compiled
def _count(samples: Int64Array, max_seq_len: int) -> tuple[int, int, int]:
    num_empty = num_long = num_pieces = 0
    for row in range(len(samples)):
        tokens = samples[row, TOKENS]
        num_empty += tokens < 1
        num_long += tokens > max_seq_len
        num_pieces += -(-tokens // max_seq_len)
    return num_empty, num_long, num_pieces


@compiled
def _write(samples: Int64Array, max_seq_len: int, splits: bool, out: Int64Array) -> None:
    """Write the segments of samples. A sample over max_seq_len yields all pieces, or the first."""
    segment = 0
    for row in range(len(samples)):
        total = samples[row, TOKENS] if splits else min(samples[row, TOKENS], max_seq_len)
        start = 0
        while start < total:
            for column in range(START):
                out[segment, column] = samples[row, column]
            out[segment, START] = start
            out[segment, LENGTH] = min(total - start, max_seq_len)
            out[segment, TOTAL] = total
            segment += 1
            start += max_seq_len


def fit_samples(
    samples: Int64Array, max_seq_len: int, overflow: str, names: Sequence[str]
) -> Int64Array:
    """Convert rows of stream, pass, sample and length to segments that fit a pack, shape (m, 6).

    Raises:
        DataError: If with overflow="error" a sample has more tokens than fit a pack.

    >>> fit_samples(np.array([[0, 0, 7, 5]]), 4, "split", ["web"]).tolist()
    [[0, 0, 7, 0, 4, 5], [0, 0, 7, 4, 1, 5]]
    """
    if not len(samples):
        return NO_SEGMENTS
    num_empty, num_long, num_pieces = _count(samples, max_seq_len)
    if num_long and overflow == "error":
        long = samples[int((samples[:, TOKENS] > max_seq_len).argmax())]
        raise DataError(
            f"{_named(long, names)} does not fit max_seq_len={max_seq_len}; "
            "set overflow to split, truncate or drop, or raise max_seq_len"
        )
    splits = overflow == "split"
    if num_empty or (num_long and overflow == "drop"):
        samples = samples[count_pieces(samples, max_seq_len, overflow) > 0]
    segments = np.empty((num_pieces if splits else len(samples), NUM_COLUMNS), np.int64)
    _write(samples, max_seq_len, splits, segments)
    return segments


def count_pieces(samples: Int64Array, max_seq_len: int, overflow: str) -> Int64Array:
    """Return the segments that `fit_samples` makes of each sample, shape (n,).

    >>> count_pieces(np.array([[0, 0, 7, 5], [0, 0, 8, 3]]), 4, "drop").tolist()
    [0, 1]
    """
    pieces: Int64Array = -(-samples[:, TOKENS] // max_seq_len)
    if overflow == "drop":
        pieces[pieces > 1] = 0
    return pieces if overflow == "split" else np.minimum(pieces, 1)


def kept_tokens(lengths: Int64Array, max_seq_len: int, overflow: str) -> Int64Array:
    """Return the tokens that samples of these lengths deliver, shape (n,).

    >>> kept_tokens(np.array([5, 3]), 4, "truncate").tolist()
    [4, 3]
    """
    if overflow == "truncate":
        return np.minimum(lengths, max_seq_len)
    return np.where(lengths > max_seq_len, 0, lengths) if overflow == "drop" else lengths


def fit_segments(segments: Int64Array, max_seq_len: int) -> Int64Array:
    """Cut segment rows, shape (n, 6), into pieces of at most a pack, shape (m, 6).
    >>> fit_segments(np.array([[0, 0, 7, 2, 5, 9]]), 4)[:, START : LENGTH + 1].tolist()
    [[2, 4], [6, 1]]
    """
    num_pieces = -(-segments[:, LENGTH] // max_seq_len)
    if (num_pieces <= 1).all():
        return segments
    pieces = np.repeat(segments, num_pieces, axis=0)
    firsts = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    skipped = (np.arange(len(pieces)) - firsts) * max_seq_len
    pieces[:, START] += skipped
    pieces[:, LENGTH] = np.minimum(pieces[:, LENGTH] - skipped, max_seq_len)
    return pieces


def count_dropped(
    samples: Int64Array, max_seq_len: int, overflow: str, num_streams: int
) -> Int64Array:
    """Return the number of samples of each stream without a segment, shape (num_streams,)."""
    is_dropped = count_pieces(samples, max_seq_len, overflow) == 0
    return np.bincount(samples[is_dropped, STREAM], minlength=num_streams)


def _named(sample: Int64Array, names: Sequence[str]) -> str:
    name = names[int(sample[STREAM])]
    return (
        f"stream {name!r}, sample {sample[SAMPLE]} of {sample[TOKENS]} tokens (pass {sample[PASS]})"
    )
