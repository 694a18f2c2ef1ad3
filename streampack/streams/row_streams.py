"""Open token lists: written once per node into a cache, and then read as shards."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from streampack.streams.mds_opening import open_mds
from streampack.streams.sources.shards import Shards
from streampack.streams.sources.values import in_memory, is_path
from streampack.streams.token_stream import Opening, TokenStream
from streampack.write.row_streams import written_rows


def open_rows(source: Any, opening: Opening, **row: Any) -> TokenStream:
    """Return the stream of a source of token lists; `row` are options of a `RowFormat`.

    Raises:
        ConfigError: If the rows are of a kind that cannot be read twice, or an option is invalid.
        DataError: If a row cannot become a sample, or a file cannot be read.
    """
    folder = written_rows(source.files, row, local=source.local, on_bad_row=source.on_bad_row)
    shards = Shards(
        local=folder,
        labels=source.labels,
        labels_shifted=source.labels_shifted,
        loss_mask=source.loss_mask,
    )
    name = opening.name or default_name(source.files)
    return open_mds(shards, shards.location(), replace(opening, name=name), source.only)


def without_memory(stream: Any) -> Any:
    """Return a copy of a stream without a client, and without what its source has in memory."""
    stream = copy.copy(stream)
    if hasattr(stream, "_downloader"):
        stream._downloader = None
    source = getattr(stream, "source", None)
    for name in in_memory(source):
        stream.source = copy.copy(stream.source)
        object.__setattr__(stream.source, name, type(getattr(source, name)))
    return stream


def default_name(files: Any) -> str:
    """Return the name of a stream of files or rows that has none of its own."""
    return Path(os.fspath(files)).name.partition(".")[0] or "rows" if is_path(files) else "rows"
