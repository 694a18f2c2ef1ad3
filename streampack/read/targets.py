"""Labels of streams that say which tokens are targets: a labels column, a loss mask, or both.

One sample ``a b c d`` of which only c and d are targets, in the three ways to store that::

    tokens               a    b    c    d
    loss_mask            0    0    1    1
    labels, unshifted   -100 -100  c    d       each beside its own token
    labels, shifted     -100  c    d   -100     each beside the token before it
    in the batch        -100  c    d   -100     always shifted

What the columns leave open:

- An added BOS makes token 0 a target as a mask or an unshifted column says; a shifted column has no
  word on it, so it is none.
- An added EOS is a target if and only if the last own token is one; in a shifted column the last
  label, which speaks of what follows, says so too.
- The last label of a shifted column is kept where the sample ends with its own last token (samples
  stored as ``text[:-1]`` with labels ``text[1:]``), and dropped where the sample was truncated.

Cost: as gathering the columns' bytes. Batches of streams without such columns never come here.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from streampack.compiled import compiled
from streampack.read.kernels import (
    BAD_COLUMN,
    CODE,
    FINE,
    IGNORED,
    LABELS,
    LOSS_MASK,
    NO_COLUMN,
    SHIFTED,
    TOKENS,
    copy_values,
    locate,
    sample_edges,
    value_at,
)
from streampack.types import LENGTH, SAMPLE, START, TOTAL, Int64Array, IntArray

__all__ = ["gather_labels", "labels_are_shifted"]


def labels_are_shifted(samples: Iterable[tuple[IntArray, IntArray]]) -> bool | None:
    """Tell from (tokens, labels) of some samples how a labels column is stored.

    Returns:
        True if every label is -100 or the token after it, False if -100 or its own token; None if
        both are so, or neither.

    >>> labels_are_shifted([(np.array([5, 6, 7]), np.array([-100, 7, -100]))])
    True
    >>> labels_are_shifted([(np.array([5, 6, 7]), np.array([-100, 6, 7]))])
    False
    """
    shifted = unshifted = True
    for tokens, labels in samples:
        unshifted &= bool(np.all((labels == IGNORED) | (labels == tokens)))
        # Nothing is known of the token after the last one, so the last label may be anything.
        ahead = labels[:-1]
        shifted &= bool(np.all((ahead == IGNORED) | (ahead == tokens[1:])))
    return shifted if shifted != unshifted else None


@compiled
def _apply_labels(
    segment: Int64Array, place: Int64Array, shape: Int64Array, room: Int64Array
) -> int:
    """Overwrite the targets in `room` with those of a labels column.

    Args:
        segment: A segment row.
        place: Its place row.
        shape: Own tokens, added BOS, added EOS; shape (3,).
        room: The segment's labels, shape (length,); ``room[i]`` is for token ``start + 1 + i``.

    Returns:
        What is wrong, or FINE.
    """
    count, before, after = shape[0], shape[1], shape[2]
    address, values, problem = locate(place, LABELS, segment[SAMPLE])
    if problem != FINE or values != count:
        return BAD_COLUMN
    code, shifted = place[LABELS + CODE], place[SHIFTED]
    start, stop = segment[START], segment[START] + segment[LENGTH]
    first = start + 1
    last = min(stop + 1, before + count, segment[TOTAL])
    if shifted and first == before:
        room[first - start - 1] = IGNORED
        first += 1
    if first < last:
        copy_values(
            address, code, first - before - shifted, room[first - start - 1 : last - start - 1]
        )
    end = before + count  # the place after the own tokens: an added EOS, or the sample's end
    if stop < end or segment[TOTAL] < end:
        return FINE
    final = value_at(address, code, count - 1)
    if after == 0 and shifted:
        room[end - start - 1] = final
    elif after == 1 and start < end and segment[TOTAL] > end:
        is_target = final != IGNORED
        if shifted and count > 1:
            is_target = is_target or value_at(address, code, count - 2) != IGNORED
        if not is_target:
            room[end - start - 1] = IGNORED
    return FINE


@compiled
def _apply_mask(segment: Int64Array, place: Int64Array, shape: Int64Array, room: Int64Array) -> int:
    """Ignore the targets in `room` that a loss mask leaves out; arguments as `_apply_labels`."""
    count, before = shape[0], shape[1]
    address, values, problem = locate(place, LOSS_MASK, segment[SAMPLE])
    if problem != FINE or values != count:
        return BAD_COLUMN
    code = place[LOSS_MASK + CODE]
    first = segment[START] + 1
    for i in range(len(room)):
        # What follows the last own token, an added EOS, goes by that token.
        own = min(first + i - before, count - 1)
        if own >= 0 and value_at(address, code, own) == 0:
            room[i] = IGNORED
    return FINE


@compiled
def _label_segment(
    segment: Int64Array, place: Int64Array, options: Int64Array, room: Int64Array
) -> int:
    """Apply the columns that a segment's stream has to its labels; return what is wrong."""
    has_labels = place[LABELS + CODE] != NO_COLUMN
    has_mask = place[LOSS_MASK + CODE] != NO_COLUMN
    if not (has_labels or has_mask):
        return FINE
    address, count, problem = locate(place, TOKENS, segment[SAMPLE])
    if problem != FINE:
        return problem
    before, after = sample_edges(address, place[TOKENS + CODE], count, options)
    shape = np.array([count, before, after])
    if has_labels:
        problem = _apply_labels(segment, place, shape, room)
    if has_mask and problem == FINE:
        problem = _apply_mask(segment, place, shape, room)
    return problem


@compiled
def gather_labels(
    segments: Int64Array,
    ends: Int64Array,
    places: Int64Array,
    options: Int64Array,
    tokens: Int64Array,
    next_tokens: Int64Array,
    labels: Int64Array,
) -> tuple[int, int]:
    """Fill rows with labels; the other arguments as `gather_tokens` left them.

    Args:
        segments: Segment rows, shape (n, 6).
        ends: One past the last segment of each pack, shape (num_packs,).
        places: Place rows, shape (n, PLACE_COLUMNS).
        options: BOS and EOS ids and more, shape (4,).
        tokens: Gathered tokens, shape (num_rows, S).
        next_tokens: The token after each segment, or IGNORED; shape (n,).
        labels: Filled, shape (num_rows, S).

    Returns:
        (segment, problem) of the first bad segment; (-1, FINE) if there is none.
    """
    k = 0
    for row in range(len(labels)):
        filled = 0
        end = ends[row] if row < len(ends) else k
        while k < end:
            stop = filled + segments[k, LENGTH]
            labels[row, filled : stop - 1] = tokens[row, filled + 1 : stop]
            labels[row, stop - 1] = next_tokens[k]
            problem = _label_segment(segments[k], places[k], options, labels[row, filled:stop])
            if problem != FINE:
                return k, problem
            filled = stop
            k += 1
        labels[row, filled:] = IGNORED
    return -1, FINE
