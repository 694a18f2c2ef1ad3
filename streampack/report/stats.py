"""A run's statistics as a table: target and actual share of each stream.

::

    stream       samples   of all     tokens   of all   target
    code              61    3.1 %     74,112   34.9 %   35.0 %
    docstrings     1,702   86.4 %     85,010   40.1 %   40.0 %
    fill 99.98 %  ·  104 packs  ·  212,971 tokens  ·  1,201,333 tokens/s

`target` is the share that the weights ask for, in `weight_unit`; in a run of chapters, the mean of
the chapters delivered, and in tokens unless packs mix streams. It and the column to compare it with
are bold.
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
    """Return a run's table and summary for a terminal; `seconds` add a rate."""
    facts = _facts(stats, f"{stats['tokens'] / seconds:,.0f} tokens/s" if seconds else None)
    marks = [f"{value:,} {name}" for name, value in stats["buffers"].items() if value is not None]
    summary = Text(f"{facts}{_tokenizing(stats, seconds)}\nmost buffered: {', '.join(marks)}")
    return Group(stats_table(stats, weight_unit=weight_unit), summary)


def stats_table(stats: Mapping[str, Any], *, weight_unit: str = "samples") -> Table:
    """Return a loader's delivery statistics as a table, with a row for each stream.

    Args:
        stats: The result of ``loader.stats()``.
        weight_unit: The unit of the targets, samples or tokens.
    """
    streams = stats["streams"]
    # Only a simulation has the streams' sizes.
    has_repeats = all("repeats" in stream for stream in streams.values())
    # Columns of zeros are omitted.
    cuts = [cut for cut in CUTS if any(stream[cut] for stream in streams.values())]
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("stream")
    for name in (*NUMBERS, *(["repeats"] if has_repeats else []), *cuts):
        compared = name in {"target", f"of {weight_unit}"}
        table.add_column(name, justify="right", style="bold" if compared else "")
    for number, (name, stream) in enumerate(streams.items()):
        keys = ("share_samples", "share_tokens", "target")
        shares = [f"{100 * stream[key]:.1f} %" for key in keys]
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


def simulation_view(numbers: Mapping[str, Any], *, weight_unit: str = "samples") -> Group:
    """Return the table and summary lines of a result of `simulate`, for a terminal."""
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
    lines = Text(f"{_facts(numbers)}\n{' · '.join(steps)}{_waits(numbers)}{digest}")
    return Group(stats_table(numbers, weight_unit=weight_unit), lines)


def _waits(numbers: Mapping[str, Any]) -> str:
    times = numbers.get("straggler")
    if times is None or numbers["ranks"] == 1:
        return ""
    planned, dealt = f"{times['planned']:.3f}", f"{times['dealt']:.3f}"
    both = f"{dealt} x the ideal with balance, {planned} x without"
    if not times["is_dealt"]:
        both = f"{planned} x the ideal, {dealt} x with balance=Balance()"
    note = f" ({times['note']})" if times["note"] else ""
    return f"\na global batch takes {both}{note}"


def _tokenizing(stats: Mapping[str, Any], seconds: float | None) -> str:
    shards = stats.get("shards", {})
    if not shards.get("tokenized"):
        return ""
    rate = f" ({shards['tokenized'] / seconds:,.1f}/s)" if seconds else ""
    again = f", {shards['tokenized_again']:,} of them again" if shards["tokenized_again"] else ""
    waits = f"waited {shards['waited_s']:,.1f} s for {shards['waited_for']:,} shards"
    waits += f", {shards['waiting']:,} are planned and not here yet"
    return f"\n{shards['tokenized']:,} shards of text tokenized{rate}{again} · {waits}"


def _facts(stats: Mapping[str, Any], speed: str | None = None) -> str:
    facts = [
        f"fill {100 * stats['fill']:.2f} %",
        f"{stats['packs']:,} packs",
        f"{stats['tokens']:,} tokens",
        *([speed] if speed else []),
    ]
    if stats["substituted"]:
        facts.append(f"{stats['substituted']:,} packs of another stream, as one had run out")
    if stats.get("omitted_packs"):
        facts.append(f"{stats['omitted_packs']:,} packs omitted at the end")
    return " · ".join(facts)
