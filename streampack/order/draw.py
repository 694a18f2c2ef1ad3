"""Which stream a lane's next sample comes from, where packs mix streams.

Counted in samples, chunks of 4,096 draws hold each stream as often as its quota says, shuffled::

    quotas 6 : 2, chunks of 4     0 1 0 0 | 0 0 1 0        exact over the epoch, to the sample

Counted in tokens, the running deficit decides (worst-case fair weighted fair queueing, Bennett &
Zhang 1996): among the streams that are not ahead, the one whose next sample would be finished
first. No stream is ever ahead of its share by more than one of its samples.

Cost: about 10 ns a draw. State: two integers, or one a stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streampack.compiled import compiled
from streampack.mix.apportion import parts
from streampack.rng import permutation
from streampack.types import Int64Array

__all__ = ["CHUNK", "TOKEN_SCALE", "draw_by_samples", "draw_by_tokens"]

CHUNK = 4096
TOKEN_SCALE = 1 << 30  # shares in 2**-30: deficits of samples up to 2**32 tokens fit 64 bits


def draw_by_samples(
    quotas: Sequence[int], chunk: int, seed: int, place: tuple[int | str, ...]
) -> Int64Array:
    """Return the streams of one chunk of draws, shape (up to CHUNK,); empty after the last.

    Args:
        quotas: Draws of each stream in the epoch.
        chunk: Which chunk of the epoch.
        seed: The run's seed.
        place: Epoch and lane.

    >>> sorted(draw_by_samples([6, 2], 0, 17, (0, 0)).tolist())
    [0, 0, 0, 0, 0, 0, 1, 1]
    >>> len(draw_by_samples([6, 2], 1, 17, (0, 0)))
    0
    """
    total = sum(quotas)
    first, last = min(chunk * CHUNK, total), min((chunk + 1) * CHUNK, total)
    if first == last:
        return np.zeros(0, np.int64)
    before, after = parts(first, quotas), parts(last, quotas)
    counts = [late - early for early, late in zip(before, after, strict=True)]
    draws = np.repeat(np.arange(len(quotas)), counts)
    return draws[permutation(len(draws), seed, "draw", *place, chunk)]


@compiled
def _next_stream(
    shares: Int64Array,
    deficits: Int64Array,
    lengths: Int64Array,
    ends: Int64Array,
    nexts: Int64Array,
) -> int:
    """Return the stream whose next sample is due first; -1 where none has one."""
    best = most_behind = -1
    best_finish = 0.0
    for stream in range(len(shares)):
        if nexts[stream] == ends[stream]:
            continue
        if most_behind < 0 or deficits[stream] > deficits[most_behind]:
            most_behind = stream
        if deficits[stream] >= 0 and shares[stream] > 0:
            owed = lengths[nexts[stream]] * TOKEN_SCALE - deficits[stream]
            finish = owed / shares[stream]
            if best < 0 or finish < best_finish:
                best = stream
                best_finish = finish
    # None is eligible where streams that are owed tokens have run out: the most behind goes on.
    return best if best >= 0 else most_behind


@compiled
def draw_by_tokens(
    shares: Int64Array,
    deficits: Int64Array,
    lengths: Int64Array,
    ends: Int64Array,
    nexts: Int64Array,
    finished: Int64Array,
    out: Int64Array,
) -> int:
    """Fill `out` with streams by running token deficit; return how many draws were made.

    Stops early when a stream's known lengths are used up, unless it is finished.

    Args:
        shares: Share of each stream, summing to TOKEN_SCALE.
        deficits: What each stream is owed, in 1 / TOKEN_SCALE tokens; moves on.
        lengths: Tokens of the samples that come next, stream after stream.
        ends: One past each stream's last length.
        nexts: Each stream's next length; moves on.
        finished: 1 where no samples come after the known ones.
        out: Where the draws go.
    """
    for i in range(len(out)):
        for stream in range(len(shares)):
            if nexts[stream] == ends[stream] and finished[stream] == 0:
                return i
        best = _next_stream(shares, deficits, lengths, ends, nexts)
        if best < 0:
            return i
        length = lengths[nexts[best]]
        for stream in range(len(shares)):
            deficits[stream] += shares[stream] * length
        deficits[best] -= TOKEN_SCALE * length
        nexts[best] += 1
        out[i] = best
    return len(out)
