"""Samples that were drawn and not delivered when a chapter ended. Their streams draw them first.

::

    chapter 0    packs a b | c d      after b, chapter 1 begins; the packer has buffered e
    undelivered  web   c1 d2          in the order of their passes, with the pieces of a sample
                 code  d1 e1          together
    chapter 1    draws web, web       c1, d2, then new samples; code waits until it is drawn

Cost: a sort of the segments at an edge, about 0.5 us each. Memory: 48 bytes a segment.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from streampack.types import LENGTH, PASS, SAMPLE, START, STREAM, TOTAL, Int64Array


class Undelivered:
    """The undelivered samples of a queue, each as one or more segments, by stream and in order."""

    def __init__(self, segments: Int64Array, streams: Sequence[int]) -> None:
        """Sort `segments`, shape (n, 6), of the given streams, in ascending order."""
        # Samples of a pass keep the order in which they come first, and their pieces join there.
        first = np.arange(len(segments))
        pieces = np.flatnonzero(segments[:, LENGTH] < segments[:, TOTAL])
        if len(pieces):
            own = segments[pieces]
            by_sample = np.lexsort(own[:, [SAMPLE, PASS, STREAM]].T)
            begins = _begins(own[by_sample])
            sizes = np.diff(np.append(begins, len(pieces)))
            pieces = pieces[by_sample]
            first[pieces] = np.repeat(np.minimum.reduceat(pieces, begins), sizes)
            order = np.lexsort((segments[:, START], first))
            segments = segments[order]
        # Keys of 16 bits are sorted several times faster.
        passes = segments[:, PASS] - segments[:, PASS].min(initial=2**62)
        groups = segments[:, STREAM] * (1 + passes.max(initial=0)) + passes
        groups = groups.astype(np.min_scalar_type(groups.max(initial=0)))
        self._segments = segments = segments[np.argsort(groups, kind="stable")]
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

    def of(self, samples: Int64Array) -> Int64Array:
        """Return the segments of some samples, by number, in this order, shape (n, 6)."""
        begins, sizes = self._bounds[samples], self._sizes[samples]
        firsts = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
        segments: Int64Array = self._segments[firsts + np.arange(int(sizes.sum()))]
        return segments


def _begins(segments: Int64Array) -> Int64Array:
    """Return the rows at which another sample begins, shape (num_samples,)."""
    keys = segments[:, : SAMPLE + 1]
    return np.flatnonzero((np.diff(keys, axis=0, prepend=-1) != 0).any(axis=1))
