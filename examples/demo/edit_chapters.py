"""A run that changes: read in two chapters, killed, edited, resumed and compared.

::

    python examples/demo/edit_chapters.py       writes to demo-output

    1 write     the demo's streams
    2 read      two chapters, in a process that is killed in the second
    3 edit      the YAML: the second chapter ends later, and a third one follows; then resume
    4 compare   every batch with those of a run of the edited YAML that never stopped
"""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from train import BatchReport, check_same_batches, report_steps, report_until, send

from streampack import PackedDataLoader
from streampack.cli.build import build_dataset, build_streams
from streampack.cli.config import RunConfig, read_config
from streampack.cli.demo.prepare import demo_config
from streampack.cli.demo.show import write_streams
from streampack.errors import StreampackError
from streampack.streams import open_stream

OUT = Path("demo-output")
SAVE_EVERY = 3  # inside global batches of four, too
BATCH_SIZE, GLOBAL_BATCH_SIZE = 4, 16
KILL_AFTER = 46  # of 4 x 16 batches: in the second chapter, inside a global batch

WRITTEN: list[dict[str, Any]] = [
    {"weights": {"code": 0.25, "manuals": 0.20, "docstrings": 0.55}, "steps": 8},
    {"weights": {"code": 0.60, "docstrings": 0.40}, "steps": 8},
]
EDITED: list[dict[str, Any]] = [
    WRITTEN[0],
    WRITTEN[1] | {"steps": 12},
    {"weights": {"manuals": {"start": 0.2, "stop": 0.8}, "code": {"start": 0.8, "stop": 0.2}}}
    | {"steps": 8},
]


def change(described: RunConfig, out: Path, console: Console) -> None:
    """Read, kill, edit, resume and compare a run of chapters over the demo's streams.

    A StreampackError says that a batch differs from the unbroken run's, or that a sample was used
    again before all others of its stream were. YAML, state and log are written to `out`.
    """
    config, state, log = out / "chapters.yaml", out / "chapters.pt", out / "chapters.log"
    for file in (state, log):
        file.unlink(missing_ok=True)
    command = [sys.executable, __file__, str(config), str(state)]
    console.rule("2  read in two chapters, killed in the second", align="left")
    write_chapters(described, WRITTEN, config)
    with console.status("reading"):
        before, code = report_until(KILL_AFTER, command, log)
    console.print(
        f"process 1 read batches 1-{before[-1]['step']}, then was killed: "
        f"{signal.Signals(-code).name}\n"
    )
    console.rule("3  the YAML edited, the run resumed", align="left")
    write_chapters(described, EDITED, config)
    console.print(yaml.safe_dump({"chapters": EDITED}, default_flow_style=None, sort_keys=False))
    with console.status("reading on"):
        after, _ = report_until(None, command, log)
    console.print(
        f"process 2 resumed after batch {after[0]['step'] - 1}, read batches {after[0]['step']}-"
        f"{after[-1]['step']}\n"
    )
    console.rule("4  compared with a run that never stopped", align="left")
    unbroken = list(read(config))
    console.print(share_table(unbroken, EDITED))
    check_runs(unbroken, before, after)
    opened = [open_stream(stream, n) for n, stream in enumerate(build_streams(described))]
    samples = {stream.name: stream.num_samples for stream in opened}
    console.print(use_table(unbroken, samples))
    console.print(
        f"[green]all {len(before)} + {len(after)} batches are, bit for bit, those of a run of the "
        "edited chapters that never stopped[/]"
    )


def write_chapters(described: RunConfig, chapters: list[dict[str, Any]], config: Path) -> None:
    """Write the YAML of a run of chapters over the demo's streams."""
    run = {
        "streams": [{"name": s.name, "local": s.local} for s in described.streams],
        "packing": {"max_seq_len": described.packing.max_seq_len, "eos_id": 0},
        "mixing": {
            "batching_method": "stratified",
            "weight_unit": "tokens",
            "global_batch_size": GLOBAL_BATCH_SIZE,
        },
        "order": {"seed": described.order.seed, "num_lanes": 1},
        "batch_size": BATCH_SIZE,
        "chapters": chapters,
    }
    config.write_text(yaml.safe_dump(run, sort_keys=False), encoding="utf-8")


def share_table(reports: list[BatchReport], chapters: list[dict[str, Any]]) -> Table:
    """Return a table of the tokens of each chapter, with delivered shares and those asked for."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("chapter", "batches", "stream", "asked", "delivered"):
        table.add_column(name, justify="left" if name == "stream" else "right")
    for number, chapter in enumerate(chapters):
        own = [report for report in reports if report["chapter"] == number]
        tokens: Counter[str] = Counter()
        for report in own:
            tokens.update(report["tokens"])
        head = [str(number), str(len(own))]
        for name, weight in chapter["weights"].items():
            asked = weight if isinstance(weight, float) else (weight["start"] + weight["stop"]) / 2
            share = tokens[name] / tokens.total()
            table.add_row(*head, name, f"{asked:.1%}", f"{share:.1%}")
            head = ["", ""]
        table.add_section()
    return table


def use_table(reports: list[BatchReport], num_samples: Mapping[str, int]) -> Table:
    """Return a table of how often samples were used, each no more than once above the others."""
    uses = Counter((name, sample) for report in reports for name, sample in report["begun"])
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("stream", "samples", "used", "most uses of one"):
        table.add_column(name, justify="left" if name == "stream" else "right")
    for stream, num in num_samples.items():
        own = [count for (name, _), count in uses.items() if name == stream]
        most, least = max(own), min(own) if len(own) == num else 0
        if most > least + 1:
            raise StreampackError(
                f"a sample of {stream!r} was used {most} times, but another {least} times"
            )
        table.add_row(stream, f"{num:,}", f"{len(own):,}", str(most))
    return table


def check_runs(
    unbroken: list[BatchReport], before: list[BatchReport], after: list[BatchReport]
) -> None:
    """Check that both processes read the batches of the unbroken run, and skipped none."""
    check_same_batches([report["batch"] for report in unbroken], [*before, *after])
    if after[-1]["step"] != len(unbroken) or after[0]["step"] > len(before) + 1:
        raise StreampackError(
            f"batches {after[0]['step']}-{after[-1]['step']} were read after the resume, and the "
            f"unbroken run has {len(unbroken)}"
        )


def read(config: Path, checkpoint: Path | None = None) -> Iterator[BatchReport]:
    """Read the batches after a checkpoint, if there is one, and save; yield their reports."""
    dataset = build_dataset(read_config(config), config)
    loader, names = PackedDataLoader(dataset), dataset.stream_names

    def _count(batch: Mapping[str, Any]) -> BatchReport:
        tokens: Counter[str] = Counter()
        begun = []
        for _, stream, _, sample, start, length in batch["segments"].tolist():
            tokens[names[stream]] += length
            if start == 0:
                begun.append([names[stream], sample])
        return {"chapter": batch["epoch"], "tokens": tokens, "begun": begun}

    return report_steps(loader, _count, {"loader": loader}, checkpoint, SAVE_EVERY)


def main() -> None:
    """Write the streams and change a run; in the process that is killed, read the run."""
    if len(sys.argv) == 3:
        send(read(Path(sys.argv[1]), Path(sys.argv[2])))
        return
    console = Console(highlight=False)
    described = read_config(demo_config(OUT))
    console.rule("1  real text, written as streams", align="left")
    write_streams(described, OUT, console)
    change(described, OUT, console)


if __name__ == "__main__":
    main()
