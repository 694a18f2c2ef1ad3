"""``streampack compare-packers``: every packer on the same lengths, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from streampack._checks import check_choice
from streampack.cli.console import output_console
from streampack.cli.inspect import lengths_of, open_path
from streampack.cli.verbs import ComparePackers
from streampack.report import (
    KINDS,
    packer_markdown,
    packer_result,
    packer_table,
    packings_to_compare,
    synthetic_lengths,
)
from streampack.rng import permutation
from streampack.streams import TokenStream
from streampack.types import Int64Array


def run(options: ComparePackers) -> None:
    """Pack lengths with every packer, and print the results."""
    streams = [open_path(path, options) for path in options.stream or []]
    console = output_console()
    compared = {}
    for title, lengths in _all_lengths(options.samples, streams, options.kind):
        for size in options.max_seq_len or [8192]:
            results = [
                packer_result(name, lengths, packing)
                for name, packing in packings_to_compare(size).items()
            ]
            compared[f"{title} {size:,}"] = results
            if not options.markdown:
                console.print(packer_table(f"{title}, packs of {size:,}", results))
    if options.markdown:
        console.out(packer_markdown(compared), highlight=False)


def _all_lengths(
    num_samples: int, streams: Sequence[TokenStream], kinds: Sequence[str] | None
) -> Iterator[tuple[str, Int64Array]]:
    for kind in kinds or ([] if streams else KINDS):
        check_choice("kind", kind, KINDS)
        yield kind, synthetic_lengths(kind, num_samples)
    for stream in streams:
        lengths = lengths_of(stream, stream.num_shards)
        # Shuffled, as in training: in stored order, lengths may be sorted.
        order = permutation(len(lengths), 0, "compare-packers")
        yield stream.name, lengths[order[:num_samples]]
