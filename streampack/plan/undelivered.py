"""Samples that were drawn and not delivered when a chapter ended. Their streams draw them first.

::

    chapter 0    packs a b | c d      after b, chapter 1 begins; the packer has buffered e
    undelivered  web   c1 d2          in the order of their passes, with the pieces of a sample
                 code  d1 e1          together
    chapter 1    draws web, web       c1, d2, then new samples; code waits until it is drawn

Cost: a sort of the segments at an edge, about 0.5 us each. Memory: 48 bytes a segment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streampack.types import LENGTH, NO_SEGMENTS, PASS, SAMPLE, START, STREAM, Int64Array


class Undelivered:
    """The undelivered samples of a queue, each as one or more segments, by stream and in order."""

    def __init__(self, segments: Int64Array = NO_SEGMENTS, streams: Sequence[int] = ()) -> None:
        """Sort `segments`, shape (n, 6), of the given streams, whose numbers ascend."""
        by_sample = np.lexsort(segments[:, [START, SAMPLE, PASS, STREAM]].T)
        begins = _begins(segments[by_sample])
        # Samples of a pass keep the order in which they come first.
        first = np.minimum.reduceat(by_sample, begins) if len(begins) else begins
        first = np.repeat(first, np.diff(np.append(begins, len(segments))))
        own = segments[by_sample]
        order = np.lexsort((first, own[:, PASS], own[:, STREAM]))
        self._segments = segments = own[order]
        begins = _begins(segments)
        self._bounds = np.append(begins, len(segments))
        self._tokens = np.diff(np.append(0, np.cumsum(segments[:, LENGTH]))[self._bounds])
        of_sample = segments[begins, STREAM]
        self._nexts = np.searchsorted(of_sample, streams)
        self._stops = np.searchsorted(of_sample, streams, side="right")

    @property
    def counts(self) -> Int64Array:
        """Samples left of each stream, shape (num_streams,)."""
        return self._stops - self._nexts

    @property
    def segments(self) -> Int64Array:
        """Segments of the samples left, in order, shape (n, 6)."""
        if not self.counts.any():
            return NO_SEGMENTS
        pairs = zip(self._nexts.tolist(), self._stops.tolist(), strict=True)
        return self.of(np.concatenate([np.arange(first, stop) for first, stop in pairs]))

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
        begins, sizes = self._bounds[samples], np.diff(self._bounds)[samples]
        firsts = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
        segments: Int64Array = self._segments[firsts + np.arange(int(sizes.sum()))]
        return segments


def _begins(segments: Int64Array) -> Int64Array:
    """Return the rows at which another sample begins, shape (num_samples,)."""
    keys = segments[:, : SAMPLE + 1]
    return np.flatnonzero((np.diff(keys, axis=0, prepend=-1) != 0).any(axis=1))
