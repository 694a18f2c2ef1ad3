"""A stream of token files that other programs wrote, in virtual shards.

::

    lengths, begins   the files' own tables (flat/), or a folder that `streampack index` made
    local             the token file is mapped; its virtual shards share the mapping
    remote            a virtual shard is fetched as a range of bytes, into a file of its own

Cost: opening costs what flat/files.py says. A shard's lengths are read from its table when the
order reaches it, about 20 ns a sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import xxhash

from streampack.errors import DataError
from streampack.flat.documents import Documents
from streampack.flat.token_file import TokenFile, VirtualShards, map_shared
from streampack.mds.columns import Spans
from streampack.mds.index import Shard
from streampack.mds.regular_files import open_file
from streampack.storage.cache import ShardCache
from streampack.storage.eviction import CacheLimit
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.verify import attach_uri
from streampack.streams.column_selection import ColumnSelection
from streampack.streams.ends import StreamEnds
from streampack.streams.parts import SamplePart
from streampack.streams.shard_pool import OpenShard, shard_pool
from streampack.types import ByteArray, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatStream:
    """Token files of one format; a `TokenStream`."""

    name: str
    number: int
    proportion: float | None
    repeat: float | None
    choose: int | None
    max_seq_len: int | None
    max_passes: float | None
    on_exhausted: str
    columns: ColumnSelection
    cache: ShardCache
    root: Path
    """The folder of local files."""
    files: tuple[TokenFile, ...]
    shards: VirtualShards
    entries: tuple[Shard, ...]
    """The virtual shards of remote files as the cache knows them; empty for local files."""
    digest: str
    begins_with_bos: bool | None
    """Whether every document begins with the BOS id, or None if the `Stream` does not say."""
    ends_with_eos: bool | None
    ends: StreamEnds
    part: SamplePart | None = None
    """Its samples, or None for all of its shards."""
    first_sample: Int64Array = field(init=False)
    num_samples: int = field(init=False)
    num_shards: int = field(init=False)
    raw_bytes: Int64Array = field(init=False)
    stored_bytes: Int64Array = field(init=False)

    def __post_init__(self) -> None:
        shards = self.shards
        sizes = shards.extents[:, 1] - shards.extents[:, 0]
        first_sample = (self.part or shards).first_sample
        for name, value in (
            ("first_sample", first_sample),
            ("num_samples", int(first_sample[-1])),
            ("num_shards", len(shards.file)),
            ("raw_bytes", sizes),
            ("stored_bytes", np.zeros_like(sizes)),
        ):
            object.__setattr__(self, name, value)

    @property
    def has_length_file(self) -> bool:
        return True

    @property
    def may_be_empty(self) -> bool:
        return True

    @property
    def full_digest(self) -> str:
        return self.ends.digest_of(self.digest)

    @property
    def growing_digest(self) -> str:
        return self.full_digest

    def with_ends(self, ends: StreamEnds) -> FlatStream:
        return replace(self, ends=ends)

    @property
    def token_dtypes(self) -> set[str | None]:
        return {file.dtype for file in self.files}

    def total_tokens(self) -> tuple[int, str]:
        return int(self.shard_tokens().sum()), "lengths"

    def shard_tokens(self) -> Int64Array:
        if self.part is not None and self.part.tokens is not None:
            return self.part.tokens
        sizes = np.array([np.dtype(file.dtype).itemsize for file in self.files], np.int64)
        tokens: Int64Array = self.raw_bytes // sizes[self.shards.file]
        return tokens

    def shard_lengths(self, shard: int) -> Int64Array:
        lengths = self.stored_lengths(shard)
        return lengths if self.part is None else lengths[self.part.rows(shard)]

    def stored_lengths(self, shard: int) -> Int64Array:
        """Return the tokens of all documents of a shard."""
        return self._spans(shard)[1]

    def knows_edges(self, bos_id: int | None, eos_id: int | None) -> bool:
        if self._has_edges:
            return True
        is_known = bos_id is None or self.begins_with_bos is not None
        return is_known and (eos_id is None or self.ends_with_eos is not None)

    def shard_edges(self, shard: int, bos_id: int | None, eos_id: int | None) -> Int64Array:
        file = self.files[self.shards.file[shard]]
        count = int(self.first_sample[shard + 1] - self.first_sample[shard])
        if self._has_edges and isinstance(file.boundaries, Documents):
            begin = int(self.shards.first_document[shard])
            places = np.arange(count) if self.part is None else self.part.rows(shard)
            return file.boundaries.edges(begin + places)
        first = bos_id if bos_id is not None and self.begins_with_bos else -1
        last = eos_id if eos_id is not None and self.ends_with_eos else -1
        return np.tile(np.array([first, last], np.int64), (count, 1))

    @property
    def _has_edges(self) -> bool:
        """Whether an index has the edges, and the `Stream` does not say otherwise."""
        is_said = (self.begins_with_bos, self.ends_with_eos) != (None, None)
        return not is_said and isinstance(self.files[0].boundaries, Documents)

    def file_of(self, shard: int) -> tuple[str, str]:
        name = self.files[self.shards.file[shard]].name
        return self.cache.location.uri(name), name

    def check_files(self) -> None:
        return

    def cache_folders(self) -> tuple[Path, ...]:
        return (self.cache.folder,) if self.entries else ()

    def under(self, limit: CacheLimit) -> FlatStream:
        return replace(self, cache=self.cache.under(limit))

    def is_here(self, shard: int) -> bool:
        return not self.entries or self.cache.is_here(self.entries[shard])

    def fetch(self, shard: int, *, is_waiting: bool = True) -> int | None:
        if not self.entries:
            return 0
        info = self.entries[shard]
        if not is_waiting and not self.cache.is_free(info):
            return None
        return info.raw.num_bytes if self.cache.fetch(info) else 0

    def mark_planned(self, shards: Int64Array) -> None:
        if self.entries:
            self.cache.mark_planned(self.entries[shard] for shard in shards.tolist())

    def mark_finished(self, shards: Int64Array) -> None:
        if self.entries:
            self.cache.mark_finished(self.entries[shard] for shard in shards.tolist())

    def open_shard(self, shard: int) -> OpenShard:
        uri, name = self.file_of(shard)
        pool, file = shard_pool(), self.files[self.shards.file[shard]]
        with attach_uri(uri, name):
            version: object = self.cache.file(self.entries[shard]) if self.entries else uri
            opened = pool.get((version, self.digest, shard))
            if opened is not None:
                return opened
            if self.entries:
                mapped = self.cache.map(self.entries[shard])
                version, data, is_gone = mapped.file, mapped.data, mapped.is_gone
                first_byte = int(self.shards.extents[shard, 0])
            else:
                data, first_byte = self._local_bytes(file, shard)
                self._verify(file, shard, data, first_byte)
                is_gone = None
            begins, counts = self._spans(shard)
            opened = OpenShard(
                key=(version, self.digest, shard),
                uri=uri,
                data=data,
                tokens=Spans(begins=begins - first_byte, counts=counts, dtype=file.dtype),
                labels=None,
                loss_mask=None,
                is_gone=is_gone,
            )
            if self.part is not None:
                opened = opened.take(self.part.rows(shard))
            pool.put(opened)
        return opened

    def _spans(self, shard: int) -> tuple[Int64Array, Int64Array]:
        """Return the byte offset in its file, and the tokens, of each document of a shard."""
        file, first = self.files[self.shards.file[shard]], int(self.shards.first_document[shard])
        first_sample = self.shards.first_sample
        count = int(first_sample[shard + 1] - first_sample[shard])
        begins, lengths = file.spans(first, first + count)
        start, stop = self.shards.extents[shard].tolist()
        if begins[0] != start or begins[-1] + lengths[-1] * np.dtype(file.dtype).itemsize != stop:
            raise DataError(
                f"{file.name}: the table of its documents changed since the stream was opened; "
                "start again, and never write to a file that is being read"
            )
        return begins, lengths

    def _verify(self, file: TokenFile, shard: int, data: ByteArray, first_byte: int) -> None:
        """Compare a local shard with its hash in an index, if there is one."""
        start, stop = self.shards.extents[shard].tolist()
        wanted = file.hashes.get((start, stop))
        part = data[start - first_byte : stop - first_byte]
        if wanted is not None and xxhash.xxh3_64_hexdigest(part.data) != wanted:
            raise DataError(
                f"{self.root / file.name}: bytes {start} to {stop} are not those that were "
                "indexed; copy the file again, or, if it was meant to change, index it again: "
                "streampack index"
            )

    def _local_bytes(self, file: TokenFile, shard: int) -> tuple[ByteArray, int]:
        """Return bytes of a local file, and the offset in the file of the first one."""
        path, start = self.root / file.name, int(self.shards.extents[shard, 0])
        if not LocalFilesystem().is_network(path.parent):
            data = map_shared(path)
            if len(data) != file.num_bytes:
                raise DataError(
                    f"{path}: has {len(data)} bytes, but had {file.num_bytes} when the stream was "
                    "opened; start again, and never write to a file that is being read"
                )
            return data, 0
        # Another machine may cut the file, and reading its mapping would then kill the process.
        with open_file(path) as opened:
            opened.seek(start)
            return np.frombuffer(opened.read(int(self.raw_bytes[shard])), np.uint8), start
