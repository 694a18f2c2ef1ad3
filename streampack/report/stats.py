"""A run's statistics as a table: target and actual share of each stream.

::

    stream       samples   of all     tokens   of all   target
    code              61    3.1 %     74,112   34.9 %   35.0 %
    docstrings     1,702   86.4 %     85,010   40.1 %   40.0 %
    fill 99.98 %  ·  104 packs  ·  212,971 tokens  ·  1,201,333 tokens/s

`target` is the share that the weights ask for, in `weight_unit`. It and the column to compare it
with are bold.

Cost: negligible; it formats one dict of `loader.stats()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from streampack.report.bars import colour

CUTS = ("split", "truncated", "dropped")
NUMBERS = ("samples", "of samples", "tokens", "of tokens", "target")


def stats_view(
    stats: Mapping[str, Any], *, weight_unit: str = "samples", seconds: float | None = None
) -> Group:
    """Return a run's table and summary lines for a terminal."""
    return Group(stats_table(stats, weight_unit=weight_unit), stats_summary(stats, seconds))


def stats_table(stats: Mapping[str, Any], *, weight_unit: str = "samples") -> Table:
    """Return a loader's delivery statistics as a table, with a row for each stream.

    Args:
        stats: The result of ``loader.stats()``.
        weight_unit: The unit of the targets, samples or tokens.
    """
    streams = stats["streams"]
    # Only a simulation has the streams' sizes.
    has_repeats = all("repeats" in stream for stream in streams.values())
    # Columns of zeros are left out.
    cuts = [cut for cut in CUTS if any(stream[cut] for stream in streams.values())]
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("stream")
    for name in (*NUMBERS, *(["repeats"] if has_repeats else []), *cuts):
        compared = name in {"target", f"of {weight_unit}"}
        table.add_column(name, justify="right", style="bold" if compared else "")
    for number, (name, stream) in enumerate(streams.items()):
        shares = [_percent(stream[key]) for key in ("share_samples", "share_tokens", "target")]
        table.add_row(
            Text(name, style=colour(number)),
            f"{stream['samples']:,}",
            shares[0],
            f"{stream['tokens']:,}",
            *shares[1:],
            *([f"{stream['repeats']:.2f}"] if has_repeats else []),
            *(f"{stream[cut]:,}" for cut in cuts),
        )
    for column in table.columns[1:]:
        # In a narrow terminal, cut names and wrap headers, but never truncate a number.
        words = (*str(column.header).split(), *map(str, column.cells))
        column.min_width = max(map(len, words), default=0)
    return table


def stats_summary(stats: Mapping[str, Any], seconds: float | None = None) -> Text:
    """Return the totals over all streams: fill, amounts, speed, high water of the buffers.

    Args:
        stats: The result of ``loader.stats()``.
        seconds: Elapsed time, for tokens per second; None leaves the speed out.
    """
    facts = _facts(stats, f"{stats['tokens'] / seconds:,.0f} tokens/s" if seconds else None)
    marks = [f"{value:,} {name}" for name, value in stats["buffers"].items() if value is not None]
    return Text(facts + "\nmost buffered: " + ", ".join(marks))


def simulation_view(numbers: Mapping[str, Any], *, weight_unit: str = "samples") -> Group:
    """Return a simulation's table and summary lines for a terminal.

    Args:
        numbers: The result of `simulate`.
        weight_unit: The unit of the targets, samples or tokens.
    """
    packs = f"{numbers['batch_size']:,} packs"
    if numbers["ranks"] > 1:
        packs = f"{numbers['ranks']:,} x {packs}"
    steps = (
        f"{numbers['epochs']:,} epoch{'s' if numbers['epochs'] > 1 else ''}",
        f"{numbers['steps']:,} steps of {packs}",
        f"{numbers['global_batches']:,} global batches of {numbers['global_batch_size']:,}",
        f"{numbers['padding_packs']:,} packs of padding",
        f"{numbers['padding_tokens']:,} tokens of padding in all",
    )
    digest = f"\ndigest {numbers['digest']}" if "digest" in numbers else ""
    lines = Text(f"{_facts(numbers)}\n{' · '.join(steps)}{digest}")
    return Group(stats_table(numbers, weight_unit=weight_unit), lines)


def _facts(stats: Mapping[str, Any], speed: str | None = None) -> str:
    """Return fill and amounts on one line."""
    facts = [
        f"fill {100 * stats['fill']:.2f} %",
        f"{stats['packs']:,} packs",
        f"{stats['tokens']:,} tokens",
        *([speed] if speed else []),
    ]
    if stats["substituted"]:
        facts.append(f"{stats['substituted']:,} packs of another stream, as one had run out")
    return " · ".join(facts)


def _percent(share: float) -> str:
    """Return a share as text.

    >>> _percent(0.35)
    '35.0 %'
    """
    return f"{100 * share:.1f} %"
