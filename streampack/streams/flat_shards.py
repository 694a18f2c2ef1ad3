"""Token files that other programs wrote, in virtual shards.

::

    lengths, begins   the files' own tables (flat/), or a folder that `streampack index` made
    local             the token file is mapped; its virtual shards share the mapping
    remote            a virtual shard is fetched as a range of bytes, into a file of its own

Cost: a shard's lengths are read from its table when the order reaches it, about 20 ns a sample.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from streampack.errors import DataError
from streampack.flat.documents import Documents
from streampack.flat.file_checks import START_BYTES, check_start
from streampack.flat.mapped_tables import map_shared
from streampack.flat.token_file import TokenFile, VirtualShards
from streampack.mds.columns import Spans
from streampack.mds.index import Layout, MdsIndex
from streampack.mds.regular_files import open_file
from streampack.storage.cache import ShardCache
from streampack.storage.filesystem import LocalFilesystem
from streampack.streams.shard_pool import OpenShard
from streampack.types import ByteArray, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatShards:
    """The virtual shards of a `TokenStream` of token files."""

    cache: ShardCache
    index: MdsIndex
    """The virtual shards of remote files as the cache knows them; none of local files."""
    root: Path
    files: tuple[TokenFile, ...]
    virtual: VirtualShards
    begins_with_bos: bool | None
    """Whether every document begins with the BOS id, or None if the `Stream` does not say."""
    ends_with_eos: bool | None

    @property
    def first_sample(self) -> Int64Array:
        return self.virtual.first_sample

    @property
    def raw_bytes(self) -> Int64Array:
        sizes: Int64Array = self.virtual.extents[:, 1] - self.virtual.extents[:, 0]
        return sizes

    @property
    def has_lengths(self) -> bool:
        return True

    @property
    def may_be_empty(self) -> bool:
        return True

    @property
    def token_dtypes(self) -> set[str | None]:
        return {file.dtype for file in self.files}

    def lengths_digest(self) -> str:
        return ""

    def total_tokens(self) -> tuple[int, str]:
        return int(self.tokens().sum()), "lengths"

    def tokens(self) -> Int64Array:
        sizes = np.array([np.dtype(file.dtype).itemsize for file in self.files], np.int64)
        tokens: Int64Array = self.raw_bytes // sizes[self.virtual.file]
        return tokens

    def lengths(self, shard: int) -> Int64Array:
        return self._spans(shard)[1]

    def knows_edges(self, bos_id: int | None, eos_id: int | None) -> bool:
        """Return whether `edges` knows where these ids are without reading the tokens."""
        if self._has_edges:
            return True
        is_known = bos_id is None or self.begins_with_bos is not None
        return is_known and (eos_id is None or self.ends_with_eos is not None)

    def edges(self, shard: int, bos_id: int | None, eos_id: int | None) -> Int64Array:
        first, stop = self._documents(shard)
        boundaries = self._file(shard).boundaries
        if self._has_edges and isinstance(boundaries, Documents):
            return boundaries.edges(np.arange(first, stop))
        first_id = bos_id if bos_id is not None and self.begins_with_bos else -1
        last_id = eos_id if eos_id is not None and self.ends_with_eos else -1
        return np.tile(np.array([first_id, last_id], np.int64), (stop - first, 1))

    @property
    def _has_edges(self) -> bool:
        """Whether an index has the edges, and the `Stream` does not say otherwise."""
        is_said = (self.begins_with_bos, self.ends_with_eos) != (None, None)
        return not is_said and isinstance(self.files[0].boundaries, Documents)

    def _file(self, shard: int) -> TokenFile:
        return self.files[int(self.virtual.file[shard])]

    def _documents(self, shard: int) -> tuple[int, int]:
        first = int(self.virtual.first_document[shard])
        begin, end = self.virtual.first_sample[shard : shard + 2].tolist()
        return first, first + end - begin

    def file_of(self, shard: int) -> tuple[str, str]:
        name = self._file(shard).name
        return self.cache.location.uri(name), name

    def row_layout(self, shard: int) -> Layout | None:  # noqa: ARG002
        return None

    def version(self, shard: int) -> Hashable:
        entries = self.index.shards
        return self.cache.file(entries[shard]) if entries else self.root / self._file(shard).name

    def open(self, shard: int) -> OpenShard:
        file, is_gone = self._file(shard), None
        version = self.version(shard)
        if self.index.shards:
            mapped = self.cache.map(self.index.shards[shard])
            version, data, is_gone = mapped.file, mapped.data, mapped.is_gone
            first_byte = int(self.virtual.extents[shard, 0])
        else:
            data, first_byte = self._local_bytes(file, shard)
            self._verify(file, shard, data, first_byte)
        if not first_byte:
            check_start(file.name, data[:START_BYTES].tobytes())
        begins, counts = self._spans(shard)
        return OpenShard(
            key=version,
            uri=self.file_of(shard)[0],
            data=data,
            tokens=Spans(begins=begins - first_byte, counts=counts, dtype=file.dtype),
            labels=None,
            loss_mask=None,
            is_gone=is_gone,
        )

    def _spans(self, shard: int) -> tuple[Int64Array, Int64Array]:
        """Return the byte offset in its file, and the tokens, of each document of a shard."""
        file = self._file(shard)
        begins, lengths = file.spans(*self._documents(shard))
        start, stop = self.virtual.extents[shard].tolist()
        if begins[0] != start or begins[-1] + lengths[-1] * np.dtype(file.dtype).itemsize != stop:
            raise DataError(
                f"{file.name}: the table of its documents changed since the stream was opened; "
                "start again, and never write to a file that is being read"
            )
        return begins, lengths

    def _verify(self, file: TokenFile, shard: int, data: ByteArray, first_byte: int) -> None:
        start, stop = self.virtual.extents[shard].tolist()
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
        path, start = self.root / file.name, int(self.virtual.extents[shard, 0])
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
