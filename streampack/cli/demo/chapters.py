"""A run that changes: the code behind ``streampack demo --chapters``.

::

    1 read      two chapters, in a process that is killed in the second
    2 edit      the YAML: the second chapter ends later, and a third one follows
    3 resume    in a new process, from the saved state
    4 compare   every batch with those of a run of the edited YAML that never stopped
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from streampack.cli.build import build_dataset
from streampack.cli.config import RunConfig, read_config
from streampack.cli.demo.train import (
    BatchReport,
    batch_digest,
    check_same_batches,
    report_steps,
    report_until,
    send,
)
from streampack.loader.loader import PackedDataLoader
from streampack.report.stats import stats_table

READING = [sys.executable, "-m", "streampack.cli.demo.chapters"]
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

    A StreampackError says that a batch differs from the unbroken run's. YAML, state and log are
    written to `out`.
    """
    config, state, log = out / "chapters.yaml", out / "chapters.pt", out / "chapters.log"
    for file in (state, log):
        file.unlink(missing_ok=True)
    command = [*READING, str(config), str(state)]
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
    loader = PackedDataLoader(build_dataset(read_config(config), config))
    check_same_batches([batch_digest(batch) for batch in loader], [*before, *after])
    console.print(stats_table(loader.stats(), weight_unit="tokens"))
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


def read(config: Path, checkpoint: Path) -> Iterator[BatchReport]:
    """Read the batches after a checkpoint, if there is one, and save; yield their reports."""
    loader = PackedDataLoader(build_dataset(read_config(config), config))
    return report_steps(loader, lambda _: {}, {"loader": loader}, checkpoint, SAVE_EVERY)


if __name__ == "__main__":
    send(read(Path(sys.argv[1]), Path(sys.argv[2])))
