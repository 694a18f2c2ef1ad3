"""``streampack compare-packers``: every packer on the same lengths, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from streampack._checks import check_choice
from streampack.cli.console import output_console
from streampack.cli.inspect import lengths_of, open_path
from streampack.cli.verbs import ComparePackers
from streampack.report.packers import (
    COLUMNS,
    KINDS,
    packer_result,
    packings_to_compare,
    synthetic_lengths,
)
from streampack.rng import permutation
from streampack.streams import TokenStream
from streampack.types import Int64Array


def run(options: ComparePackers) -> None:
    """Pack lengths with every packer, and print the results."""
    streams = [open_path(path, options) for path in options.stream or []]
    table = Table(box=box.MARKDOWN if options.markdown else box.SIMPLE_HEAD)
    for number, name in enumerate(("lengths", "packer", *COLUMNS)):
        table.add_column(name, justify="left" if number < 2 else "right")
    for title, lengths in _all_lengths(options.samples, streams, options.kind):
        for size in options.max_seq_len or [8192]:
            for name, packing in packings_to_compare(size).items():
                cells = packer_result(lengths, packing).cells
                table.add_row(Text(f"{title} {size:,}"), name, *cells)
            table.add_section()
    output_console().print(table)


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
