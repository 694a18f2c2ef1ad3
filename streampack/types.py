"""The values passed between packages: rows of integers, never tokens.

A *segment row* has six columns::

    stream  pass  sample  start  length  total
      0      0     1812     0      700   1900      tokens 0..699 of a sample of 1,900
      0      0     1812    700    1200   1900      ... and the rest of it, in another pack
      1      2        7     0      300    300      a whole sample, in the stream's third pass

`total` is the sample's length after ``overflow`` and ``bos_id`` / ``eos_id``. A segment ends its
sample if start + length equals total. Cost: 48 bytes a segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]
Int32Array: TypeAlias = npt.NDArray[np.int32]
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
UInt32Array: TypeAlias = npt.NDArray[np.uint32]
ByteArray: TypeAlias = npt.NDArray[np.uint8]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Float64Array: TypeAlias = npt.NDArray[np.float64]
State: TypeAlias = dict[str, Any]
LengthCost: TypeAlias = Literal["none", "fetch", "tokenize"]
"""What a node has to do with a shard to learn the lengths of its samples."""

STREAM, PASS, SAMPLE, START, LENGTH, TOTAL = range(6)
NUM_COLUMNS = 6
TOKENS = 3  # of a *sample row*, which has stream, pass, sample and tokens only

IGNORED = -100
"""Label of a token that is not a training target. Losses ignore it."""

NO_SEGMENTS: Int64Array = np.zeros((0, NUM_COLUMNS), np.int64)
"""No segment rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packs:
    """Packs in order, each a range of segment rows.

    >>> packs = Packs(segments=np.zeros((3, 6), np.int64), ends=np.array([2, 3]))
    >>> len(packs), len(packs[0]), len(packs[1])
    (2, 2, 1)
    """

    segments: Int64Array
    """Segment rows in pack order, shape (num_segments, 6)."""
    ends: Int64Array
    """One past the last segment of each pack, shape (num_packs,)."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, pack: int) -> Int64Array:
        """Return the segment rows of one pack, shape (n, 6)."""
        if not 0 <= pack < len(self.ends):
            raise IndexError(f"pack {pack} of {len(self.ends)}")
        return self.segments[self.ends[pack - 1] if pack else 0 : self.ends[pack]]

    def slice(self, first: int, last: int) -> Packs:
        """Return packs [first, last)."""
        if first == 0 and last == len(self.ends):
            return self
        begin = int(self.ends[first - 1]) if first else 0
        ends = self.ends[first:last] - begin
        num_segments = int(ends[-1]) if len(ends) else 0
        return Packs(segments=self.segments[begin : begin + num_segments], ends=ends)

    @staticmethod
    def join(parts: list[Packs]) -> Packs:
        """Concatenate packs."""
        parts = [part for part in parts if len(part.ends)]
        if len(parts) < 2:
            return parts[0] if parts else NO_PACKS
        before = np.cumsum([0] + [len(part.segments) for part in parts[:-1]])
        ends = np.concatenate([part.ends for part in parts])
        ends += np.repeat(before, [len(part.ends) for part in parts])
        return Packs(segments=np.concatenate([part.segments for part in parts]), ends=ends)


NO_PACKS = Packs(segments=NO_SEGMENTS, ends=np.zeros(0, np.int64))
