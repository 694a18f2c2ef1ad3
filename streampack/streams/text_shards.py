"""Text shards as the shards of a stream: tokenized on the way into this node's cache.

::

    entry(7)     the name of what shard 7 holds --> the cache: is it here? lock, room, make, rename
    make         table.shard(7) --> a worker process: read, tokenize --> a file (texts/token_shard)
    read(7)      the file, mapped, and where its samples are

Lengths are known once a shard is opened, or all of them from the start (text_opening.py).

Cost: naming an entry takes about 20 us; the rest is that of texts/token_shard.py.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from streampack.errors import DataError
from streampack.mds.index import Shard, ShardFile
from streampack.storage.cache import CachedFile, MappedShard, ShardCache
from streampack.streams.column_selection import ColumnSelection
from streampack.streams.parts import SamplePart
from streampack.streams.shard_pool import OpenShard
from streampack.texts.inputs.values import RowSelection
from streampack.texts.pool import tokenizer_pool
from streampack.texts.table import TextShard, TextTable, decode_unit, read_whole_row
from streampack.texts.token_shard import (
    Identity,
    ShardFormat,
    TokenShard,
    make_token_shard,
    parse_token_shard,
    token_shard_name,
)
from streampack.types import Int64Array, IntArray, LengthCost

BLOCK_SHARDS = 8
MANY_AGAIN = 0.05  # of the shards that are tokenized
LEAST_AGAIN = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownLengths:
    """The samples of all shards of a table, in 32 bits, since it is pickled to workers."""

    first_sample: Int64Array
    """The first sample of each shard, and their number; shape (num_shards + 1,)."""
    lengths: IntArray
    """Tokens of each sample, shape (num_samples,)."""
    edges: IntArray
    """The first and last token of each sample, -1 if it is empty; shape (num_samples, 2)."""
    rows: IntArray | None
    """The row in its shard of each sample, if rows have several; shape (num_samples,)."""
    targets: IntArray | None
    """The place of the first target of each sample of conversations, shape (num_samples,)."""
    digest: str

    def part(self, name: str, shard: int) -> Any:
        """Return a field of the samples of a shard, or None."""
        values = getattr(self, name)
        first, stop = self.first_sample[shard], self.first_sample[shard + 1]
        return None if values is None else values[first:stop].astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextShards:
    """The shards of a `TokenStream` of texts or conversations."""

    name: str
    table: TextTable
    format: ShardFormat
    identity: Identity
    cache: ShardCache
    numbers: Int64Array
    """The shards of the table that are used, shape (num_shards,)."""
    first_sample: Int64Array
    columns: ColumnSelection
    tokens_per_byte: float
    """An estimate, for lengths that are not known."""
    num_workers: int
    """Processes that tokenize."""
    known: KnownLengths | None = None
    side: SamplePart | None = None
    """The rows whose samples are used, if rows have several: the others are as if empty."""
    made: set[int] = field(default_factory=set)
    """The shards of the table that were tokenized for this process; grows."""
    made_again: list[int] = field(default_factory=list)
    """Those that were, each time but the first."""
    may_be_empty: ClassVar[bool] = True
    stored_bytes: ClassVar[int] = 0
    reserved: Int64Array = field(init=False)
    """Bytes reserved for each token shard of the table, from it and the probe alone."""

    def __post_init__(self) -> None:
        table, rate = self.table, self.tokens_per_byte
        reserved = self.format.reserved_bytes(table.cut.text, table.cut.rows, rate)
        object.__setattr__(self, "reserved", reserved)

    @property
    def raw_bytes(self) -> Int64Array:
        """Bytes reserved for each token shard that is used, shape (num_shards,)."""
        return self.reserved[self.numbers]

    @property
    def has_lengths(self) -> bool:
        return self.known is not None

    @property
    def length_cost(self) -> LengthCost:
        return "tokenize" if self.known is None else "none"

    @property
    def block_samples(self) -> int:
        """The samples that are shuffled together, whether lengths are known or not."""
        return max(BLOCK_SHARDS * int(self.first_sample[-1]) // len(self.numbers), 1)

    @property
    def token_dtypes(self) -> set[str | None]:
        return {self.format.dtype}

    def entry(self, shard: int) -> Shard:
        """Return the shard as the cache knows it."""
        number = int(self.numbers[shard])
        make = partial(self._make, number)
        return _made(self.file_name(number), int(self.reserved[number]), make)

    def file_name(self, number: int) -> str:
        """Return the name of the token shard of a shard of the table."""
        name = token_shard_name(self.table, number, self.identity)
        skips = "-skip" if self.format.on_bad_row == "skip" else ""
        return f"{name[:24]}{skips}.{name[24:]}"

    def _make(self, number: int, to: Path) -> None:
        shard = self.table.shard(number)
        if shard.decoded_bytes:
            self._make_of_decoded(shard, to)
        else:
            self._tokenize(shard, to)
        if number in self.made:
            self.made_again.append(number)
        self.made.add(number)
        if len(self.made_again) > max(LEAST_AGAIN, MANY_AGAIN * len(self.made)):
            _warn_of_shards_again(self.name)

    def _tokenize(self, shard: TextShard, to: Path, decoded: Path | None = None) -> None:
        task = partial(make_token_shard, shard, self.format, decoded, to)
        tokenizer_pool(self.num_workers).run(task)

    def _make_of_decoded(self, shard: TextShard, to: Path) -> None:
        unit = self._decoded(shard)
        file = self.cache.file(unit)
        path = Path(file.path)
        try:
            self._tokenize(shard, to, path)
        except DataError as error:
            if self.cache.file_state(path) == file.state:
                raise
            raise FileNotFoundError(f"{path} was evicted while it was read") from error
        if self.cache.is_limited:  # others may be made of it, while those finished are of no use
            self.cache.mark_spare([unit])

    def _decoded(self, shard: TextShard) -> Shard:
        """Return the decoded unit of a shard as the cache knows it."""
        form = self.format
        wanted = form.rows.selection
        if form.transform is not None:
            wanted = RowSelection("row", wanted.name)
        name = hashlib.blake2b(repr((shard.units, wanted)).encode(), digest_size=16).hexdigest()
        make = partial(decode_unit, shard, wanted)

        def run(to: Path) -> None:
            tokenizer_pool(self.num_workers).run(partial(make, to))

        return _made(f"{name[:24]}-rows.{name[24:]}", shard.decoded_bytes, run)

    def lengths_digest(self) -> str:
        return "" if self.known is None else self.known.digest

    def total_tokens(self) -> int:
        """Return the tokens of all shards, or an estimate from the bytes of their text."""
        if (tokens := self.tokens()) is not None:
            return int(tokens.sum())
        text_bytes = int(self.table.cut.text[self.numbers].sum())
        return max(round(text_bytes * self.tokens_per_byte), int(self.first_sample[-1]))

    def tokens(self) -> Int64Array | None:
        if self.known is None:
            return None
        each = map(self.lengths, range(len(self.numbers)))
        return np.array([lengths.sum() for lengths in each if lengths is not None], np.int64)

    def lengths(self, shard: int) -> Int64Array | None:
        """Return the tokens of each sample of a shard, 0 of those that are not used."""
        known, number = self.known, int(self.numbers[shard])
        if known is None:
            return None
        facts = {name: known.part(name, number) for name in ("lengths", "rows")}
        return self._used(facts, shard)

    def _used(self, facts: Mapping[str, Any], shard: int) -> Int64Array:
        lengths: Int64Array = facts["lengths"]
        rows = facts.get("rows")
        if self.side is not None and rows is not None:
            lengths = np.where(np.isin(rows, self.side.rows(shard)), lengths, 0)
        return lengths

    def edges(self, shard: int, *_ids: int | None) -> Int64Array | None:
        known = self.known
        return None if known is None else known.part("edges", int(self.numbers[shard]))

    def first_targets(self, shard: int) -> Int64Array | None:
        """Return the place of the first target of each sample; None if that is not known."""
        known = self.known
        return None if known is None else known.part("targets", int(self.numbers[shard]))

    def file_of(self, shard: int) -> tuple[str, str]:
        unit = self.table.shard(int(self.numbers[shard])).units[0]
        return unit.uri, Path(unit.uri).name

    def row_of(self, shard: int, sample: int) -> dict[str, Any]:
        """Return the file of a sample of a shard, the number of its row there, and the row."""
        number = int(self.numbers[shard])
        rows = None if self.known is None else self.known.part("rows", number)
        row = sample if rows is None else int(rows[sample])
        shard_of_table = self.table.shard(number)
        file, in_file = shard_of_table.place(row)
        fields = read_whole_row(shard_of_table, row)
        return {"file": file, "row": in_file, "fields": fields}

    def version(self, shard: int) -> CachedFile:
        return self.cache.file(self.entry(shard))

    def parsed(
        self, shard: int, version: CachedFile | None = None
    ) -> tuple[MappedShard, TokenShard]:
        """Map a token shard, which is made if it is missing or damaged."""
        entry = self.entry(shard)
        mapped = self.cache.map(entry, version)
        try:
            return mapped, parse_token_shard(mapped.data, mapped.file.path)
        except DataError:
            self.cache.remove_damaged(entry, mapped.file)  # our own file: recreate it
            mapped = self.cache.map(entry)
            return mapped, parse_token_shard(mapped.data, mapped.file.path)

    def read(self, shard: int, version: CachedFile) -> OpenShard:
        """Map a token shard, which is made if necessary, and locate its samples."""
        mapped, parsed = self.parsed(shard, version)
        facts = parsed.facts(mapped.data)
        if self.known is not None:
            self._check_known(self.known, facts, shard)
        counts = self._used(facts, shard)
        columns = {
            name: replace(spans, counts=counts)
            for name, spans in zip(self.format.columns, parsed.columns, strict=True)
        }
        return OpenShard(
            key=mapped.file,
            uri=self.file_of(shard)[0],
            data=mapped.data,
            tokens=replace(parsed.tokens, counts=counts),
            labels=columns.get(self.columns.labels or ""),
            loss_mask=columns.get(self.columns.loss_mask or ""),
            first_targets=facts.get("targets"),
            is_gone=mapped.is_gone,
        )

    def _check_known(
        self, known: KnownLengths, facts: Mapping[str, Int64Array], shard: int
    ) -> None:
        for name, values in facts.items():
            if not np.array_equal(values, known.part(name, int(self.numbers[shard]))):
                raise DataError(
                    f"{self.file_of(shard)[0]}: its token shard {shard} has other {name} than the "
                    "index; the file, or a library, has changed since it was written: rerun "
                    "`streampack index`, or omit index"
                )


def _made(name: str, num_bytes: int, make: Callable[[Path], None]) -> Shard:
    """Return the entry of a file that is made here."""
    file = ShardFile(basename=name, num_bytes=num_bytes, hashes={}, make=make)
    return Shard(num_samples=0, raw=file)


@cache
def _warn_of_shards_again(name: str) -> None:
    logger.warning(
        "stream %r: more than 5 %% of its token shards are retokenized, because the cache does not "
        "keep them until their next use; raise Buffers(cache_limit=), or write the texts once "
        "(streampack write)",
        name,
    )
