"""Length-bucketed batches for the buffered way: what they are made by, and their packer.

With max_tokens=12, a "pack" is a batch: one row for each of its samples::

    waiting    a5 b2 c6 d2 e3 ...          c6 = sample c of 6 tokens
    batch      a a a a a                    the oldest, a, and its nearest lengths
               e e e . .

Cost: about 5 us a sample. Memory: `buffer_samples` segment rows, and the same of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streampack.config import Overflow, Packing, check_positive, read_count
from streampack.errors import ConfigError
from streampack.pack.buckets import LengthBuckets
from streampack.types import LENGTH, NUM_COLUMNS, Int64Array, Packs, State

__all__ = ["BucketPacker", "Bucketing", "one_row_each"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketing:
    """How samples of similar length share batches.

    Raises:
        ConfigError: If the values cannot work together.

    >>> Bucketing(max_tokens=8192).longest
    8192
    """

    max_tokens: int
    """Most tokens of a batch, itself allowed."""
    include_padding: bool = True
    """Count a batch as its samples times the longest of them; False: as its samples' tokens."""
    max_samples: int | None = None
    """Most samples of a batch; None: as many as the tokens allow."""
    max_seq_len: int | None = None
    """Most tokens of a row; None: max_tokens."""
    buffer_samples: int = 1000
    """Samples that wait, at most, and the most batches that one waits for."""
    overflow: Overflow = "split"
    """What becomes of a sample longer than a row: split, truncate, drop or error."""
    bos_id: int | None = None
    """Put before each sample that does not begin with it, counted in its length."""
    eos_id: int | None = None
    """Put after each sample that does not end with it, counted in its length."""
    padding_id: int = 0
    """Token id of empty slots."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "buffer_samples"):  # None means nothing here
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
        self.packing()  # checks the others

    @property
    def longest(self) -> int:
        """Most tokens of a row."""
        return self.max_seq_len or self.max_tokens

    @property
    def most_slots(self) -> int:
        """Token slots of the largest batch, padding counted.

        >>> Bucketing(max_tokens=9, include_padding=False).most_slots  # 5 tokens, and 1 1 1 1
        25
        """
        if self.include_padding:
            return self.max_tokens
        lengths = np.arange(1, self.longest + 1)
        most = min(self.max_samples or self.buffer_samples, self.buffer_samples)
        return int((lengths * np.minimum(self.max_tokens - lengths + 1, most)).max())

    def packing(self) -> Packing:
        """Return what holds for each sample alone."""
        return Packing(
            max_seq_len=self.longest,
            overflow=self.overflow,
            buffer_samples=self.buffer_samples,
            bos_id=self.bos_id,
            eos_id=self.eos_id,
            padding_id=self.padding_id,
        )


class BucketPacker:
    """A packer whose packs are batches, by `LengthBuckets`.

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
        self._waiting: dict[int, list[int]] = {}  # number of arrival: its segment row
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
        """All segment rows in the buffer now, shape (n, 6), in arrival order."""
        return np.array(list(self._waiting.values()), np.int64).reshape(-1, NUM_COLUMNS)

    @property
    def num_buffered_samples(self) -> int:
        """Segments in the buffer now."""
        return len(self._waiting)

    def add(self, segments: Int64Array) -> Packs:
        """Take segment rows in arrival order, shape (n, 6); return the batches they complete."""
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
        """Return batches of all that waits."""
        return _packs([self._leave(numbers) for numbers in self._buckets.flush()])

    def _leave(self, numbers: Sequence[int]) -> list[list[int]]:
        rows = [self._waiting.pop(number) for number in numbers]
        self.num_buffered_tokens -= sum(row[LENGTH] for row in rows)
        return rows

    def state_dict(self) -> State:
        """Return what waits, JSON-able; asking changes nothing."""
        return {
            "waiting": [list(row) for row in self._waiting.values()],  # in arrival order
            "high_water": [self.high_water_tokens, self.high_water_samples],
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where the packer stood whose state this is."""
        self._buckets, self._waiting = self._empty(), {}
        self._num_arrived = self.num_buffered_tokens = 0
        # Numbers begin again at 0: which sample is older is all that they tell.
        self.add(np.array(state["waiting"], np.int64).reshape(-1, NUM_COLUMNS))
        self.high_water_tokens, self.high_water_samples = map(int, state["high_water"])


def _packs(batches: list[list[list[int]]]) -> Packs:
    rows = [row for batch in batches for row in batch]
    return Packs(
        segments=np.array(rows, np.int64).reshape(-1, NUM_COLUMNS),
        ends=np.cumsum([len(batch) for batch in batches], dtype=np.int64),
    )


def one_row_each(segments: Int64Array) -> Packs:
    """Return packs that hold one segment each.

    >>> len(one_row_each(np.zeros((3, 6), np.int64)))
    3
    """
    return Packs(segments=segments, ends=np.arange(1, len(segments) + 1))
