"""``streampack run CONFIG``: iterate the loader without a model, with a live table."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain, islice, repeat
from typing import Any

from rich.live import Live

from streampack.cli.build import build_dataset
from streampack.cli.config import read_config
from streampack.cli.console import output_console, print_json
from streampack.cli.verbs import Run
from streampack.loader.loader import PackedDataLoader
from streampack.report.stats import stats_view
from streampack.runtime.resumable import engine_of

REDRAW_S = 0.25


def run_run(options: Run) -> None:
    """Iterate over the batches of a config, and print their statistics."""
    described = read_config(options.config)
    num_workers = described.num_workers if options.num_workers is None else options.num_workers
    dataset = build_dataset(described, options.config)
    loader = PackedDataLoader(dataset, num_workers=num_workers)
    unit = engine_of(dataset).recipe.target_unit
    batches: Iterable[Any] = loader
    if options.steps is not None:
        batches = islice(chain.from_iterable(repeat(loader)), options.steps)
    begin = time.perf_counter()
    if options.as_json:
        num_steps = sum(1 for _ in batches)
        seconds, stats = time.perf_counter() - begin, loader.stats()
        rate = round(stats["tokens"] / seconds)
        facts = {"steps": num_steps, "seconds": round(seconds, 3), "tokens_per_s": rate}
        print_json({"config": str(options.config), **facts, **stats})
        return
    with Live(console=output_console(), auto_refresh=False) as live:

        def _redraw() -> None:
            seconds = time.perf_counter() - begin
            view = stats_view(loader.stats(), weight_unit=unit, seconds=seconds)
            live.update(view, refresh=True)

        drawn = begin
        for _ in batches:
            if time.perf_counter() - drawn > REDRAW_S:
                _redraw()
                drawn = time.perf_counter()
        _redraw()
