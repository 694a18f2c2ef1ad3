"""Real text, a small model, a crash and an exact resume: the code behind ``streampack demo``.

::

    1 write     three texts of this machine --> streams
    2 look      the first packs, in the terminal
    3 train     in a subprocess, which is killed half-way
    4 resume    in a new process, from the last checkpoint
    5 compare   every batch with those of a run that never stopped
    6 report    the run as one HTML file

Cost: about a minute on two cores.
"""

from __future__ import annotations

import shutil
import signal
import sys
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from streampack._extras import import_extra
from streampack._paths import local_path
from streampack.cli.build import build_dataset, build_streams
from streampack.cli.config import RunConfig, read_config
from streampack.cli.demo.chapters import change
from streampack.cli.demo.prepare import SOURCES, train_tokenizer, write_text
from streampack.cli.demo.train import (
    SAVE_EVERY,
    BatchReport,
    batch_digest,
    check_same_batches,
    endless,
    report_until,
)
from streampack.cli.inspect import lengths_of
from streampack.cli.verbs import Demo
from streampack.cli.write import write_with_progress
from streampack.errors import ConfigError
from streampack.loader.loader import PackedDataLoader
from streampack.report import write_report
from streampack.report.bars import Bar, bars_of, legend, pack_lines
from streampack.report.lengths import length_quantiles
from streampack.report.stats import stats_view
from streampack.streams import open_mds
from streampack.write import RowFormat, WriteOptions

TRAINING = [sys.executable, "-m", "streampack.cli.demo.train"]
CONFIG = "demo.yaml"
PACKS_PRINTED = 12
BAR_WIDTH = 96
MARGIN = 16  # columns next to a bar, for the number of its segments


def run_demo(options: Demo) -> None:
    """Write, look, train, kill, resume and compare; or read a run of chapters that changes."""
    if not options.chapters:
        import_extra("matplotlib", "plots", "the demo's report", "run the demo with --chapters")
    out, steps = local_path(options.out, "out"), options.steps
    out.mkdir(parents=True, exist_ok=True)
    config = options.config or Path(shutil.copy(Path(__file__).with_name(CONFIG), out / CONFIG))
    console = Console(highlight=False)
    described = read_config(config)
    console.rule("1  real text, written as streams", align="left")
    write_streams(described, out, console)
    if options.chapters:
        change(described, out, console)
        return
    console.rule("2  mixed and packed", align="left")
    unbroken, stats = look(config, steps, console)
    console.rule("3  trained, killed, resumed", align="left")
    before, after = crash_and_resume(config, out, steps, console)
    show_comparison(unbroken, before, after, console)
    reports = [*before, *after]
    times = {
        "training": sum(each["used_s"] for each in reports),
        "waiting for a batch, starts included": sum(each["waited_s"] for each in reports),
    }
    dataset, page = build_dataset(described, config), out / "report.html"
    write_report(dataset, page, title="streampack demo", stats=stats, times=times)
    console.print(f"a report of the run, for a browser: {page}")


def write_streams(described: RunConfig, out: Path, console: Console) -> None:
    """Write the missing streams, and print their sizes."""
    folders = {stream.name: local_path(stream.local or "", "local") for stream in described.streams}
    if set(folders) != set(SOURCES):
        raise ConfigError(
            f"streams {sorted(map(str, folders))} are not the demo's; name them {sorted(SOURCES)}"
        )
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
        stream = open_mds(written, number)
        lengths = lengths_of(stream, stream.num_shards)
        quantiles = length_quantiles(lengths)
        numbers = (len(lengths), lengths.sum(), *(quantiles[q] for q in ("median", "p95", "most")))
        table.add_row(stream.name, *(f"{value:,.0f}" for value in numbers))
    return table


def look(config: Path, num_steps: int, console: Console) -> tuple[list[str], dict[str, Any]]:
    """Take the batches of an uninterrupted run; draw its first packs, return digests and stats."""
    described = read_config(config)
    dataset = build_dataset(described, config)
    # No workers, unlike the training: the batches do not depend on their number.
    loader = PackedDataLoader(dataset, num_workers=0)
    digests: list[str] = []
    bars: list[Bar] = []
    for batch in islice(endless(loader), max(num_steps, len(dataset))):
        digests.append(batch_digest(batch))
        bars += bars_of(batch["segments"].numpy())
    width = min(BAR_WIDTH, console.width - MARGIN)
    console.print(pack_lines(bars[:PACKS_PRINTED], described.packing.row_tokens, width))
    console.print(legend(dataset.stream_names))
    stats = loader.stats()
    console.print(stats_view(stats, weight_unit=described.mixing.weight_unit))
    return digests, stats


def crash_and_resume(
    config: Path, out: Path, num_steps: int, console: Console
) -> tuple[list[BatchReport], list[BatchReport]]:
    """Train, kill after half of the steps, and resume; return the reports of both processes.

    ::

        process 1    step 1 ... 12 [saved] 13 14 15  SIGKILL
        process 2                  '-----> 13 14 15 16 ... 30
    """
    checkpoint, log = out / "checkpoint.pt", out / "training.log"
    checkpoint.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    command = [*TRAINING, str(config), str(checkpoint), str(num_steps)]
    with console.status("starting a training process") as status:

        def _show(report: BatchReport) -> None:
            status.update(f"step {report['step']} of {num_steps}, loss {report['loss']:.3f}")

        before, code = report_until(num_steps // 2, command, log, _show)
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        console.print(
            f"process 1 trained steps 1-{before[-1]['step']}, {_losses(before)}, "
            f"then was killed: {name}"
        )
        status.update("starting another process")
        after, _ = report_until(None, command, log, _show)
    console.print(
        f"process 2 resumed at step {after[0]['step'] - 1}, trained steps {after[0]['step']}-"
        f"{after[-1]['step']}, {_losses(after)}"
    )
    return before, after


def _losses(reports: list[BatchReport]) -> str:
    """Return the loss at both ends of a run, each a mean over a few steps to reduce noise."""
    losses = [report["loss"] for report in reports]
    return f"loss {fmean(losses[:SAVE_EVERY]):.2f} -> {fmean(losses[-SAVE_EVERY:]):.2f}"


def show_comparison(
    unbroken: list[str], before: list[BatchReport], after: list[BatchReport], console: Console
) -> None:
    """Print the batches around the crash next to those of the unbroken run, and check them all."""
    step_column = Column("step", justify="right")
    table = Table(step_column, "never stopped", "killed", "resumed", box=box.SIMPLE_HEAD)
    killed = {report["step"]: report["batch"] for report in before}
    resumed = {report["step"]: report["batch"] for report in after}
    crash = before[-1]["step"]
    for step in range(crash - SAVE_EVERY, min(crash + SAVE_EVERY, len(unbroken)) + 1):
        digest = unbroken[step - 1]
        table.add_row(f"{step}", digest, killed.get(step, ""), resumed.get(step, ""))
    console.print(table)
    check_same_batches(unbroken, [*before, *after])
    console.print(
        f"[green]all {len(before)} + {len(after)} batches are, bit for bit, those of a run that "
        "never stopped[/]"
    )
