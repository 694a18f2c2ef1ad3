"""Iterate the loader without a model: the implementation of ``streampack run``.

::

    config --> dataset --> loader --> batches, counted and discarded
                                '---> loader.stats() --> a table, a few times a second

Cost: that of the loader; the table takes about a hundredth of one core.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from streampack.cli.build import build_dataset
from streampack.cli.config import read_config
from streampack.loader.loader import PackedDataLoader
from streampack.report import stats_view

REDRAW_S = 0.25


def take_batches(config: Path, steps: int | None, workers: int | None, as_json: bool) -> None:
    """Iterate over the batches of a config, and print their statistics.

    Args:
        config: The run's YAML.
        steps: Batches to take; None: one epoch.
        workers: Reading processes; None: the config's number.
        as_json: Print one JSON line instead of a table.

    Raises:
        ConfigError: If the config is invalid.
        DataError: If a stream is invalid.
    """
    described = read_config(config)
    num_workers = described.num_workers if workers is None else workers
    loader = PackedDataLoader(build_dataset(described, config), num_workers=num_workers)
    unit = described.mixing.weight_unit
    if as_json:
        seconds, num_steps = _take(_batches(loader, steps), None)
        record = _record(config, num_steps, seconds, loader.stats())
        sys.stdout.write(json.dumps(record) + "\n")
        return
    with Live(console=Console(), auto_refresh=False) as live:

        def redraw(seconds: float) -> None:
            view = stats_view(loader.stats(), weight_unit=unit, seconds=seconds)
            live.update(view, refresh=True)

        seconds, _ = _take(_batches(loader, steps), redraw)
        redraw(seconds)


def _batches(loader: PackedDataLoader, steps: int | None) -> Iterator[Any]:
    """Yield the batches of one epoch, or `steps` batches over several epochs."""
    if steps is None:
        yield from loader
        return
    taken = 0
    while taken < steps:
        for _ in islice(loader, steps - taken):
            taken += 1
            yield None


def _take(batches: Iterator[Any], redraw: Any) -> tuple[float, int]:
    """Take all batches; return the elapsed seconds and the number of batches."""
    begin = drawn = time.perf_counter()
    num_steps = 0
    for _ in batches:
        num_steps += 1
        now = time.perf_counter()
        if redraw is not None and now - drawn > REDRAW_S:
            redraw(now - begin)
            drawn = now
    return time.perf_counter() - begin, num_steps


def _record(config: Path, num_steps: int, seconds: float, stats: dict[str, Any]) -> dict[str, Any]:
    """Return a run's statistics for the JSON line."""
    return {
        "config": str(config),
        "steps": num_steps,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(stats["tokens"] / seconds),
        **stats,
    }
