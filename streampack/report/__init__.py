"""What a run will deliver, or has delivered: numbers, tables for a terminal, a page with charts.

In: a dataset, and a state or the statistics of a loader. Out: dicts of plain numbers, tables, or
one HTML file. May import `planned` and every room before it. It plans, and reads lengths but no
tokens. The dataset is not changed.

Cost: planning, about 0.4 us a sample; a page plans about a million pieces of samples.
"""

from __future__ import annotations

from streampack.report.chapters import describe_run
from streampack.report.page import write_report
from streampack.report.simulate import simulate
from streampack.report.stats import stats_table

__all__ = ["describe_run", "simulate", "stats_table", "write_report"]
