"""Which stream a lane's next sample comes from, if packs mix streams and lengths are known.

For sources of unknown length, `deficit.py` decides.

Counted in samples, each chunk of 4,096 draws takes every stream as often as its quota requires, in
shuffled order::

    quotas 6 : 2, chunks of 4     0 1 0 0 | 0 0 1 0        exact over the epoch, to the sample

Counted in tokens, the running deficit decides (worst-case fair weighted fair queueing, Bennett &
Zhang 1996): of the streams that are not ahead of their share, the one whose next sample would
finish first. When a stream ends, the others keep their relative shares::

    shares 6 : 3 : 1      0 1 0 2 0 0 1 0 1 0 | 1 2 1 1 1 2 1 1      stream 0 ends: 3 : 1

Without deficits at the start, every lane would begin with a sample of every stream, and the more
lanes there are, the further streams of long samples would be ahead. A lane therefore begins as if
it had drawn for long: each stream first waits for as long as the rest of a sample would take. With
the probability of its share, that moment is inside one of its own samples: it is drawn as a whole
immediately or not at all, whichever end is nearer.

Cost: about 10 ns a draw. State: two integers, or one a stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streampack._numba import compiled
from streampack.mix.apportion import apportion
from streampack.philox import random_bits
from streampack.rng import deal_places
from streampack.types import Int64Array

CHUNK = 4096
LOOKAHEAD = 1024  # lengths that a draw by tokens loads ahead for the stream drawn most often
PHASE_LENGTHS = 256  # of a stream's next samples, from which a lane's first wait is drawn
# Multiples of these, modulo 2**64, fill a square evenly: 2**64 / g and 2**64 / g**2, g**3 = g + 1.
STEPS = (0xC13FA9A902A6328F, 0x91E10DA5C79E7B1C)
WORD_BITS = 64
SPARE = 16  # margin for the other streams, on top of a lookahead proportional to their draws
TOKEN_SCALE = 1 << 30  # shares in 2**-30: deficits of samples up to 2**32 tokens fit 64 bits


def draw_chunk(
    quotas: Sequence[int],
    chunk: int,
    seed: int,
    seed_path: tuple[int | str, ...],
    size: int = CHUNK,
) -> tuple[Int64Array, Int64Array]:
    """Return the draws of each stream in a chunk of `size`, and their places; see `draw_places`.

    >>> draw_chunk([6000, 2000], 1, 17, (0, 0))[0].tolist()
    [2928, 976]
    """
    total = sum(quotas)
    before = apportion(min(chunk * size, total), quotas)
    after = apportion(min(chunk * size + size, total), quotas)
    counts = np.subtract(after, before, dtype=np.int64)
    return counts, draw_places(counts, chunk, seed, seed_path)


def draw_places(
    counts: Int64Array, chunk: int, seed: int, seed_path: tuple[int | str, ...]
) -> Int64Array:
    """Return the positions in a chunk at which each stream is drawn, shape (sum(counts),).

    They are grouped by stream and ascend within it; `seed_path` is the epoch and lane.

    >>> sorted(draw_places(np.array([2, 1]), 0, 17, (0, 0)).tolist())
    [0, 1, 2]
    """
    if np.count_nonzero(counts) < 2:
        return np.arange(counts.sum())  # at most one stream: nothing to shuffle
    return deal_places(counts, seed, "draw", *seed_path, chunk)


def first_wait(
    lengths: Int64Array, share: float, lane: int, seed: int, seed_path: tuple[int | str, ...]
) -> int:
    """Return the tokens that a stream with this share waits for at the start of a lane.

    They are a fraction of one of its `lengths`, drawn in proportion to the length: 0 or 1 as often
    as its share, otherwise any. Over the lanes, fractions and lengths are spread evenly.
    `seed_path` is the epoch or chapter, and the stream.

    >>> [first_wait(np.array([100, 100]), 0.4, lane, 17, (0, "web")) for lane in range(4)]
    [29, 0, 100, 73]
    """
    bits = random_bits(2, seed, "wait", *seed_path).tolist()
    places = [start + lane * step for start, step in zip(bits, STEPS, strict=True)]
    place, drawn = (place % (1 << WORD_BITS) for place in places)
    part = (place / (1 << WORD_BITS) - share / 2) / max(1 - share, 1e-9)
    lengths = np.sort(lengths)
    ends = np.cumsum(lengths)
    if not len(ends) or not ends[-1]:
        return 0
    number = int(ends.searchsorted(drawn * int(ends[-1]) >> WORD_BITS, side="right"))
    return int(min(max(part, 0.0), 1.0) * int(lengths[number]))


def first_deficits(shares: Int64Array, waits: Sequence[int]) -> Int64Array:
    """Return deficits, in sum 0, with which each stream waits for so many of its tokens.

    >>> first_deficits(np.array([3, 1]), [0, 8]).tolist()
    [24, -24]
    """
    whole, waited = int(shares.sum()), sum(waits)
    pairs = zip(shares.tolist(), waits, strict=True)
    return np.array([share * waited - whole * wait for share, wait in pairs], np.int64)


def lookaheads(weights: Sequence[float], sizes: Sequence[tuple[int, int]]) -> list[int]:
    """Return the samples of each stream that a draw by tokens should know the lengths of.

    They are proportional to the samples drawn, given the (samples, tokens) that each stream has.
    """
    due = [
        weight * samples / max(tokens, 1)
        for weight, (samples, tokens) in zip(weights, sizes, strict=True)
    ]
    most = max(*due, 1e-9)
    return [min(LOOKAHEAD, int(LOOKAHEAD * rate / most * 1.25) + SPARE) for rate in due]


def draw_known(
    shares: Int64Array,
    deficits: Int64Array,
    lengths: Sequence[Int64Array],
    is_all: npt.NDArray[np.bool_],
    most: int,
    most_tokens: int | None = None,
) -> tuple[Int64Array, Int64Array, int | None]:
    """Draw up to `most` samples by `draw_by_tokens`, and about `most_tokens`.

    Of the last sample more than half fits. `lengths` are the tokens of each stream's next samples;
    `is_all` is true where no others follow. Return the draws of each stream, shape (num_streams,),
    their places by stream, and the tokens that are left to draw; 0 if the next sample does not fit.
    """
    counts = np.array([len(of_stream) for of_stream in lengths])
    ends = np.cumsum(counts)
    known, out = np.concatenate(lengths), np.empty(most, np.int64)
    began, finished = (shares.copy(), deficits.copy()), is_all.astype(np.int64)
    draws = out[: draw_by_tokens(shares, deficits, known, ends, ends - counts, finished, out)]
    counts, places = np.bincount(draws, minlength=len(counts)), np.argsort(draws, kind="stable")
    if most_tokens is None or not len(draws):
        return counts, places, most_tokens
    sizes = np.empty(len(draws), np.int64)
    sizes[places] = np.concatenate([own[:n] for own, n in zip(lengths, counts, strict=True)])
    ends = np.cumsum(sizes)
    fitting = max(int((2 * ends - sizes).searchsorted(2 * most_tokens)), 1)
    if fitting == len(draws):
        return counts, places, max(most_tokens - int(ends[-1]), 0)
    deficits[:] = began[1]
    return *draw_known(began[0], deficits, lengths, is_all, fitting)[:2], 0


@compiled
def _next_stream(
    shares: Int64Array,
    whole: np.int64,
    deficits: Int64Array,
    lengths: Int64Array,
    ends: Int64Array,
    nexts: Int64Array,
) -> int:
    """Return the stream with the next sample to finish, or -1 if none has a sample left."""
    best = most_behind = -1
    best_finish = 0.0
    for stream in range(len(shares)):
        if nexts[stream] == ends[stream]:
            continue
        if most_behind < 0 or deficits[stream] > deficits[most_behind]:
            most_behind = stream
        if deficits[stream] >= 0 and shares[stream] > 0:
            owed = lengths[nexts[stream]] * whole - deficits[stream]
            finish = owed / shares[stream]
            if best < 0 or finish < best_finish:
                best = stream
                best_finish = finish
    # No stream is eligible if only streams without a share are left.
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
    """Fill `out` with streams by running token deficit, and return the number of draws.

    Stops early if a stream's known lengths are used up, unless the stream is finished.

    Args:
        shares: Share of each stream, summing to at most TOKEN_SCALE; 0 for ended streams. Updated.
        deficits: Amount due to each stream, in tokens times the sum of the shares. Updated.
        lengths: Tokens of the upcoming samples, grouped by stream.
        ends: One past each stream's last length.
        nexts: Index of each stream's next length. Updated.
        finished: 1 for streams that have no samples beyond the known ones.
        out: Receives the draws.
    """
    whole = np.int64(0)
    for stream in range(len(shares)):
        whole += shares[stream]
    for i in range(len(out)):
        for stream in range(len(shares)):
            if nexts[stream] == ends[stream] and finished[stream] == 0:
                return i
        best = _next_stream(shares, whole, deficits, lengths, ends, nexts)
        if best < 0:
            return i
        length = lengths[nexts[best]]
        for stream in range(len(shares)):
            deficits[stream] += shares[stream] * length
        deficits[best] -= whole * length
        nexts[best] += 1
        out[i] = best
        if nexts[best] == ends[best] and finished[best] == 1:
            whole -= shares[best]
            shares[best] = 0
            deficits[:] = 0
    return len(out)
