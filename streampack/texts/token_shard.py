"""Token shards: the ids of the rows of a text shard, in a file of a cache.

::

    seal         magic, hash of what follows                         storage/sealed.py
    counts       samples, tokens, bad rows, ...                      `ShardCounts`, int64 each
    lengths      uint32, tokens of each sample                       0: a row that gives none
    rows         uint32, the row of each sample                      if rows have several
    ids          uint16 or int32                                     from a multiple of 8 on
    columns      a value for each id: uint8, the loss mask of conversations; int32, labels and
                 masks of rows of token ids

What a token shard is named by, and what the fingerprint of a run has of texts::

    name          versions of files, rows | tokenizer, options, transform | versions of libraries
    fingerprint   names, sizes, rows      | tokenizer, options, transform | ids of the first rows

So a library that gives other ids is refused at a resume, and one that gives the same is not. BOS,
EOS and `overflow` are in neither.

A row has one sample, or with `train_on="each_response"` one for each response. An empty row, one
that is omitted, and a bad one that may be skipped have one sample of length 0, so that no other
row is moved.

Cost: the tokenizer's. A file takes 4 bytes a row, and 2 or 4 a token, and the columns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate, compress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

import streampack
from streampack._extras import installed
from streampack.errors import BadRowsError, DataError
from streampack.mds.columns import Spans
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.sealed import SEAL_BYTES, seal
from streampack.texts.inputs.slices import BadRow, RowBatch
from streampack.texts.rows import LOSS_MASK, RowEncoder, RowFormat
from streampack.texts.samples import SampleSchema, list_dtype
from streampack.texts.table import TextShard, TextTable, read_shard
from streampack.texts.tokenization import load_tokenizer, num_ids
from streampack.texts.transform import Transform
from streampack.types import ByteArray, Int64Array

OnBadRow = Literal["error", "skip"]

MAGIC = b"SPTOKEN1"
COLUMN = "tokens"
ALIGNMENT = 8  # of the ids
LEAST_RATE_OF_IDS = 0.5
ROOM = 1.5  # reserved for each token of an estimate: some texts have more than the first ones
OR_SKIP = "; set on_bad_row='skip' to skip such rows"
PROBE_ROWS = 256
PROBE_BYTES = 1 << 20
MOST_PROBED = 16  # shards whose first rows wait until they are made
TOKENS_PER_BYTE = 0.25  # without any text


class ShardCounts(NamedTuple):
    """The contents of a token shard."""

    num_samples: int
    num_tokens: int
    itemsize: int
    """Bytes of an id."""
    num_columns: int
    """Columns in addition to the ids."""
    column_bytes: int
    """Bytes of a value in them."""
    has_rows: int
    num_bad: int
    """Rows that could not become samples."""
    num_untrained: int
    """Samples of conversations without a token to learn."""
    num_empty: int
    """Samples of length 0, among them those of bad rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFormat:
    """How rows become the samples of token shards."""

    rows: RowFormat
    digest: str | None
    """That of the tokenizer: another one is refused."""
    dtype: str
    """Type of the ids."""
    on_bad_row: OnBadRow = "error"
    transform: Transform | None = None

    @property
    def is_ids(self) -> bool:
        """Whether rows have token ids, so that nothing is tokenized."""
        return self.rows.tokenizer is None

    @property
    def is_chat(self) -> bool:
        return self.rows.chat is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns in addition to the ids."""
        return (LOSS_MASK,) if self.is_chat else tuple(self.rows.kept)

    @property
    def column_dtype(self) -> str:
        return "uint8" if self.is_chat else list_dtype(self.dtype)

    @property
    def has_rows(self) -> bool:
        """Whether a row may have several samples."""
        return self.is_chat and self.rows.train_on == "each_response"

    def reserved_bytes(
        self, text_bytes: Int64Array, rows: Int64Array, tokens_per_byte: float
    ) -> Int64Array:
        """Return the bytes that are reserved for token shards, shape (num_shards,)."""
        per_token = np.dtype(self.dtype).itemsize
        per_token += len(self.columns) * np.dtype(self.column_dtype).itemsize
        # Those of ids are bytes of JSON, but a table may have ids in half as many.
        rate = max(tokens_per_byte, LEAST_RATE_OF_IDS) if self.is_ids else tokens_per_byte
        ids: Int64Array = np.ceil(text_bytes * (ROOM * rate * per_token)).astype(np.int64)
        return ids + 8 * rows


def dtype_of(tokenizer: Path | None) -> str:
    """Return the type of a tokenizer's ids; int32 for ids of rows."""
    is_small = tokenizer is not None and num_ids(load_tokenizer(tokenizer)) <= 2**16
    return "uint16" if is_small else "int32"


