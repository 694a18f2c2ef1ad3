"""Real text, written as streams, mixed and packed: the code behind ``streampack demo``.

::

    1 write     three texts of this machine --> streams
    2 look      the first packs, in the terminal
    report      the run as one HTML file

Cost: about half a minute on two cores.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from streampack._extras import import_extra
from streampack._paths import local_path
from streampack.cli.build import build_dataset, build_streams
from streampack.cli.config import RunConfig, read_config
from streampack.cli.demo.prepare import SOURCES, demo_config, train_tokenizer, write_text
from streampack.cli.inspect import lengths_of
from streampack.cli.verbs import Demo
from streampack.cli.write import write_with_progress
from streampack.loader.loader import PackedDataLoader
from streampack.plan.reader import PlanReader
from streampack.report import write_report
from streampack.report.bars import legend, pack_lines
from streampack.report.lengths import length_quantiles
from streampack.report.stats import stats_view
from streampack.runtime.resumable import engine_of
from streampack.streams import open_stream
from streampack.texts import RowFormat
from streampack.types import LENGTH, STREAM
from streampack.write import WriteOptions

PACKS_PRINTED = 12
BAR_WIDTH = 96
MARGIN = 16  # columns next to a bar, for the number of its segments


def run_demo(options: Demo) -> None:
    """Write the streams, show the packs of an epoch, and write its report."""
    import_extra("matplotlib", "plots", "the demo's report", "use `streampack run` on its config")
    out = local_path(options.out, "out")
    config = demo_config(out)
    described = read_config(config)
    console = Console(highlight=False)
    console.rule("1  real text, written as streams", align="left")
    write_streams(described, out, console)
    console.rule("2  mixed and packed", align="left")
    stats = look(config, console)
    dataset, page = build_dataset(described, config), out / "report.html"
    write_report(dataset, page, title="streampack demo", stats=stats)
    console.print(f"a report of the run, for a browser: {page}")


def write_streams(described: RunConfig, out: Path, console: Console) -> None:
    """Write the missing streams, and print their sizes."""
    folders = {
        stream.name: local_path((stream.shards or stream).local or "", "local")
        for stream in described.streams
    }
    tokenizer = out / "tokenizer.json"
    with console.status("reading the text of this machine"):
        texts = {name: write_text(name, out / "text") for name in SOURCES}
    with console.status("training a tokenizer"):
        train_tokenizer(list(texts.values()), tokenizer)
    options = WriteOptions(rows=RowFormat(tokenizer=tokenizer))
    for name, text in texts.items():
        if not (folders[name] / "index.json").exists():
            write_with_progress([text], folders[name], options, console)
    console.print(_stream_table(described))
    console.print(f"streams in {out / 'streams'}, tokenizer in {tokenizer}\n")


def _stream_table(described: RunConfig) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("stream", "samples", "tokens", "median", "p95", "longest"):
        table.add_column(name, justify="left" if name == "stream" else "right")
    for number, written in enumerate(build_streams(described)):
        stream = open_stream(written, number)
        lengths = lengths_of(stream, stream.num_shards)
        quantiles = length_quantiles(lengths)
        numbers = (len(lengths), lengths.sum(), *(quantiles[q] for q in ("median", "p95", "most")))
        table.add_row(stream.name, *(f"{value:,.0f}" for value in numbers))
    return table


def look(config: Path, console: Console) -> dict[str, Any]:
    """Take the batches of an epoch, draw the first packs of its plan, and return its stats."""
    described = read_config(config)
    dataset = build_dataset(described, config)
    loader = PackedDataLoader(dataset, num_workers=0)
    for _ in loader:
        pass
    engine = engine_of(dataset)
    with PlanReader(engine.run) as reader:
        packs = (part.pack(number) for part in reader for number in range(len(part.slots)))
        bars = [pack.segments[:, [STREAM, LENGTH]] for pack in islice(packs, PACKS_PRINTED)]
    width = min(BAR_WIDTH, console.width - MARGIN)
    console.print(pack_lines(bars, described.packing.row_tokens, width))
    console.print(legend(dataset.stream_names))
    stats = loader.stats()
    console.print(stats_view(stats, weight_unit=described.mixing.weight_unit))
    return stats
