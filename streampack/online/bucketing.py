"""Length bucketing for online datasets: its options, and its packer.

With max_tokens=12, a "pack" is a batch with one row for each of its samples::

    buffered   a5 b2 c6 d2 e3 ...          c6 = sample c of 6 tokens
    batch      a a a a a                    the oldest, a, and the nearest lengths
               e e e . .

Cost: about 5 us per sample. Memory: `buffer_samples` segment rows and the tokens of as many
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streampack.config import (
    MAX_BATCH_TOKENS,
    Overflow,
    Packing,
    check_at_most,
    check_positive,
    read_count,
)
from streampack.errors import ConfigError
from streampack.pack.buckets import LengthBuckets
from streampack.types import LENGTH, NUM_COLUMNS, Int64Array, Packs, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketing:
    """How samples of similar length share batches.

    Raises:
        ConfigError: If the values cannot work together.

    >>> Bucketing(max_tokens=8192).longest
    8192
    """

    max_tokens: int
    """Most tokens in a batch, inclusive."""
    include_padding: bool = True
    """Count a batch's size as rows times longest row; False: as tokens without padding."""
    max_samples: int | None = None
    """Most samples in a batch; None: as many as the tokens allow."""
    max_seq_len: int | None = None
    """Most tokens in a row; None: max_tokens."""
    buffer_samples: int = 1000
    """Most samples buffered, and the most batches that a sample waits for."""
    overflow: Overflow = "split"
    """Policy for samples longer than a row: split, truncate, drop or error."""
    bos_id: int | None = None
    """Prepended to each sample that does not begin with it, and counted in its length."""
    eos_id: int | None = None
    """Appended to each sample that does not end with it, and counted in its length."""
    padding_id: int = 0
    """Token id of empty slots."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "buffer_samples"):  # None is not allowed
            object.__setattr__(self, name, read_count(name, getattr(self, name)))
        for name in ("max_samples", "max_seq_len"):
            object.__setattr__(self, name, check_positive(name, getattr(self, name)))
        if not isinstance(self.include_padding, bool):
            raise ConfigError(
                f"include_padding={self.include_padding!r} is no bool; write True or False"
            )
        if self.longest > self.max_tokens:
            raise ConfigError(
                f"max_seq_len={self.max_seq_len} is over max_tokens={self.max_tokens}, so its rows "
                "fit no batch; lower it, or leave it out"
            )
        self.packing()  # checks the other options
        check_at_most("max_tokens", self.max_tokens, MAX_BATCH_TOKENS)
        check_at_most("the slots of a batch, padding counted", self.most_slots, MAX_BATCH_TOKENS)

    @property
    def longest(self) -> int:
        """Most tokens in a row."""
        return self.max_seq_len or self.max_tokens

    @property
    def most_slots(self) -> int:
        """Token slots of the largest batch, padding counted.

        >>> Bucketing(max_tokens=9, include_padding=False).most_slots  # 5 tokens, and 1 1 1 1
        25
        """
        if self.include_padding:
            return self.max_tokens
        most = min(self.max_samples or self.buffer_samples, self.buffer_samples)
        # The worst case is one sample of n tokens and one-token samples. The slots grow with n
        # until rows are no longer the bound, and then until n is half of the tokens.
        turns = (self.longest, self.max_tokens - most + 1, (self.max_tokens + 1) // 2)
        lengths = [min(max(turn, 1), self.longest) for turn in turns]
        return max(n * min(self.max_tokens - n + 1, most) for n in lengths)

    def packing(self) -> Packing:
        """Return the equivalent packing options for single samples."""
        return Packing(
            max_seq_len=self.longest,
            overflow=self.overflow,
            buffer_samples=self.buffer_samples,
            bos_id=self.bos_id,
            eos_id=self.eos_id,
            padding_id=self.padding_id,
        )


class BucketPacker:
    """A packer whose packs are length-bucketed batches; see `LengthBuckets`.

    >>> packer = BucketPacker(Bucketing(max_tokens=12, buffer_samples=3))
    >>> lengths = (5, 2, 6)
    >>> packs = packer.add(np.array([[0, 0, n, 0, lengths[n], lengths[n]] for n in range(3)]))
    >>> packs.segments[:, 4].tolist(), packer.num_buffered_tokens
    ([5, 6], 2)
    """

    def __init__(self, bucketing: Bucketing) -> None:
        self._bucketing = bucketing
        self._buckets = self._empty()
        self._num_arrived = 0
        self._waiting: dict[int, list[int]] = {}  # arrival number -> segment row
        self.num_buffered_tokens = 0
        self.high_water_tokens = self.high_water_samples = 0

    def _empty(self) -> LengthBuckets:
        asked = self._bucketing
        return LengthBuckets(
            asked.max_tokens,
            include_padding=asked.include_padding,
            buffer_samples=asked.buffer_samples,
            max_samples=asked.max_samples,
        )

    @property
    def buffered(self) -> Int64Array:
        """Segment rows in the buffer, shape (n, 6), in arrival order."""
        return np.array(list(self._waiting.values()), np.int64).reshape(-1, NUM_COLUMNS)

    @property
    def num_buffered_samples(self) -> int:
        """Number of segments in the buffer."""
        return len(self._waiting)

    def add(self, segments: Int64Array) -> Packs:
        """Add segment rows in arrival order, shape (n, 6); return the batches they complete."""
        batches = []
        for row in segments.tolist():
            self._waiting[self._num_arrived] = row
            self._num_arrived += 1
            self.num_buffered_tokens += row[LENGTH]
            self.high_water_tokens = max(self.high_water_tokens, self.num_buffered_tokens)
            self.high_water_samples = max(self.high_water_samples, len(self._waiting))
            batches += [self._leave(numbers) for numbers in self._buckets.add(row[LENGTH])]
        return _packs(batches)

    def flush(self) -> Packs:
        """Return the remaining segments as batches."""
        return _packs([self._leave(numbers) for numbers in self._buckets.flush()])

    def _leave(self, numbers: Sequence[int]) -> list[list[int]]:
        rows = [self._waiting.pop(number) for number in numbers]
        self.num_buffered_tokens -= sum(row[LENGTH] for row in rows)
        return rows

    def state_dict(self) -> State:
        """Return the buffered segments as JSON, without side effects."""
        return {
            "waiting": [list(row) for row in self._waiting.values()],  # in arrival order
            "high_water": [self.high_water_tokens, self.high_water_samples],
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state of `state_dict`."""
        self._buckets, self._waiting = self._empty(), {}
        self._num_arrived = self.num_buffered_tokens = 0
        # Numbers restart at 0: only their order matters.
        self.add(np.array(state["waiting"], np.int64).reshape(-1, NUM_COLUMNS))
        self.high_water_tokens, self.high_water_samples = map(int, state["high_water"])


def _packs(batches: list[list[list[int]]]) -> Packs:
    rows = [row for batch in batches for row in batch]
    return Packs(
        segments=np.array(rows, np.int64).reshape(-1, NUM_COLUMNS),
        ends=np.cumsum([len(batch) for batch in batches], dtype=np.int64),
    )


def one_row_each(segments: Int64Array) -> Packs:
    """Return packs of one segment each.

    >>> len(one_row_each(np.zeros((3, 6), np.int64)))
    3
    """
    return Packs(segments=segments, ends=np.arange(1, len(segments) + 1))
