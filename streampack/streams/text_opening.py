"""Open texts and conversations: their table, their names, and what of their lengths is known.

::

    files, lists --> table of text shards --> names of token shards --> TextShards
    the first rows --> ids --> fingerprint, tokens per byte
    up to 256 MiB of text --> all shards are made now --> CACHE/lengths/<names>.npz
    an index of `streampack index --tokenizer` --> lengths, and no shard is made

Whether lengths are known from the start depends on the table and the index, never on what a cache
has: the order of samples may differ.

Cost: the rows of files are counted once a node. Each process loads the tokenizer.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from streampack.config import Buffers
from streampack.config.held_out import HeldOut
from streampack.errors import ConfigError, DataError
from streampack.storage.cache import ShardCache
from streampack.storage.eviction import CacheLimit
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.location import StreamLocation, cache_root
from streampack.storage.locks import FileLocks
from streampack.storage.verify import as_data_error
from streampack.streams.column_selection import ColumnSelection
from streampack.streams.label_columns import TARGET_COLUMNS, warn_unused_label_column
from streampack.streams.parts import Numbering, SamplePart, chosen_shards, digest_text
from streampack.streams.sample_fields import token_ids, values_per_token
from streampack.streams.sources.values import default_name, is_path
from streampack.streams.text_lengths import indexed_lengths, known_lengths
from streampack.streams.text_shards import TextShards
from streampack.streams.token_stream import Opening, TokenStream
from streampack.texts.pool import tokenizer_pool
from streampack.texts.rows import LOSS_MASK, row_format, tokenizer_digest
from streampack.texts.table import open_table, read_whole_row
from streampack.texts.token_shard import (
    ShardFormat,
    described,
    dtype_of,
    fingerprint,
    identity_of,
    probe,
)
from streampack.texts.tokenization import compare_added_tokens, tokenizer_folder
from streampack.texts.transform import Transform

WHOLE_BYTES = 256 << 20  # of text that is tokenized at the start
UNLIMITED_BYTES = 1 << 30  # of text for which the system's temporary folder is good enough
FOLDER = "texts"


def open_texts(
    source: Any, opening: Opening, selected: ColumnSelection | None = None, **row: Any
) -> TokenStream:
    """Return the stream of a source of texts, conversations or rows of token ids.

    `selected` are the columns of the latter, and `row` more options of their `RowFormat`.

    Raises:
        ConfigError: If the rows are of a kind that cannot be read twice, or an option is invalid.
        DataError: If a row cannot become a sample, or a file cannot be read.
    """
    shards, of = shards_of_texts(source, opening, selected, **row)
    form, text_bytes = shards.format, int(shards.table.cut.text.sum())
    if form.is_ids and not (shards.columns.labels or shards.columns.loss_mask):
        _warn_of_targets(source.files, shards)
    lengths = "eager" if form.is_ids else source.lengths
    has_index = source.index is not None and not form.is_ids
    known = indexed_lengths(source.index, of) if has_index else None
    is_short = known is None and lengths is None and text_bytes <= WHOLE_BYTES
    if lengths == "eager" or is_short:
        if opening.cache_limit is not None:  # not yet that of all streams
            folders = shards.cache.cache_folders([shards.entry(0)])
            shards.cache.keep_within(CacheLimit(opening.cache_limit, folders, opening.disk))
        known = known_lengths(shards, shards.cache.location.root, opening.disk)
    if known is not None:
        shards = replace(shards, known=known, first_sample=known.first_sample)
    elif form.has_rows:
        raise ConfigError(
            "train_on='each_response' makes several samples of a conversation, so all must be "
            f"tokenized before the first batch, and these are {text_bytes} bytes of text; set "
            "lengths='eager', or index= after `streampack index --tokenizer`, or write them once "
            "and use Shards; both commands with --chat and --train-on each_response"
        )
    shards, part = _chosen(shards, opening.stream.held_out, source.only)
    digest = _digest(fingerprint(of), shards, part)
    return TokenStream.of(opening, shards.name, shards, part, columns=shards.columns, digest=digest)


def shards_of_texts(
    source: Any, opening: Opening, selected: ColumnSelection | None = None, **row: Any
) -> tuple[TextShards, dict[str, object]]:
    """Return all shards of a source, of which none is tokenized, and what their lengths are of."""
    root = cache_root(source.local, FOLDER)
    form = _format_of(source, root, opening.disk, row)
    table = open_table(
        source.files, form.rows.selection, root, transform=form.transform, index=source.index
    )
    text_bytes = int(table.cut.text.sum())
    if source.local is None and opening.cache_limit is None and text_bytes > UNLIMITED_BYTES:
        raise ConfigError(
            f"local=None: {text_bytes} bytes of text would fill the system's temporary folder; set "
            "local= to a folder of this node's disk, or Buffers(cache_limit=) to what may be kept"
        )
    num_workers = opening.num_workers or Buffers().processes(1)
    identity = identity_of(form)
    probed, tokens_per_byte = tokenizer_pool(num_workers).run(partial(probe, table, form))
    name = opening.stream.name or default_name(source.files)
    location = StreamLocation(folder=root / "tokens", remote=name, root=root)
    columns = selected or ColumnSelection(loss_mask=LOSS_MASK if form.is_chat else None)
    shards = TextShards(
        name=name,
        table=table,
        format=form,
        identity=identity,
        cache=ShardCache(location, opening.disk),
        numbers=np.arange(len(table)),
        first_sample=table.first_sample,
        columns=columns,
        tokens_per_byte=tokens_per_byte,
        num_workers=num_workers,
    )
    return shards, described(table, identity, probed)


def _warn_of_targets(files: Any, shards: TextShards) -> None:
    """Warn of columns of rows of token ids that look like labels or a loss mask."""
    with suppress(DataError):
        if isinstance(files, list | tuple):  # of these, the cache has the columns that are read
            row = files[0]
        else:
            is_table = hasattr(files, "iloc")
            row = files.iloc[0].to_dict() if is_table else read_whole_row(shards.table.shard(0), 0)
        names = TARGET_COLUMNS.keys() & (row if isinstance(row, Mapping) else {})
        for name in sorted(names - {shards.columns.tokens}):
            with suppress(DataError):  # not one integer per token, so it is something else
                values_per_token(token_ids(row, shards.columns.tokens, ""), row, name, "")
                warn_unused_label_column("TokenFiles", shards.name, name)


def _format_of(
    source: Any, root: Path, disk: LocalFilesystem, row: Mapping[str, Any]
) -> ShardFormat:
    tokenizer = None
    if hasattr(source, "tokenizer"):
        tokenizer = _kept_tokenizer(source.tokenizer, root, disk)
    rows = row_format(source, tokenizer=tokenizer, **row)
    if tokenizer is not None and rows.backend == "gigatoken":
        compare_added_tokens(tokenizer)
    transform = None if tokenizer is None else source.transform
    return ShardFormat(
        rows=rows,
        digest=tokenizer_digest(rows),
        dtype=dtype_of(tokenizer),
        on_bad_row=source.on_bad_row,
        transform=transform and Transform.of(transform, source.version),
    )


def _kept_tokenizer(tokenizer: Any, root: Path, disk: LocalFilesystem) -> Path:
    """Return the path of a tokenizer; one in memory is kept in the cache, for other processes."""
    with tempfile.TemporaryDirectory(prefix="streampack-tokenizer-") as temporary:
        path = tokenizer_folder(tokenizer, Path(temporary)) or Path()
        if is_path(tokenizer):
            return path
        content = hashlib.blake2b(digest_size=16)
        found = sorted(filter(Path.is_file, path.rglob("*")))  # named templates have a folder
        files = [(str(file.relative_to(path)), file.read_bytes()) for file in found]
        for name, data in files:
            content.update(f"{name} {len(data)} ".encode() + data)
        kept = root / "tokenizers" / content.hexdigest()
        locks = FileLocks(root / "tokenizers", disk)
        with as_data_error(kept, sum(len(data) for _, data in files)):
            for name, data in files:
                if disk.read(kept / name) != data:
                    locks.replace(kept.name, kept / name, data)
    return kept


def _chosen(
    shards: TextShards, held: HeldOut | None, only: slice | None
) -> tuple[TextShards, SamplePart | None]:
    """Return the shards with samples of a part of a stream, and which samples of them."""
    side = None
    # Samples of a row share their begin, so a split by samples would train on held-out text.
    if shards.format.has_rows and held is not None and held.by == "row":
        of = Numbering.of_stream(shards.table.first_sample)
        chosen_shards(held, of, shards.name)  # refuses a side without rows
        side = SamplePart(held_out=held, only=None, numbering=of, own=of.counts)
        held = None
    numbering = Numbering.of_stream(shards.first_sample)
    numbers, part = chosen_shards(held, numbering, shards.name, samples=only)
    counts = np.diff(shards.first_sample)[numbers]
    first_sample = np.concatenate([[0], np.cumsum(counts)])
    if side is not None:
        side = side.take(numbers)
    return replace(shards, numbers=numbers, first_sample=first_sample, side=side), part


def _digest(content: str, shards: TextShards, part: SamplePart | None) -> str:
    # Open shards are known by it: the samples of one depend on all of this.
    text = f"{content} {shards.format.on_bad_row} {shards.columns}".encode()
    digest = hashlib.blake2b(text + digest_text(part) + digest_text(shards.side), digest_size=16)
    digest.update(shards.numbers.tobytes())
    return digest.hexdigest()
