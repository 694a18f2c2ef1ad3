"""What planning and gathering ask of an opened stream, whatever its format.

::

    MdsStream     shards that MosaicML Streaming's or litData's writers made
    FlatStream    token files of other programs, in virtual shards

`plan`, `gather` and `batch` see integers and mapped bytes, so a new format changes none of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from streampack.storage.cache import ShardCache
from streampack.storage.eviction import CacheLimit
from streampack.streams.column_selection import ColumnSelection
from streampack.streams.ends import StreamEnds
from streampack.streams.shard_pool import OpenShard
from streampack.types import Int64Array


class TokenStream(Protocol):
    """An opened stream: lengths first, tokens on demand; frozen, and safe to pickle."""

    @property
    def name(self) -> str:
        """Its name in messages and reports."""

    @property
    def number(self) -> int:
        """Its index among the streams."""

    @property
    def proportion(self) -> float | None:
        """At most one of the three weights is set, as given."""

    @property
    def repeat(self) -> float | None:
        """How often an epoch takes each sample."""

    @property
    def choose(self) -> int | None:
        """How much an epoch takes."""

    @property
    def max_seq_len(self) -> int | None:
        """Tokens per pack of this stream, where they are not those of the packing."""

    @property
    def max_passes(self) -> float | None:
        """Passes that a run of chapters may use in a lane."""

    @property
    def on_exhausted(self) -> str:
        """What happens after `max_passes`."""

    @property
    def ends(self) -> StreamEnds:
        """Its own ends and overflow rule."""

    def with_ends(self, ends: StreamEnds) -> TokenStream:
        """Return a copy with other ends."""

    @property
    def full_digest(self) -> str:
        """Identifies the contents and the lengths, as far as they are known without reading."""

    @property
    def growing_digest(self) -> str:
        """The same of the shards alone, so that the first ones of a stream that grew agree."""

    @property
    def columns(self) -> ColumnSelection:
        """The columns that are read."""

    @property
    def cache(self) -> ShardCache:
        """Where its shards are on this node."""

    @property
    def num_samples(self) -> int:
        """Number of samples."""

    @property
    def num_shards(self) -> int:
        """Number of shards."""

    @property
    def first_sample(self) -> Int64Array:
        """The first sample of each shard, and one past the last; shape (num_shards + 1,)."""

    @property
    def raw_bytes(self) -> Int64Array:
        """Bytes of each shard as it is read, shape (num_shards,)."""

    @property
    def stored_bytes(self) -> Int64Array:
        """Bytes of each shard's compressed file, 0 without one; shape (num_shards,)."""

    @property
    def has_length_file(self) -> bool:
        """Whether lengths are known without fetching the shards."""

    @property
    def may_be_empty(self) -> bool:
        """Whether lengths that are known may be 0."""

    @property
    def token_dtypes(self) -> set[str | None]:
        """Types of the token ids, or None if each value states its own."""

    def total_tokens(self) -> tuple[int, str]:
        """Return the stream's number of tokens, and whether it is from "lengths" or "bytes"."""

    def shard_tokens(self) -> Int64Array | None:
        """Return the tokens of each shard, shape (num_shards,); None if they are not known."""

    def shard_lengths(self, shard: int) -> Int64Array:
        """Return the tokens of each sample of a shard, shape (num_samples_of_shard,)."""

    def knows_edges(self, bos_id: int | None, eos_id: int | None) -> bool:
        """Return whether `shard_edges` knows where these ids are without reading the tokens."""

    def shard_edges(self, shard: int, bos_id: int | None, eos_id: int | None) -> Int64Array:
        """Return the first and last token of each sample of a shard, shape (n, 2).

        Only a comparison with `bos_id` and `eos_id` says something: others may be -1.
        """

    def open_shard(self, shard: int) -> OpenShard:
        """Map a shard and locate its values; fetch it first if necessary."""

    def file_of(self, shard: int) -> tuple[str, str]:
        """Return the address and the name of the file with a shard, for messages."""

    def check_files(self) -> None:
        """Compare the local files with what the stream states."""

    def cache_folders(self) -> tuple[Path, ...]:
        """Return the folders that may have files that we created."""

    def under(self, limit: CacheLimit) -> TokenStream:
        """Return a copy with a limit on its cache."""

    def is_here(self, shard: int) -> bool:
        """Return whether a shard is on this node."""

    def fetch(self, shard: int, *, is_waiting: bool = True) -> int | None:
        """Fetch a shard if necessary; return the bytes that were fetched."""

    def mark_planned(self, shards: Int64Array) -> None:
        """Record that shards will be read soon."""

    def mark_finished(self, shards: Int64Array) -> None:
        """Record that shards may be evicted first."""
