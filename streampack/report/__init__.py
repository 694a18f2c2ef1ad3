"""Reports on past and planned runs: tables for a terminal, pictures, and a page."""

from __future__ import annotations

from streampack.report.chapters import describe_run
from streampack.report.charts import plot_run
from streampack.report.page import write_report
from streampack.report.simulate import simulate
from streampack.report.stats import stats_table

__all__ = ["describe_run", "plot_run", "simulate", "stats_table", "write_report"]
