"""Every packer on the same lengths: the work of ``streampack compare-packers``.

::

    made-up lengths, lengths of streams --each packer--> a table for each, or one of Markdown

Cost: about ten seconds for each kind of lengths; of a stream, its length file is read, or where
there is none the heads of its shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console

from streampack.errors import ConfigError, suggest
from streampack.paths import folder_of
from streampack.report import (
    KINDS,
    packer_markdown,
    packer_result,
    packer_table,
    packings_to_compare,
    synthetic_lengths,
)
from streampack.rng import permutation
from streampack.streams import Stream, open_stream
from streampack.types import Int64Array

__all__ = ["show_packers"]


def show_packers(
    sizes: Sequence[int],
    num_samples: int,
    streams: Sequence[str],
    kinds: Sequence[str] | None,
    as_markdown: bool,
) -> None:
    """Pack lengths with every packer and print what came out.

    Args:
        sizes: Tokens in a pack, one or several.
        num_samples: Samples of each kind of lengths, at most.
        streams: Folders or URLs of streams.
        kinds: Which made-up lengths; None: all, but none where streams are named.
        as_markdown: One table of Markdown, not tables for a terminal.

    Raises:
        ConfigError: If a kind is not known.
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
    num_samples: int, streams: Sequence[str], kinds: Sequence[str] | None
) -> Iterator[tuple[str, Int64Array]]:
    """Yield a name and lengths in tokens, one after the other."""
    for kind in kinds or ([] if streams else KINDS):
        if kind not in KINDS:
            raise ConfigError(
                f"kind={kind!r} is not one of {'|'.join(KINDS)}{suggest(kind, KINDS)}"
            )
        yield kind, synthetic_lengths(kind, num_samples)
    for path in streams:
        folder = folder_of(path)
        described = Stream(remote=path if folder is None else None, local=folder)
        stream = open_stream(described, 0)
        parts = [stream.shard_lengths(shard) for shard in range(stream.num_shards)]
        lengths = np.concatenate(parts).astype(np.int64)
        # Training shuffles; samples in the order in which they are stored may be sorted.
        order = permutation(len(lengths), 0, "compare-packers")
        yield stream.name, lengths[order[:num_samples]]