class Identity(NamedTuple):
    """What the ids of a row depend on, other than the row itself."""

    options: str
    """Tokenizer by content, options of a `RowFormat` that change ids, and transform, as JSON."""
    versions: str
    """Versions of libraries, as JSON; they are in names, and not in fingerprints."""


def identity_of(form: ShardFormat) -> Identity:
    """Return the identity of rows of a format."""
    options = {k: v for k, v in asdict(form.rows).items() if k != "tokenizer"}
    described = [options, form.digest, form.transform and asdict(form.transform)]
    versions = library_versions(form.rows.backend, is_chat=form.is_chat)
    return Identity(json.dumps(described, sort_keys=True), json.dumps(versions, sort_keys=True))


def library_versions(backend: str, *, is_chat: bool) -> dict[str, str | None]:
    """Return the versions of what token ids depend on, streampack among it, by name."""
    libraries = ["tokenizers", *(["gigatoken"] if backend == "gigatoken" else [])]
    libraries += ["transformers", "jinja2"] if is_chat else []
    return {"streampack": streampack.__version__} | {name: installed(name) for name in libraries}


def token_shard_name(table: TextTable, number: int, identity: Identity) -> str:
    """Return the name of a token shard: 32 hex digits of versions of files, rows and identity."""
    shard = table.shard(number)
    units = [
        (table.memory or unit.uri, unit.version, unit.start, unit.stop) for unit in shard.units
    ]
    described = [units, shard.first_row, shard.num_rows, *identity]
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()


def described(table: TextTable, identity: Identity, probed: str) -> dict[str, object]:
    """Return by name what samples depend on, as an index of their lengths states it.

    `probed` is the digest of `probe`.
    """
    options, tokenizer, transform = json.loads(identity.options)
    own = {"tokenizer": tokenizer, **options, "transform": transform}
    return {**own, "files": table.digest(), "ids of the first rows": probed}


def fingerprint(of: Mapping[str, object]) -> str:
    """Return what a resume compares: a digest of the table, the options and the probe's ids."""
    return hashlib.blake2b(json.dumps(of).encode(), digest_size=16).hexdigest()


Encoded: TypeAlias = "dict[int, list[dict[str, Any] | None] | str]"
"""What `RowEncoder.encode` returned for rows, by their numbers in the shard."""
_probed: dict[tuple[TextShard, ShardFormat], Encoded] = {}
"""The rows that this process has encoded of shards that are not made yet."""


def probe(table: TextTable, form: ShardFormat) -> tuple[str, float]:
    """Tokenize the first 256 rows, 1 MiB of text at most, and keep them for their token shards.

    Returns:
        A digest of the ids, and of what comes with them, such as loss masks; and the tokens divided
        by the bytes of rows as JSON, for estimates: 0.25 without any text.
    """
    digest, encoder = hashlib.blake2b(digest_size=16), row_encoder(form)
    num_rows = num_tokens = num_bytes = 0
    batches = (
        (shard, batch)
        for shard in map(table.shard, range(len(table)))
        for batch in read_shard(shard, form.rows.selection, form.transform)
    )
    for shard, batch in batches:
        taken, size = _first(batch, PROBE_ROWS - num_rows, PROBE_BYTES - num_bytes)
        num_bytes += size
        encoded = encoder.encode(taken)
        _probed.setdefault((shard, form), {}).update(zip(taken.rows, encoded, strict=True))
        if len(_probed) > MOST_PROBED:
            del _probed[next(iter(_probed))]
        for samples in encoded:
            for sample in () if isinstance(samples, str) else filter(None, samples):
                tokens, *others = sample.values()
                num_tokens += len(tokens)
                digest.update(tokens.astype("<i4").tobytes())
                digest.update(b"".join(other.tobytes() for other in others))
            digest.update(b"|")
        num_rows += batch.num_rows
        if num_rows >= PROBE_ROWS or len(taken.values) < len(batch.values):
            break
    return digest.hexdigest(), num_tokens / num_bytes if num_tokens else TOKENS_PER_BYTE


