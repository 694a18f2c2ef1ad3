"""Samples that were drawn and not delivered when a chapter ended. Their streams draw them first.

::

    chapter 0    packs a b | c d      after b, chapter 1 begins; the packer has buffered e
    undelivered  web   c1 d2          in the order of their passes, with the pieces of a sample
                 code  d1 e1          together
    chapter 1    draws web, web       c1, d2, then new samples; code waits until it is drawn

Cost: a sort of the segments at an edge, about 30 ns each. Memory: 48 bytes a segment.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from streampack.pack.overflow import fit_segments
from streampack.plan.pack_order import copy_packs
from streampack.types import (
    LENGTH,
    NUM_COLUMNS,
    PASS,
    SAMPLE,
    START,
    STREAM,
    TOTAL,
    Int64Array,
    Packs,
)


class Undelivered:
    """The undelivered samples of a queue, each as one or more segments, by stream and in order."""

    def __init__(self, segments: Int64Array, streams: Sequence[int]) -> None:
        """Sort `segments`, shape (n, 6), of the given streams, in ascending order."""
        # Samples of a pass keep the order in which they come first, and their pieces join there.
        order = np.arange(len(segments))
        is_piece = segments[:, LENGTH] < segments[:, TOTAL]
        if is_piece.any():
            pieces = np.flatnonzero(is_piece)
            own = segments[pieces]
            by_start = np.lexsort(own[:, [START, SAMPLE, PASS, STREAM]].T)
            begins = _begins(own[by_start])
            pieces = pieces[by_start]
            sizes = np.diff(np.append(begins, len(pieces)))
            first = np.repeat(np.minimum.reduceat(pieces, begins), sizes)
            whole = np.flatnonzero(~is_piece)
            places = np.append(whole, first)
            order = np.append(whole, pieces)[np.argsort(places, kind="stable")]
        # Keys of 16 bits are sorted several times faster.
        passes = segments[:, PASS] - segments[:, PASS].min(initial=2**62)
        groups = segments[:, STREAM] * (1 + passes.max(initial=0)) + passes
        groups = groups.astype(np.min_scalar_type(groups.max(initial=0)))[order]
        order = order[np.argsort(groups, kind="stable")]
        self._segments = segments = segments.take(order, axis=0)
        self._longest = int(segments[:, LENGTH].max(initial=0))
        begins = _begins(segments)
        self._bounds = np.append(begins, len(segments))
        self._sizes = np.diff(self._bounds)
        self._tokens = np.diff(np.append(0, np.cumsum(segments[:, LENGTH]))[self._bounds])
        of_sample = segments[begins, STREAM]
        self._nexts = np.searchsorted(of_sample, streams)
        self._stops = np.searchsorted(of_sample, streams, side="right")

    def copy(self) -> Undelivered:
        """Return a copy, of which other samples may be taken."""
        copied = copy.copy(self)
        copied._nexts = self._nexts.copy()
        return copied

    @property
    def counts(self) -> Int64Array:
        """Samples left of each stream, shape (num_streams,)."""
        return self._stops - self._nexts

    @property
    def segments(self) -> Int64Array:
        """Segments of the samples left, in order, shape (n, 6)."""
        pairs = zip(self._bounds[self._nexts], self._bounds[self._stops], strict=True)
        return np.concatenate([self._segments[begin:end] for begin, end in pairs])

    def lengths(self, index: int, most: int) -> Int64Array:
        """Return the tokens left of the next samples of a stream, at most `most`, shape (n,)."""
        first = int(self._nexts[index])
        left: Int64Array = self._tokens[first : min(first + most, int(self._stops[index]))]
        return left

    def take(self, index: int, most: int) -> Int64Array:
        """Take the next samples of a stream, at most `most`; return their numbers, shape (n,)."""
        first = int(self._nexts[index])
        self._nexts[index] = min(first + most, int(self._stops[index]))
        return np.arange(first, int(self._nexts[index]))

    def of(self, samples: Int64Array, longest: int) -> Packs:
        """Return the segments of some samples, by number, in this order, each as a pack.

        They are cut into pieces of at most `longest`.
        """
        sizes = self._sizes[samples]
        ends = np.cumsum(sizes)
        segments = np.empty((int(sizes.sum()), NUM_COLUMNS), np.int64)
        copy_packs(self._segments, self._bounds[samples], sizes, ends - sizes, segments)
        if self._longest > longest:
            ends = np.cumsum(-(-segments[:, LENGTH] // longest))[ends - 1]
            segments = fit_segments(segments, longest)
        return Packs(segments=segments, ends=ends)


def _begins(segments: Int64Array) -> Int64Array:
    """Return the rows at which another sample begins, shape (num_samples,)."""
    is_other = np.ones(len(segments), np.bool_)
    before, after = segments[:-1], segments[1:]
    is_other[1:] = before[:, SAMPLE] != after[:, SAMPLE]
    for column in (STREAM, PASS):
        is_other[1:] |= before[:, column] != after[:, column]
    return np.flatnonzero(is_other)
