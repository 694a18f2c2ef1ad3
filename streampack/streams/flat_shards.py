"""Token files that other programs wrote, in virtual shards.

::

    lengths, begins   the files' own tables (flat/), or a folder that `streampack index` made
    local             the token file is mapped; its virtual shards share the mapping
    remote            a virtual shard is fetched as a range of bytes, into a file of its own

Cost: a shard's lengths are read from its table when the order reaches it, about 20 ns a sample.
Tokens and the digest of a stream take one pass over all tables, 5 to 12 ns a sample.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import xxhash

from streampack.errors import DataError
from streampack.flat.documents import Documents
from streampack.flat.mapped_tables import map_shared, tables_mapped
from streampack.flat.token_file import TokenFile, VirtualShards
from streampack.mds.columns import Spans
from streampack.mds.index import Shard
from streampack.mds.regular_files import open_file
from streampack.storage.cache import ShardCache
from streampack.storage.filesystem import FileState, LocalFilesystem
from streampack.storage.verify import as_data_error, raise_if_changed
from streampack.streams.shard_pool import OpenShard
from streampack.types import ByteArray, Int64Array, LengthCost


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatShards:
    """The virtual shards of a `TokenStream` of token files."""

    cache: ShardCache
    entries: tuple[Shard, ...]
    """The virtual shards of remote files as the cache knows them; none of local files."""
    files: tuple[TokenFile, ...]
    virtual: VirtualShards
    has: Sequence[str] | None
    """Which of "bos" and "eos" every document has at its ends, or None if that is not said."""
    known: list[tuple[Int64Array, str]] = field(default_factory=list)
    """What the tables of documents say, once they were read."""
    has_lengths: ClassVar[bool] = True
    may_be_empty: ClassVar[bool] = True
    stored_bytes: ClassVar[int] = 0
    length_cost: ClassVar[LengthCost] = "none"
    block_samples: ClassVar[int | None] = None

    @property
    def first_sample(self) -> Int64Array:
        return self.virtual.first_sample

    @property
    def raw_bytes(self) -> Int64Array:
        sizes: Int64Array = self.virtual.extents[:, 1] - self.virtual.extents[:, 0]
        return sizes

    def entry(self, shard: int) -> Shard | None:
        """Return the shard as the cache knows it; None if its file is read in place."""
        return self.entries[shard] if self.entries else None

    @property
    def token_dtypes(self) -> set[str | None]:
        return {file.dtype for file in self.files}

    def lengths_digest(self) -> str:
        return self._read_tables()[1]

    def total_tokens(self) -> int:
        return int(self.tokens().sum())

    def tokens(self) -> Int64Array:
        return self._read_tables()[0]

    def _read_tables(self) -> tuple[Int64Array, str]:
        """Return the tokens of each virtual shard, and a digest of the lengths of all documents.

        A file may hold other bytes between documents, so the shards' bytes do not give tokens.
        """
        if not self.known:
            content, tokens = xxhash.xxh3_64(), np.zeros(len(self.virtual.file), np.int64)
            for _, shards in groupby(range(len(tokens)), self.virtual.file.__getitem__):
                with tables_mapped():
                    for shard in shards:
                        lengths = self._file(shard).lengths(*self._documents(shard))
                        tokens[shard] = lengths.sum()
                        content.update(lengths.data)
            self.known.append((tokens, content.hexdigest()))
        return self.known[0]

    def lengths(self, shard: int) -> Int64Array:
        return self._spans(shard)[1]

    def knows_edges(self, bos_id: int | None, eos_id: int | None) -> bool:
        """Return whether `edges` knows where these ids are without reading the tokens."""
        is_said = self.has is not None or isinstance(self.files[0].boundaries, Documents)
        return is_said or (bos_id is None and eos_id is None)

    def edges(self, shard: int, bos_id: int | None, eos_id: int | None) -> Int64Array:
        first, stop = self._documents(shard)
        boundaries = self._file(shard).boundaries
        if self.has is None and isinstance(boundaries, Documents):  # of an index
            return boundaries.edges(np.arange(first, stop))
        first_id = bos_id if bos_id is not None and "bos" in (self.has or ()) else -1
        last_id = eos_id if eos_id is not None and "eos" in (self.has or ()) else -1
        return np.tile(np.array([first_id, last_id], np.int64), (stop - first, 1))

    def _file(self, shard: int) -> TokenFile:
        return self.files[int(self.virtual.file[shard])]

    def _documents(self, shard: int) -> tuple[int, int]:
        first = int(self.virtual.first_document[shard])
        begin, end = self.virtual.first_sample[shard : shard + 2].tolist()
        return first, first + end - begin

    def file_of(self, shard: int) -> tuple[str, str]:
        name = self._file(shard).name
        return self.cache.location.uri(name), name

    def version(self, shard: int) -> Hashable:
        file = self._file(shard)
        if self.entries:
            return self.cache.file(self.entries[shard]), self.lengths_digest()
        # The table may be another one of the same file, and the hashes of its index may be, too.
        versions = (file.version, file.mask, self._hash(shard), self.lengths_digest())
        return self.cache.folder / file.name, *versions

    def read(self, shard: int, version: Any) -> OpenShard:
        file, is_gone, masks, loss_mask = self._file(shard), None, None, None
        start, stop = self.virtual.extents[shard].tolist()
        if self.entries:
            mapped = self.cache.map(self.entries[shard], version[0])
            data, masks = np.split(mapped.data, [stop - start])
            version, is_gone = (mapped.file, self.lengths_digest()), mapped.is_gone
        else:
            parts = [data := self._local_bytes(file.name, start, stop)]
            if file.mask is not None:
                masks = self._local_bytes(file.mask.name, *file.mask_range(start, stop))
                parts.append(masks)
            self._verify(file, shard, parts)
        begins, counts = self._spans(shard)
        begins = begins - start
        if file.mask is not None:
            places = begins // np.dtype(file.dtype).itemsize
            loss_mask = Spans(begins=places, counts=counts, dtype="uint8")
        return OpenShard(
            key=version,
            uri=self.file_of(shard)[0],
            data=data,
            tokens=Spans(begins=begins, counts=counts, dtype=file.dtype),
            labels=None,
            loss_mask=loss_mask,
            mask_data=masks,
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

    def _hash(self, shard: int) -> str | None:
        start, stop = self.virtual.extents[shard].tolist()
        return self._file(shard).hashes.get((start, stop))

    def _verify(self, file: TokenFile, shard: int, parts: Sequence[ByteArray]) -> None:
        wanted, content = self._hash(shard), xxhash.xxh3_64()
        if wanted is None:
            for each in (file, file.mask) if file.mask is not None else (file,):
                path = self.cache.folder / each.name
                raise_if_changed(path, each.version, version_of(self.cache.file_state(path)))
            return
        for part in parts:
            content.update(part.data)
        if content.hexdigest() != wanted:
            start, stop = self.virtual.extents[shard].tolist()
            masked = "" if file.mask is None else f", or their part of {file.mask.name},"
            raise DataError(
                f"{self.cache.folder / file.name}: bytes {start} to {stop}{masked} are not those "
                "that were indexed; make a new copy of the file, or, if it was meant to change, "
                "rerun streampack index"
            )

    def _local_bytes(self, name: str, start: int, stop: int) -> ByteArray:
        path = self.cache.folder / name
        if not LocalFilesystem().is_network(path.parent):
            return map_shared(path)[start:stop]
        # Another machine may cut the file, and reading its mapping would then kill the process.
        with as_data_error(path, is_retried=False), open_file(path) as opened:
            opened.seek(start)
            return np.frombuffer(opened.read(stop - start), np.uint8)


def version_of(state: FileState | None) -> str:
    """Return what identifies a version of a local token file; of a missing one, an empty text."""
    return "" if state is None else ",".join(map("{}:{}".format, state._fields, state))
