"""Reports on past and planned runs: tables for a terminal, and pictures."""

from __future__ import annotations

from streampack.report.bars import Bar, bars_of, colour, legend, pack_lines
from streampack.report.chapters import chapter_table, describe_run
from streampack.report.charts import plot_run
from streampack.report.lengths import histogram_table, length_quantiles
from streampack.report.packers import (
    KINDS,
    PackerResult,
    packer_markdown,
    packer_result,
    packer_table,
    packings_to_compare,
    synthetic_lengths,
)
from streampack.report.page import write_report
from streampack.report.simulate import simulate
from streampack.report.stats import simulation_view, stats_summary, stats_table, stats_view

__all__ = [
    "KINDS",
    "Bar",
    "PackerResult",
    "bars_of",
    "chapter_table",
    "colour",
    "describe_run",
    "histogram_table",
    "legend",
    "length_quantiles",
    "pack_lines",
    "packer_markdown",
    "packer_result",
    "packer_table",
    "packings_to_compare",
    "plot_run",
    "simulate",
    "simulation_view",
    "stats_summary",
    "stats_table",
    "stats_view",
    "synthetic_lengths",
    "write_report",
]
