"""A source that stands for texts: the lengths of a shard are known once it was opened.

::

    Shards         a remote with a length file: lengths are known first
    Untokenized    the same shards: lengths, and edges, are in the shards alone
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from streampack import Shards


@dataclass(frozen=True)
class Untokenized:
    """Shards as a source of texts opens them; `block_shards` together are a shuffle block."""

    shards: Shards
    block_shards: int | None = None
    has_lengths: bool = False

    def open(self, opening: Any) -> Any:
        opened = self.shards.open(opening)
        inner = opened.shards
        block = self.block_shards
        if block is not None:
            block = max(block * int(inner.first_sample[-1]) // len(inner.index.shards), 1)
        part = opened.part and (
            opened.part if self.has_lengths else replace(opened.part, tokens=None)
        )
        return replace(opened, shards=LazyShards(inner, block, self.has_lengths), part=part)


class LazyShards:
    """Opened shards of which nothing is known but the samples, the bytes and an estimate."""

    may_be_empty = True

    def __init__(self, inner: Any, block_samples: int | None, has_lengths: bool) -> None:
        self.inner, self.block_samples, self.has_lengths = inner, block_samples, has_lengths
        self.length_cost = "none" if has_lengths else "tokenize"
        self.opened: set[int] = set()

    def __reduce__(self) -> Any:
        return LazyShards, (self.inner, self.block_samples, self.has_lengths)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def lengths(self, shard: int) -> Any:
        return self.inner.lengths(shard) if self.has_lengths else None

    def edges(self, shard: int, *ids: int | None) -> Any:
        return self.inner.edges(shard, *ids) if self.has_lengths else None

    def tokens(self) -> Any:
        return self.inner.tokens() if self.has_lengths else None

    def lengths_digest(self) -> str:
        return ""

    def read(self, shard: int, version: Any) -> Any:
        self.opened.add(shard)
        return self.inner.read(shard, version)
