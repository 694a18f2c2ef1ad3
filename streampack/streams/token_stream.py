"""An opened stream: integers for planning first, tokens on demand.

::

    source.open(opening) --> index.json and the length file's header, or tables  (immediately)
    shard_lengths(7)    --> length file or table, else the shard's own header    (when planned)
    open_shard(7)       --> shard 7 mapped, and its spans                        (when read)

A stream has the shards of one source: MdsShards, FlatShards for token files of other programs,
TextShards, or OtherShards for sources of others. They know lengths, edges and files; everything
else is written once, here. `plan`, `gather` and `batch` see integers and mapped bytes, so a new
source changes none of them.

Open shards belong to the process and are reopened after a fork; shard_pool.py limits them and says
their cost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from streampack.config import Packing
from streampack.config.packing import Overflow
from streampack.errors import DataError
from streampack.mds.index import Shard
from streampack.storage.cache import ShardCache
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.materialize import Downloader
from streampack.storage.verify import attach_uri
from streampack.streams.column_selection import ColumnSelection
from streampack.streams.flat_shards import FlatShards
from streampack.streams.mds_shards import MdsShards
from streampack.streams.other_shards import OtherShards
from streampack.streams.parts import SamplePart
from streampack.streams.shard_pool import OpenShard, shard_pool
from streampack.streams.text_shards import TextShards
from streampack.types import Int64Array

OpenedShards: TypeAlias = MdsShards | FlatShards | OtherShards | TextShards


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Opening:
    """What a source is opened for."""

    stream: Any
    """The `Stream`, whose name, weights, ends and side of a split it gets."""
    number: int
    """The place of the stream in its dataset."""
    disk: LocalFilesystem = field(default_factory=LocalFilesystem)
    store: Downloader | None = None
    """None: the sources' own downloaders."""
    num_workers: int | None = None
    """Processes that tokenize. None: the cores of this machine but one."""
    cache_limit: int | None = None
    """Bytes of files that may be kept on this node."""
    has_targets: bool = True
    """Whether columns that may hold targets, but are not selected, cause a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnds:
    """Options of `Packing` that a stream has of its own, or None for the packing's."""

    bos_id: int | None = None
    eos_id: int | None = None
    overflow: Overflow | None = None

    def packing_of(self, packing: Packing) -> Packing:
        stated = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(packing, **stated) if stated else packing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenStream:
    """A stream of any format: lengths first, tokens on demand; frozen, and safe to pickle."""

    name: str
    number: int
    proportion: float | None
    repeat: float | None
    choose: int | None
    """At most one of the three weights is set, as given."""
    max_seq_len: int | None = None
    """Tokens per pack of this stream, or None for those of the packing."""
    split_at: int | None = None
    """The token that ends a document inside of a row, or None if rows are whole documents."""
    ends: StreamEnds
    columns: ColumnSelection
    digest: str
    """Identifies the contents: index.json, or the tables, and the selected columns."""
    entries_digest: str | None = None
    """Identifies the contents by the shards alone, so that the first ones of a stream that grew
    agree with those of the former stream. None: `digest` does."""
    is_part: bool = False
    """Whether the stream has only some of its shards or samples."""
    part: SamplePart | None = None
    """Its samples, or None for all of its shards."""
    shards: OpenedShards
    cache: ShardCache = field(init=False)
    num_samples: int = field(init=False)
    num_shards: int = field(init=False)
    first_sample: Int64Array = field(init=False)
    """The first sample of each shard, and one past the last; shape (num_shards + 1,)."""
    raw_bytes: Int64Array = field(init=False)
    """Bytes of each shard as it is read, shape (num_shards,)."""
    stored_bytes: Int64Array | int = field(init=False)
    """Bytes of each shard's compressed file, 0 without one; shape (num_shards,), or 0 for all."""

    def __post_init__(self) -> None:
        # Fields of this class, because planning and gathering ask for them at every turn.
        first_sample = (self.part or self.shards).first_sample
        for name, value in (
            ("cache", self.shards.cache),
            ("first_sample", first_sample),
            ("num_samples", int(first_sample[-1])),
            ("num_shards", len(first_sample) - 1),
            ("raw_bytes", self.shards.raw_bytes),
            ("stored_bytes", self.shards.stored_bytes),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls,
        opening: Opening,
        name: str,
        shards: OpenedShards,
        part: SamplePart | None,
        **own: Any,
    ) -> TokenStream:
        """Return the stream that a source was opened for; `own` are further fields.

        Raises:
            DataError: If none of its samples has tokens.
        """
        stream = opening.stream
        opened = cls(
            name=name,
            number=opening.number,
            proportion=stream.proportion,
            repeat=stream.repeat,
            choose=stream.choose,
            max_seq_len=stream.max_seq_len,
            ends=StreamEnds(bos_id=stream.bos_id, eos_id=stream.eos_id, overflow=stream.overflow),
            shards=shards,
            part=part and part.with_tokens(shards.lengths),
            **own,
        )
        tokens = opened.shard_tokens() if shards.may_be_empty else None
        if tokens is not None and not tokens.any():
            raise DataError(
                f"stream {name!r}: none of its {opened.num_samples} samples has tokens; omit it, "
                "or write it with tokens"
            )
        return opened

    @property
    def num_workers(self) -> int:
        """Processes that tokenize its shards."""
        return self.shards.num_workers if isinstance(self.shards, TextShards) else 0

    @property
    def unit_bytes(self) -> int:
        """Bytes of the largest file that is decoded in the cache, for shards to be made of."""
        if not isinstance(self.shards, TextShards):
            return 0
        return int(self.shards.table.cut.decoded[self.shards.numbers].max())

    @property
    def num_made(self) -> tuple[int, int]:
        """Shards that were tokenized for this process, and how many of them again."""
        if not isinstance(self.shards, TextShards):
            return 0, 0
        again = len(self.shards.made_again)
        return len(self.shards.made) + again, again

    @property
    def block_samples(self) -> int | None:
        """Samples that are shuffled together at most, of as many shards whatever part of them is
        used. None: `Order` alone says.
        """
        if (block := self.shards.block_samples) is None:
            return None
        return max(block * self.num_samples // int(self.shards.first_sample[-1]), 1)

    @property
    def full_digest(self) -> str:
        """`digest`, followed by a colon and the length file's digest if there is one.

        Without a length file, lengths are not covered: reading them would fetch all shards.
        """
        return self._with_lengths(self.digest)

    @property
    def growing_digest(self) -> str:
        """`entries_digest`, followed as in `full_digest`."""
        return self._with_lengths(self.entries_digest or self.digest)

    def _with_lengths(self, digest: str) -> str:
        stated, block = astuple(self.ends), self.block_samples
        stated = stated if block is None else (*stated, block)
        if any(value is not None for value in stated):
            digest = hashlib.blake2b(f"{digest}{stated}".encode(), digest_size=16).hexdigest()
        lengths = "" if self.is_part else self.shards.lengths_digest()
        return f"{digest}:{lengths}" if lengths else digest

    def total_tokens(self) -> int:
        """Return the stream's number of tokens; an estimate if lengths are not known."""
        if self.part is not None and self.part.tokens is not None:
            return int(self.part.tokens.sum())
        total = self.shards.total_tokens()
        return total * self.num_samples // int(self.shards.first_sample[-1])

    def shard_tokens(self) -> Int64Array | None:
        """Return the tokens of each shard, shape (num_shards,); None if they are not known."""
        return self.shards.tokens() if self.part is None else self.part.tokens

    def shard_lengths(self, shard: int) -> Int64Array:
        """Return the tokens of each sample of a shard, shape (num_samples_of_shard,)."""
        lengths = self.shards.lengths(shard)
        if lengths is None:
            return self.open_shard(shard).tokens.counts
        return self._own(lengths, shard)

    def shard_edges(
        self, shard: int, bos_id: int | None = None, eos_id: int | None = None
    ) -> Int64Array:
        """Return the first and last token of each sample of a shard, shape (n, 2).

        Only a comparison with `bos_id` and `eos_id` says something: others may be -1.
        """
        edges = self.shards.edges(shard, bos_id, eos_id)
        if edges is not None:
            return self._own(edges, shard)
        opened = self.open_shard(shard)
        return opened.tokens.edges(opened.data)

    def shard_targets(self, shard: int) -> Int64Array | None:
        """Return the place of the first target of each sample of a shard, shape (n,).

        None if they are not conversations.
        """
        if not isinstance(self.shards, TextShards) or not self.shards.format.is_chat:
            return None
        known = self.shards.first_targets(shard)
        return self.open_shard(shard).first_targets if known is None else self._own(known, shard)

    def _own(self, values: Int64Array, shard: int) -> Int64Array:
        return values if self.part is None else values[self.part.rows(shard)]

    def open_shard(self, shard: int) -> OpenShard:
        """Map a shard and locate its values; fetch and decompress it first if necessary.

        A DataError says that it cannot be fetched or is damaged, or that a sample's labels or loss
        mask differ in length from its tokens.
        """
        pool = shard_pool()
        try:
            # Neither the path nor the digest distinguishes two versions of a file.
            version: Any = self.shards.version(shard)
            opened = pool.get((version, self.digest, shard))
            if opened is None:
                opened = self.shards.read(shard, version)
                opened = replace(opened, key=(opened.key, self.digest, shard))
                if self.part is not None:
                    opened = opened.take(self.part.rows(shard))
                pool.put(opened)
        except (DataError, OSError, RuntimeError):
            with attach_uri(*self.shards.file_of(shard)):
                raise
        return opened

    def is_here(self, shard: int) -> bool:
        """Return whether a shard is on this node."""
        entry = self.shards.entry(shard)
        return entry is None or self.cache.is_here(entry)

    def _entries(self, shards: Iterable[int]) -> Iterator[Shard]:
        """Yield the shards that may be in the cache, as the cache knows them."""
        return filter(None, map(self.shards.entry, shards))

    def cache_folders(self) -> tuple[Path, ...]:
        """Return the folders of files that we created for this stream, if there can be any."""
        return self.cache.cache_folders(self._entries(range(self.num_shards)))

    def fetch(self, shard: int, *, is_waiting: bool = True) -> int | None:
        """Fetch, verify and decompress a shard if necessary; return the bytes of the fetched file.

        They are 0 if the shard was already here. None: another thread or process is fetching it,
        and `is_waiting` is False.
        """
        entry = self.shards.entry(shard)
        if entry is None:
            return 0
        if not is_waiting and not self.cache.is_free(entry):
            return None
        return self.cache.fetch(entry)

    def mark_planned(self, shards: Int64Array) -> None:
        """Record that shards will be read soon."""
        if self.cache.is_limited:
            self.cache.mark_planned(self._entries(shards.tolist()))

    def mark_finished(self, shards: Int64Array) -> None:
        """Record that shards may be evicted first."""
        if self.cache.is_limited:
            self.cache.mark_finished(self._entries(shards.tolist()))
