"""The lengths of all samples of texts: those tokenized whole at the start, or of an index.

::

    CACHE/lengths/<names of all token shards>.npz --> KnownLengths
        '-- missing: under its lock, every token shard is made, with a bar
    INDEX/rows.npz: made_with --> are these the same texts, tokenizer, options? --> KnownLengths
    INDEX/lengths.npz

Cost: that of the tokenizer, over all worker processes; later 12 bytes a sample are read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from streampack._threads import ordered_thread_map
from streampack.errors import ConfigError, short_text
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.locks import FileLocks
from streampack.storage.verify import as_data_error
from streampack.streams.text_shards import KnownLengths, TextShards
from streampack.texts.counts import (
    INDEX_FILE,
    LENGTHS_FILE,
    as_npz,
    progress_bar,
    read_index,
    read_npz,
    write_index_file,
)
from streampack.texts.token_shard import ShardCounts
from streampack.types import Int64Array

MADE_WITH = "made_with"  # the array of rows.npz for the facts that lengths depend on

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def known_lengths(shards: TextShards, root: Path, disk: LocalFilesystem) -> KnownLengths:
    """Return the samples of all shards, which are made if this node does not know them yet."""
    content = hashlib.blake2b(digest_size=16)
    for number in range(len(shards.table)):
        content.update(shards.file_name(number).encode())
    path = root / "lengths" / f"{content.hexdigest()}.npz"
    known = _read_lengths(path, disk)
    locks = FileLocks(path.parent, disk)
    if known is None:
        num_bytes = 12 * int(shards.first_sample[-1])
        with as_data_error(path, num_bytes), locks.hold(path.name, math.inf):
            known = _read_lengths(path, disk)
            if known is None:
                arrays = _all_lengths(shards)
                locks.replace(path.name, path, as_npz(arrays))
                known = _known(arrays)
    return known


def _read_lengths(path: Path, disk: LocalFilesystem) -> KnownLengths | None:
    data = disk.read(path)
    # A damaged one is replaced.
    return None if data is None or (found := read_npz(data)) is None else _known(found)


def _known(found: Mapping[str, Any]) -> KnownLengths:
    digest = hashlib.blake2b(found["lengths"].tobytes(), digest_size=8).hexdigest()
    names = ("first_sample", "lengths", "edges", "rows", "targets")
    arrays: dict[str, Any] = {name: found.get(name) for name in names}
    return KnownLengths(**arrays, digest=digest)


def indexed_lengths(index: str | os.PathLike[str], of: Mapping[str, object]) -> KnownLengths | None:
    """Return the lengths in an index, if it has any.

    Raises:
        ConfigError: If they are of other texts, or of another tokenizer or option than `of` says.
    """
    made_with = (read_npz(read_index(index)) or {}).get(MADE_WITH)
    if made_with is None:
        return None
    again = "run `streampack index` again, with --tokenizer and the options of these texts"
    stated = json.loads(made_with.tobytes())
    for name, value in of.items():
        if (other := stated.get(name)) != value:
            raise ConfigError(
                f"index={os.fspath(index)!r} has the lengths for {name}={short_text(other)}, but "
                f"these texts have {name}={short_text(value)}; {again}, or omit index"
            )
    found = read_npz(read_index(index, LENGTHS_FILE))
    known = None if found is None else _known(found)
    if known is None or known.digest != stated[LENGTHS_FILE]:
        raise ConfigError(f"index={os.fspath(index)!r}: its {LENGTHS_FILE} is damaged; {again}")
    return known


def write_lengths_index(
    shards: TextShards, out: str, of: Mapping[str, object], *, is_kept: bool
) -> KnownLengths:
    """Tokenize all shards, and write their lengths next to the counts of an index.

    Token shards that are not kept are removed one by one. Decoded units stay until the end.
    """
    arrays = _all_lengths(shards, is_kept=is_kept)
    known = _known(arrays)
    write_index_file(out, LENGTHS_FILE, arrays)
    # Last: without it, an index has counts only.
    made_with = np.frombuffer(json.dumps({**of, LENGTHS_FILE: known.digest}).encode(), np.uint8)
    counts = read_npz(read_index(out)) or {}
    write_index_file(out, INDEX_FILE, {**counts, MADE_WITH: made_with})
    return known


def _all_lengths(shards: TextShards, *, is_kept: bool = True) -> dict[str, Int64Array]:
    """Make all token shards, with a bar, and return the arrays of a file of lengths."""
    found = of_all_shards(shards, partial(_summary, shards, is_kept))
    counts, facts = zip(*found, strict=True)
    arrays = {name: np.concatenate([each[name] for each in facts]) for name in facts[0]}
    sizes = [each.num_samples for each in counts]
    arrays["first_sample"] = np.append(0, np.cumsum(sizes)).astype(np.int64)
    total = ShardCounts(*map(sum, zip(*counts, strict=True)))
    logger.info("%s: %d samples, %d tokens", shards.name, total.num_samples, total.num_tokens)
    if total.num_untrained or total.num_empty:
        logger.warning(
            "stream %r: %d rows give no tokens: %d bad ones, %d without a token to learn, and %d "
            "that are empty",
            shards.name,
            total.num_empty,
            total.num_bad,
            total.num_untrained,
            total.num_empty - total.num_bad - total.num_untrained,
        )
    return arrays


def of_all_shards(shards: TextShards, call: Callable[[int], _T]) -> Iterator[_T]:
    """Yield what a function returns of the number of each shard, which it makes; show a bar."""
    text_bytes = shards.table.cut.text[shards.numbers].tolist()
    workers = shards.num_workers
    with progress_bar("tokenizing", sum(text_bytes)) as show:
        made = ordered_thread_map(range(len(text_bytes)), call, 2 * workers, workers)
        for num_bytes, found in zip(text_bytes, made, strict=True):
            show(num_bytes)
            yield found


def _summary(
    shards: TextShards, is_kept: bool, number: int
) -> tuple[ShardCounts, dict[str, Int64Array]]:
    mapped, parsed = shards.parsed(number)
    if shards.cache.is_limited:  # none is planned yet; units and their other shards go later
        shards.cache.mark_finished([shards.entry(number)])
    if not is_kept:
        Path(mapped.file.path).unlink()  # the mapping stays
    return parsed.counts, {
        name: values.astype(np.int32 if name == "edges" else np.uint32)
        for name, values in parsed.facts(mapped.data).items()
    }
