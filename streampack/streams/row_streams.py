"""Open the rows of a source: written once per node into a cache, and then read as shards."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from streampack.errors import ConfigError
from streampack.streams.mds_opening import open_mds
from streampack.streams.sources.shards import Shards
from streampack.streams.sources.values import in_memory, is_path
from streampack.streams.token_stream import Opening, TokenStream
from streampack.texts.rows import LOSS_MASK
from streampack.write.row_streams import written_rows


def open_rows(source: Any, opening: Opening, **row: Any) -> TokenStream:
    """Return the stream of a source of rows; `row` are options of a `RowFormat`.

    Raises:
        ConfigError: If the rows are of a kind that cannot be read twice, or an option is invalid.
        DataError: If a row cannot become a sample, or a file cannot be read.
    """
    held, is_chat = opening.held_out, "chat" in row
    split = None
    # Samples of a row share their begin, so a split by samples would train on held-out text.
    if held is not None and row.get("train_on") == "each_response":
        if held.by == "shard":
            raise ConfigError(
                f"{held}: a conversation of several samples may lie in two shards, one on each "
                "side; write by='row', which splits by conversation"
            )
        split, opening = held, replace(opening, held_out=None)
    folder = written_rows(
        source.files, row, local=source.local, on_bad_row=source.on_bad_row, split=split
    )
    shards = Shards(
        local=folder,
        labels=getattr(source, "labels", None),
        labels_shifted=getattr(source, "labels_shifted", None),
        loss_mask=LOSS_MASK if is_chat else getattr(source, "loss_mask", None),
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
    return Path(os.fspath(files)).name.partition(".")[0] or "rows" if is_path(files) else "rows"
