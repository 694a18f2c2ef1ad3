"""The table of a run has every number of `stats()` that matters to people, and no empty columns."""

from __future__ import annotations

import copy

import pytest
from rich.console import Console

from streampack.report.stats import stats_view

STREAM = {"split": 0, "truncated": 0, "dropped": 0}
STATS = {
    "streams": {
        "code": {
            **STREAM,
            "samples": 61,
            "tokens": 74_112,
            "share_samples": 0.031,
            "share_tokens": 0.349,
            "target": 0.35,
        },
        "docs": {
            **STREAM,
            "samples": 1902,
            "tokens": 138_249,
            "share_samples": 0.969,
            "share_tokens": 0.651,
            "target": 0.65,
        },
    },
    "packs": 104,
    "tokens": 212_361,
    "fill": 0.99705,
    "substituted": 0,
    "buffers": {"worker_tokens": 65_536, "worker_bytes": 1_234_567, "rank_tokens": 99_000},
}


@pytest.fixture
def show():
    """Render a table for a terminal of 120 columns without colours."""

    def render(*args, **kwargs):
        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(stats_view(*args, **kwargs))
        return captured.get()

    return render


def test_the_lines_below_say_fill_amount_speed_and_the_buffers_high_water(show):
    text = show(STATS, seconds=0.5)

    assert "fill 99.70 % · 104 packs · 212,361 tokens · 424,722 tokens/s" in text
    assert "65,536 worker_tokens, 1,234,567 worker_bytes, 99,000 rank_tokens" in text


def test_what_never_happened_has_no_column_and_what_did_has_one(show):
    assert "truncated" not in show(STATS)

    stats = copy.deepcopy(STATS)
    stats["streams"]["docs"]["truncated"] = 12
    stats["substituted"] = 3
    text = show(stats)

    assert "truncated" in text
    assert "dropped" not in text
    assert [row.split()[-1] for row in text.splitlines() if "docs" in row] == ["12"]
    assert "3 packs of another stream" in text
