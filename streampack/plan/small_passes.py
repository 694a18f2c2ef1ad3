"""Bounds for queues that would plan more than a pass of a small stream ahead.

::

    arrivals          pass 4: a b c d e | pass 5: c a e b d | pass 6: ...
    windows           [     one pass    ] [     one pass    ]

In a run without an end, a packer or a shuffle of packs that spans many passes would deliver some
samples of a small stream many times before others. So a window takes at most one pass of each
stream, and little waits for the next window. docs/adr/0055 has the bound that this gives, and what
else was tried.

Cost: 10 ns a segment, and about 30 us a window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product, starmap

import numpy as np

from streampack._numba import compiled
from streampack.config import Packing
from streampack.plan.recipe import Recipe
from streampack.types import PASS, START, STREAM, Int64Array

NONE = -1
LEFT_PART = 64  # a window leaves at most this part of a pass to the next one


@dataclass(frozen=True, kw_only=True, eq=False)
class SmallPass:
    """How a queue is bounded by its passes."""

    packing: Packing
    """The packing of the queue."""
    num_samples: int
    """Samples of the mixture after which a stream begins another pass."""
    least: Int64Array
    """Samples of each stream that a window takes before it ends with a pass, (num_streams,)."""


def small_pass(recipe: Recipe, lane: int, queue: int) -> SmallPass | None:
    """Return the bounds of a queue; None if it has an end, or passes too large to need any."""
    if not recipe.is_endless:
        return None
    in_pass = {
        number: recipe.samples_in(number, lane)
        for number in recipe.streams_in(queue)
        if recipe.streams[number].num_samples > 1
    }
    mixtures = list(recipe.mixtures(queue))
    bounds = [
        (in_pass[number] / part, sum(mixture[n] * recipe.streams[n].mean_tokens for n in mixture))
        for mixture in mixtures
        for number, part in mixture.items()
        if part and in_pass.get(number)
    ]
    num_samples, mean_tokens = min(bounds, default=(np.inf, 0))
    packing = recipe.shapes.packings[queue]
    sizes = recipe.sizes(lane, queue)
    window = max(sizes.max_samples, sizes.chunk if packing.packs_windows else 0)
    if num_samples >= 2 * (window + packing.sample_limit):
        return None
    least = np.full(len(recipe.streams), np.iinfo(np.int64).max)
    for number, samples in in_pass.items():
        # If all lanes share a stream, a lane gets more or fewer.
        is_shared = recipe.assignment(number)[1] is None
        least[number] = max(samples - 1, 1) if is_shared else samples
    # Not of those that are listed: streams without a share change nothing.
    if len({number for mixture in mixtures for number, part in mixture.items() if part}) == 1:
        least[:] = 0
    packing = _bounded(packing, num_samples * mean_tokens)
    return SmallPass(packing=packing, num_samples=int(num_samples), least=least)


def uses_means(recipe: Recipe) -> bool:
    """Return whether the mean length of a stream's samples, if only estimated, changes packs."""
    if "uses_means" not in recipe.found:
        is_ramp = recipe.chapter is not None and recipe.chapter.ramps
        by_tokens = recipe.mixing.weight_unit == "tokens"
        queues = product(range(recipe.num_lanes), range(recipe.num_queues))
        is_used = recipe.is_mixed and (is_ramp or by_tokens)
        recipe.found["uses_means"] = is_used or any(starmap(partial(small_pass, recipe), queues))
    return bool(recipe.found["uses_means"])


def _bounded(packing: Packing, in_pass: float) -> Packing:
    """Return the packing of a queue with so many tokens in a pass."""
    row = packing.row_tokens
    if not packing.packs_windows:
        return packing
    if in_pass < row and packing.cost is None:
        return replace(packing, method="next_fit", short_seq_len=None)
    most = max(int(in_pass) // LEFT_PART, row)
    return replace(packing, buffer_tokens=min(packing.buffer_limit or row, most))


@compiled
def _mark_windows(
    segments: Int64Array, least: Int64Array, most: int, seen: Int64Array, window_of: Int64Array
) -> None:
    """Write the number of each segment's window; see `window_starts`.

    `seen`: by stream, the pass of its first sample in the window, and its samples there.
    """
    window = num_samples = 0
    for row in range(len(segments)):
        stream = segments[row, STREAM]
        if segments[row, START] == 0:
            first = seen[0, stream]
            is_next_pass = first != NONE and segments[row, PASS] != first
            if num_samples == most or (is_next_pass and seen[1, stream] >= least[stream]):
                window += 1
                num_samples = 0
                for other in range(len(least)):
                    seen[0, other], seen[1, other] = NONE, 0
            if seen[0, stream] == NONE:
                seen[0, stream] = segments[row, PASS]
            seen[1, stream] += 1
            num_samples += 1
        window_of[row] = window


def window_starts(segments: Int64Array, least: Int64Array, most: int) -> Int64Array:
    """Return the rows of segments, shape (n, 6), at which windows after the first begin.

    A window ends before a sample of another pass, if it has `least` samples of that stream, and
    after `most` samples of all streams.

    >>> rows = np.array([[0, number // 3, 0, 0, 1, 1] for number in range(8)])
    >>> window_starts(rows, np.array([0]), 100).tolist()
    [3, 6]
    """
    window_of = np.empty(len(segments), np.int64)
    seen = np.zeros((2, len(least)), np.int64)
    seen[0] = NONE
    _mark_windows(np.ascontiguousarray(segments), least, most, seen, window_of)
    return np.flatnonzero(np.diff(window_of)) + 1