def _first(batch: RowBatch, num_rows: int, num_bytes: int) -> tuple[RowBatch, int]:
    """Return the first rows of a batch, up to a number and to bytes, and their bytes as JSON."""
    sizes = list(map(_size, batch.values))
    are_taken = [
        number < num_rows and total <= num_bytes for number, total in enumerate(accumulate(sizes))
    ]
    return batch.take(are_taken), sum(compress(sizes, are_taken))


def _size(value: Any) -> int:
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return len(orjson.dumps(value, default=str, option=option))
    except TypeError:  # half of a surrogate pair, which a transform may return
        return len(repr(value))


def make_token_shard(
    shard: TextShard, form: ShardFormat, decoded: Path | None, to: Path
) -> ShardCounts:
    """Tokenize a text shard into a file; `decoded` is as in `read_shard`.

    Raises:
        ConfigError: If the tokenizer is another one than that of the format.
        DataError: If a row is bad and may not be skipped, or a file is damaged or has changed.
    """
    rows: list[int] = []
    samples: list[dict[str, npt.NDArray[Any]]] = []
    num_bad = num_untrained = 0
    for found in _encoded_rows(shard, form, decoded):
        if isinstance(found, BadRow):
            num_bad += 1
            if form.on_bad_row == "error":
                text = f"{found.uri}, row {found.row}: {found.reason}{OR_SKIP}"
                raise BadRowsError(text, uri=found.uri)
            continue
        row, sample = found
        if form.is_chat and not sample[LOSS_MASK].any():
            num_untrained += 1
            continue
        rows.append(row)
        samples.append(sample)
    lengths = np.array([len(sample[COLUMN]) for sample in samples], np.int64)
    # Rows without a sample get an empty one, at their place.
    empty = np.setdiff1d(np.arange(shard.num_rows), rows)
    all_rows = np.concatenate([np.array(rows, np.int64), empty])
    order = np.argsort(all_rows, kind="stable")
    counts = ShardCounts(
        num_samples=len(all_rows),
        num_tokens=int(lengths.sum()),
        itemsize=np.dtype(form.dtype).itemsize,
        num_columns=len(form.columns),
        column_bytes=np.dtype(form.column_dtype).itemsize,
        has_rows=form.has_rows,
        num_bad=num_bad,
        num_untrained=num_untrained,
        num_empty=len(empty),
    )
    all_lengths = np.concatenate([lengths, np.zeros(len(empty), np.int64)])[order]
    tables = [np.array(counts, "<i8"), all_lengths.astype("<u4")]
    if form.has_rows:
        tables.append(all_rows[order].astype("<u4"))
    num_bytes = SEAL_BYTES + sum(table.nbytes for table in tables)
    tables.append(np.zeros(-num_bytes % ALIGNMENT, np.uint8))
    ids = np.concatenate([np.zeros(0, form.dtype), *(sample[COLUMN] for sample in samples)])
    tables.append(ids.astype(ids.dtype.newbyteorder("<"), copy=False))
    tables += [sample[name] for name in form.columns for sample in samples]
    pieces = [table.tobytes() for table in tables]
    LocalFilesystem().write(to, [seal(MAGIC, pieces), *pieces])
    return counts


