"""Statistics of delivered samples per stream, counted from plans without reading tokens.

Cost: about 1 us per batch; segments are counted a few hundred batches at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from streampack._numba import compiled
from streampack.plan.recipe import Recipe
from streampack.types import (
    LENGTH,
    NO_SEGMENTS,
    SAMPLE,
    START,
    STREAM,
    TOTAL,
    Float64Array,
    Int64Array,
    Packs,
)

COUNTED = ("samples", "tokens", "split", "truncated", "dropped")
"""What is counted of each stream. A sample counts with its first segment."""
SAMPLES, TOKENS, SPLIT, TRUNCATED, DROPPED = range(len(COUNTED))
OverRanks: TypeAlias = Callable[[Any], list[Any]]
"""Returns a value of each group of ranks that share batches, or of this rank alone."""
MAX_UNCOUNTED = 64  # groups of packs that were planned together; about 10 KB each


def alone(value: Any) -> list[Any]:
    """Return this rank's value."""
    return [value]


@compiled
def count_segments(segments: Int64Array, counts: Int64Array) -> None:
    """Add the samples, tokens and splits of segments, shape (n, 6), to counts by stream."""
    for i in range(len(segments)):
        stream, length = segments[i, STREAM], segments[i, LENGTH]
        counts[stream, TOKENS] += length
        if segments[i, START] == 0:
            counts[stream, SAMPLES] += 1
            if length < segments[i, TOTAL]:
                counts[stream, SPLIT] += 1


def _shares(counts: Sequence[float]) -> list[float]:
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def delivery_report(
    names: Sequence[str],
    counts: Mapping[str, list[int]],
    targets: Sequence[float],
    *,
    packs: int,
    slots: int,
    over_ranks: OverRanks = alone,
) -> dict[str, Any]:
    """Return the first part of `loader.stats()`, of `packs` with so many token `slots`.

    `counts` has the number of each stream by key, those of `COUNTED` among them. The streams'
    target shares are derived from `targets`. All are summed `over_ranks`.
    """
    parts = over_ranks([[*counts.values(), targets], [packs, slots]])
    *summed, targets = np.sum([part[0] for part in parts], axis=0).tolist()
    packs, slots = np.sum([part[1] for part in parts], axis=0).tolist()
    counts = {key: [int(n) for n in own] for key, own in zip(counts, summed, strict=True)}
    tokens = sum(counts["tokens"])
    columns: dict[str, Sequence[float]] = {
        **counts,
        "share_samples": _shares(counts["samples"]),
        "share_tokens": _shares(counts["tokens"]),
        "target": _shares(targets),
    }
    return {
        "streams": {
            name: {key: column[number] for key, column in columns.items()}
            for number, name in enumerate(names)
        },
        "packs": packs,
        "tokens": tokens,
        "fill": tokens / slots if slots else 0.0,
    }


class DeliveryStats:
    """Counts of samples, tokens and packs that this rank delivered."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._counts = np.zeros((len(recipe.streams), len(COUNTED)), np.int64)
        self._num_packs = 0
        self.num_slots = 0
        """Slots that the delivered packs took."""
        self.padding_packs = 0
        """Slots of padding packs in the batches delivered."""
        self._slot_tokens = 0  # tokens that they could hold
        self._uncounted: list[Packs] = []
        # What each stream was due of the delivered samples or tokens, in a run of chapters.
        self._due = np.zeros(len(recipe.streams))

    def add(
        self,
        packs: Packs,
        slots_per_pack: int = 1,
        shares: Float64Array | None = None,
        num_rows: int = 0,
    ) -> None:
        """Count delivered packs. Empty ones are padding, and so are rows beyond them.

        In a run of chapters, `shares` are those of the streams there, shape (num_streams,).
        """
        if shares is not None:
            is_by_tokens = self.recipe.target_unit == "tokens"
            rows = packs.segments
            amount = rows[:, LENGTH].sum() if is_by_tokens else (rows[:, START] == 0).sum()
            self._due += amount * shares
        if len(self._uncounted) >= MAX_UNCOUNTED:
            self._count()
        self._uncounted.append(packs)
        num_packs = len({0, *packs.ends.tolist()}) - 1  # an empty pack ends where it begins
        self._num_packs += num_packs
        self.num_slots += num_packs * slots_per_pack
        self.padding_packs += max(num_rows - num_packs, 0) * slots_per_pack
        self._slot_tokens += num_packs * slots_per_pack * self.recipe.packing.row_tokens

    def use(self, recipe: Recipe) -> None:
        self._count()
        self.recipe = recipe

    def _count(self) -> None:
        delivered, self._uncounted = self._uncounted, []
        segments = np.concatenate([NO_SEGMENTS, *(packs.segments for packs in delivered)])
        count_segments(segments, self._counts)
        for number, stream in enumerate(self.recipe.streams):
            if (stream.overflow or self.recipe.packing.overflow) != "truncate":
                continue
            lengths_of = stream.whole_lengths_of or stream.lengths_of
            longest = self.recipe.longest(number)
            is_full = (segments[:, STREAM] == number) & (segments[:, TOTAL] == longest)
            samples = segments[is_full & (segments[:, START] == 0), SAMPLE]
            shards = np.searchsorted(stream.first_sample, samples, side="right") - 1
            for shard in np.unique(shards).tolist():
                places = samples[shards == shard] - stream.first_sample[shard]
                longer = lengths_of(shard)[places] > longest
                self._counts[number, TRUNCATED] += int(longer.sum())

    def _targets(self) -> Sequence[float]:
        streams, chapter = self.recipe.streams, self.recipe.chapter
        if chapter is not None:
            return [float(due) for due in (self._due if self._due.any() else chapter.begin)]
        if self.recipe.target_unit == "tokens":
            return [stream.chosen_tokens for stream in streams]
        return [
            stream.quota.amount
            if stream.quota.unit == "samples"
            else stream.quota.amount * stream.num_samples // max(stream.num_tokens, 1)
            for stream in streams
        ]

    def stats(self, dropped: list[int], over_ranks: OverRanks = alone) -> dict[str, Any]:
        """Return the counts `over_ranks`; plans lack the samples `dropped`, counted by stream."""
        self._count()
        counts = dict(zip(COUNTED, self._counts.T.tolist(), strict=True))
        return delivery_report(
            self.recipe.names,
            counts | {"dropped": dropped},
            self._targets(),
            packs=self._num_packs,
            slots=self._slot_tokens,
            over_ranks=over_ranks,
        )
