"""`Buffers`: how much may be in memory or cached."""

from __future__ import annotations

import os
from dataclasses import dataclass

from streampack._checks import convert_fields, parse_bytes, read_optional_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Limits on memory and cache: buffered samples, undelivered packs, and shards.

    Raises:
        ConfigError: If a number is below 1. A limit too small for the packing is rejected later,
            with an error that names the minimum.
    """

    worker_tokens: int | None = None
    """Maximum tokens per worker: its prefetched batches, and the packers' buffers if the worker
    packs (always with num_workers=0). None: no limit."""
    worker_bytes: int | None = None
    """Maximum bytes of finished batches per worker. For iterable sources, the limit also covers
    waiting payloads, and the data that the format adds to a batch. None: no limit."""
    rank_tokens: int | None = None
    """Maximum tokens per rank: the packers' buffers, and the prefetched batches of all workers.
    None: no limit."""
    cache_limit: int | str | None = None
    """Maximum bytes of fetched or decompressed shards per node, over all streams. Text such as
    "50gb" is accepted (1 gb = 2**30 bytes) and stored as an int. None: no limit."""

    tokenizing: int | None = None
    """Tokenizing processes per rank. None: the cores of the node divided by its ranks, minus one,
    but at least one."""

    def __post_init__(self) -> None:
        counts = ("worker_tokens", "worker_bytes", "rank_tokens", "tokenizing")
        convert_fields(self, read_optional_count, *counts)
        convert_fields(self, parse_bytes, "cache_limit")

    def processes(self, num_ranks: int) -> int:
        """Return the number of tokenizing processes of each rank, with `num_ranks` on this node."""
        return self.tokenizing or max((os.cpu_count() or 1) // num_ranks - 1, 1)

    @property
    def cache_bytes(self) -> int | None:
        """The cache limit in bytes."""
        return parse_bytes("cache_limit", self.cache_limit)