def _encoded_rows(
    shard: TextShard, form: ShardFormat, decoded: Path | None
) -> Iterator[BadRow | tuple[int, dict[str, npt.NDArray[Any]]]]:
    """Yield the bad rows of a shard, and each sample of others after the number of its row."""
    encoder, known = row_encoder(form), _probed.pop((shard, form), {})
    for batch in read_shard(shard, form.rows.selection, form.transform, decoded=decoded):
        yield from batch.bad
        others = iter(encoder.encode(batch.take([row not in known for row in batch.rows])))
        for row in batch.rows:
            samples = known[row] if row in known else next(others)
            if isinstance(samples, str):
                yield BadRow(*shard.place(row), samples)
                continue
            yield from ((row, sample) for sample in samples if sample is not None)


@lru_cache(maxsize=2)  # it hashes the tokenizer's files
def row_encoder(form: ShardFormat) -> RowEncoder:
    """Return what encodes the rows of a format."""
    columns = dict.fromkeys(form.columns, f"ndarray:{form.column_dtype}")
    schema = SampleSchema(
        column=COLUMN,
        dtype=form.dtype,
        columns={COLUMN: f"ndarray:{form.dtype}", **columns},
        per_token=() if form.is_chat else form.columns,
    )
    return RowEncoder(form.rows, schema, form.digest)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenShard:
    """Where the samples of a token shard are in its bytes."""

    counts: ShardCounts
    tokens: Spans
    columns: tuple[Spans, ...]
    """As in `ShardFormat.columns`."""
    rows: Int64Array | None
    """The row of each sample, if rows have several; shape (num_samples,)."""

    def first_targets(self, data: ByteArray) -> Int64Array | None:
        """Return the place in each sample of its first target, shape (num_samples,).

        0 for one of length 0; None if the shard is not one of conversations.
        """
        if [each.dtype for each in self.columns] != ["uint8"]:
            return None
        counts, begins = self.columns[0].counts, self.columns[0].begins
        first = len(data) - self.counts.num_tokens  # the mask ends the file
        targets = np.append(np.flatnonzero(data[first:]), 0)
        places = targets[np.searchsorted(targets[:-1], begins - first)] - (begins - first)
        return np.where(counts > 0, places, 0)

    def facts(self, data: ByteArray) -> dict[str, Int64Array]:
        """Return the facts that an index has of samples, as arrays."""
        found = {
            "lengths": self.tokens.counts,
            "edges": self.tokens.edges(data),
            "rows": self.rows,
            "targets": self.first_targets(data),
        }
        return {name: values for name, values in found.items() if values is not None}


def parse_token_shard(data: ByteArray, where: str) -> TokenShard:
    """Return where samples are in the bytes of a file; a DataError names a damaged one."""
    begin = SEAL_BYTES
    stop = begin + 8 * len(ShardCounts._fields)
    if len(data) < stop or data[: len(MAGIC)].tobytes() != MAGIC:
        raise DataError(f"{where}: is not a token shard; delete it, and a run recreates it")
    counts = ShardCounts(*np.frombuffer(data[begin:stop].tobytes(), "<i8").tolist())
    num = counts.num_samples
    tables = []
    for _ in range(1 + counts.has_rows):
        tables.append(np.frombuffer(data[stop : stop + 4 * num].tobytes(), "<u4").astype(np.int64))
        stop += 4 * num
    lengths, first = tables[0], stop + -stop % ALIGNMENT
    last = first + counts.num_tokens * counts.itemsize
    column_bytes = counts.column_bytes * counts.num_tokens
    num_bytes = last + counts.num_columns * column_bytes
    if num_bytes != len(data) or lengths.sum() != counts.num_tokens:
        raise DataError(f"{where}: does not match its header; delete it, and a run recreates it")
    before = np.cumsum(lengths) - lengths
    dtype = "uint16" if counts.itemsize == 2 else "int32"
    return TokenShard(
        counts=counts,
        tokens=Spans(begins=first + before * counts.itemsize, counts=lengths, dtype=dtype),
        columns=tuple(
            Spans(
                begins=last + number * column_bytes + before * counts.column_bytes,
                counts=lengths,
                dtype="uint8" if counts.column_bytes == 1 else "int32",
            )
            for number in range(counts.num_columns)
        ),
        rows=tables[1] if counts.has_rows else None,
    )
