"""The shards of sources of others, which give lengths first and tokens on demand.

::

    opened.shards        [300, 280]                samples of each shard
    opened.lengths(0)    int64, shape (300,)       when shard 0 is planned
    opened.read(0)       ids, one sample after     when it is read
                         the other
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from streampack.errors import DataError
from streampack.mds.columns import Spans
from streampack.storage.cache import ShardCache
from streampack.streams.shard_pool import OpenShard
from streampack.types import Int64Array, IntArray, LengthCost


class OpenedSource(Protocol):
    """What the `open` of a source of others returns; it is pickled to workers."""

    name: str
    """The name of a stream without one of its own."""
    digest: str
    """Identifies the contents: a state is refused where it differs."""
    shards: IntArray
    """Samples of each shard, shape (num_shards,)."""

    def lengths(self, shard: int) -> IntArray:
        """Return the tokens of each sample of a shard, shape (num_samples,)."""

    def read(self, shard: int) -> IntArray:
        """Return the ids of a shard, one sample after the other, shape (num_tokens,)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OtherShards:
    """The shards of a `TokenStream` of a source of others."""

    name: str
    opened: OpenedSource
    cache: ShardCache
    numbers: Int64Array
    """The shards of the source that are used, shape (num_shards,)."""
    first_sample: Int64Array
    has_lengths: ClassVar[bool] = True
    may_be_empty: ClassVar[bool] = True
    stored_bytes: ClassVar[int] = 0
    length_cost: ClassVar[LengthCost] = "none"
    block_samples: ClassVar[int | None] = None

    @property
    def raw_bytes(self) -> Int64Array:
        return self.tokens() * 4

    def entry(self, shard: int) -> None:
        """Return nothing: no shard is in a cache."""

    @property
    def token_dtypes(self) -> set[str | None]:
        return {None}

    def lengths_digest(self) -> str:
        return ""

    def total_tokens(self) -> int:
        return int(self.tokens().sum())

    def tokens(self) -> Int64Array:
        shards = range(len(self.numbers))
        return np.array([self.lengths(shard).sum() for shard in shards], np.int64)

    def lengths(self, shard: int) -> Int64Array:
        return np.asarray(self.opened.lengths(int(self.numbers[shard])), np.int64)

    def edges(self, shard: int, *_ids: int | None) -> None:
        """Return nothing: they are in the tokens alone."""

    def file_of(self, shard: int) -> tuple[str, str]:
        return self.name, f"shard {shard}"

    def version(self, shard: int) -> Hashable:
        return self.opened.digest, int(self.numbers[shard])

    def read(self, shard: int, version: Hashable) -> OpenShard:
        ids = np.asarray(self.opened.read(int(self.numbers[shard])))
        ids, counts = np.ascontiguousarray(ids, ids.dtype.newbyteorder("=")), self.lengths(shard)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) != counts.sum():
            raise DataError(
                f"stream {self.name!r}, shard {shard}: its source reads {ids.dtype} of shape "
                f"{ids.shape}, but says lengths of {counts.sum()} tokens together; return the ids "
                "of all samples in one array of integers"
            )
        begins = (np.cumsum(counts) - counts) * ids.itemsize
        return OpenShard(
            key=version,
            uri=self.name,
            data=ids.view(np.uint8),
            tokens=Spans(begins=begins, counts=counts, dtype=ids.dtype.name),
            labels=None,
            loss_mask=None,
        )
