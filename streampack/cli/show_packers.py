"""Every packer on the same lengths: the implementation of ``streampack compare-packers``.

::

    synthetic lengths, lengths of streams --each packer--> a table for each, or one of Markdown

Cost: about ten seconds for each kind of lengths. For a stream, its length file is read, or the
headers of its shards if it has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from streampack.cli.show_stream import open_path
from streampack.errors import ConfigError, suggest
from streampack.report import (
    KINDS,
    packer_markdown,
    packer_result,
    packer_table,
    packings_to_compare,
    synthetic_lengths,
)
from streampack.rng import permutation
from streampack.streams import MdsStream
from streampack.types import Int64Array


def open_paths(paths: Sequence[str], columns: Mapping[str, Any]) -> list[MdsStream]:
    """Open the stream at each path; see `show_stream.open_path`."""
    return [open_path(path, columns) for path in paths]


def show_packers(
    sizes: Sequence[int],
    num_samples: int,
    streams: Sequence[MdsStream],
    kinds: Sequence[str] | None,
    as_markdown: bool,
) -> None:
    """Pack lengths with every packer and print the results.

    Args:
        sizes: Tokens in a pack, one or several.
        num_samples: Most samples of each kind of lengths.
        streams: Streams whose lengths are packed too.
        kinds: Kinds of synthetic lengths; None: all, or none if there are streams.
        as_markdown: Print one Markdown table instead of tables for a terminal.

    Raises:
        ConfigError: If a kind is unknown.
    """
    console = Console()
    found = {}
    for title, lengths in _all_lengths(num_samples, streams, kinds):
        for size in sizes:
            results = [
                packer_result(name, lengths, packing)
                for name, packing in packings_to_compare(size).items()
            ]
            found[f"{title} {size:,}"] = results
            if not as_markdown:
                console.print(packer_table(f"{title}, packs of {size:,}", results))
    if as_markdown:
        console.print(packer_markdown(found), markup=False, highlight=False, soft_wrap=True)


def _all_lengths(
    num_samples: int, streams: Sequence[MdsStream], kinds: Sequence[str] | None
) -> Iterator[tuple[str, Int64Array]]:
    """Yield names and lengths in tokens."""
    for kind in kinds or ([] if streams else KINDS):
        if kind not in KINDS:
            raise ConfigError(
                f"kind={kind!r} is not one of {'|'.join(KINDS)}{suggest(kind, KINDS)}"
            )
        yield kind, synthetic_lengths(kind, num_samples)
    for stream in streams:
        parts = [stream.shard_lengths(shard) for shard in range(stream.num_shards)]
        lengths = np.concatenate(parts).astype(np.int64)
        # Shuffled, as in training: in stored order, lengths may be sorted.
        order = permutation(len(lengths), 0, "compare-packers")
        yield stream.name, lengths[order[:num_samples]]
