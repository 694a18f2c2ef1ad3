"""The lengths of all samples of texts that are tokenized whole at the start, once a node.

::

    CACHE/lengths/<names of all token shards>.npz --> KnownLengths
        '-- missing: under its lock, every token shard is made, with a bar

Cost: that of the tokenizer, over all worker processes; later 12 bytes a sample are read.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from streampack._threads import ordered_thread_map
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.locks import FileLocks
from streampack.storage.verify import as_data_error
from streampack.streams.text_shards import KnownLengths, TextShards
from streampack.texts.token_shard import parse_token_shard
from streampack.types import Int64Array

logger = logging.getLogger(__name__)


def known_lengths(shards: TextShards, root: Path, disk: LocalFilesystem) -> KnownLengths:
    """Return the samples of all shards, which are made if this node does not know them yet."""
    content = hashlib.blake2b(digest_size=16)
    for number in range(len(shards.table)):
        content.update(shards.file_name(number).encode())
    path = root / "lengths" / f"{content.hexdigest()}.npz"
    known = _read_lengths(path, disk)
    locks = FileLocks(path.parent, disk)
    if known is None:
        with as_data_error(path), locks.hold(path.name, math.inf):
            known = _read_lengths(path, disk)
            if known is None:
                file = io.BytesIO()
                np.savez(file, allow_pickle=False, **_all_lengths(shards))
                locks.replace(path.name, path, file.getvalue())
                known = _read_lengths(path, disk)
    if known is None:
        raise FileNotFoundError(f"{path} was removed while it was written")
    return known


def _read_lengths(path: Path, disk: LocalFilesystem) -> KnownLengths | None:
    data = disk.read(path)
    if data is None:
        return None
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            found = dict(arrays)
    except (BadZipFile, ValueError, OSError):  # a damaged one is made again
        return None
    return KnownLengths(
        first_sample=found["first_sample"],
        lengths=found["lengths"],
        edges=found["edges"],
        rows=found.get("rows"),
        targets=found.get("targets"),
        digest=hashlib.blake2b(found["lengths"].tobytes(), digest_size=8).hexdigest(),
    )


def _all_lengths(shards: TextShards) -> dict[str, Int64Array]:
    """Make all token shards, with a bar, and return the arrays of a file of lengths."""
    found = list(_summaries(shards))
    counts = [summary["counts"] for summary in found]
    arrays = {
        name: np.concatenate([summary[name] for summary in found])
        for name in found[0]
        if name != "counts"
    }
    sizes = [each.num_samples for each in counts]
    arrays["first_sample"] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    num_bad, num_untrained, num_empty = (
        sum(getattr(each, name) for each in counts)
        for name in ("num_bad", "num_untrained", "num_empty")
    )
    logger.info("%s: %d samples, %d tokens", shards.name, sum(sizes), arrays["lengths"].sum())
    if num_bad or num_untrained or num_empty:
        logger.warning(
            "stream %r: %d rows give no tokens: %d bad ones, %d without a token to learn, and %d "
            "that are empty",
            shards.name,
            num_empty,
            num_bad,
            num_untrained,
            num_empty - num_bad - num_untrained,
        )
    return arrays


def _summaries(shards: TextShards) -> Iterator[dict[str, Any]]:
    console = import_module("rich.console").Console(stderr=True)
    progress = import_module("rich.progress").Progress
    number, num_workers = len(shards.table), shards.num_workers
    with progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenizing", total=int(shards.table.text_bytes.sum()))
        made = ordered_thread_map(
            range(number), partial(_summary, shards), 2 * num_workers, num_workers
        )
        for text_bytes, summary in zip(shards.table.text_bytes.tolist(), made, strict=True):
            bar.advance(task, text_bytes)
            yield summary


def _summary(shards: TextShards, number: int) -> dict[str, Any]:
    mapped = shards.cache.map(shards.entry(number))
    parsed = parse_token_shard(mapped.data, mapped.file.path)
    found = {
        "counts": parsed.counts,
        "lengths": parsed.tokens.counts.astype(np.uint32),
        "edges": parsed.tokens.edges(mapped.data).astype(np.int32),
    }
    optional = {"rows": parsed.rows, "targets": parsed.first_targets(mapped.data)}
    arrays = {name: each for name, each in optional.items() if each is not None}
    return found | {name: each.astype(np.uint32) for name, each in arrays.items()}
