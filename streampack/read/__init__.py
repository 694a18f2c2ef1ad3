"""Read: fetch the tokens of planned packs; the only room that touches tokens."""

from streampack.read.fetcher import (
    FETCH_THREADS,
    FetchLimits,
    ShardFetcher,
    bring_all,
    cached_bytes,
)
from streampack.read.gather import Gatherer, Rows

__all__ = [
    "FETCH_THREADS",
    "FetchLimits",
    "Gatherer",
    "Rows",
    "ShardFetcher",
    "bring_all",
    "cached_bytes",
]
