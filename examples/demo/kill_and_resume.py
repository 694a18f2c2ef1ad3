"""Train a small model on the demo's packs, kill it with SIGKILL, resume it, and compare.

::

    python examples/demo/kill_and_resume.py [STEPS]       what `make demo` runs; 30 steps

    1, 2        `streampack demo`: write, look, report
    3 train     in a subprocess, which is killed half-way; resume in a new process
    compare     every batch with those of a run that never stopped

Cost: about a minute on two cores.
"""

from __future__ import annotations

import signal
import sys
from itertools import islice
from pathlib import Path
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Column, Table
from train import (
    SAVE_EVERY,
    BatchReport,
    batch_digest,
    check_same_batches,
    endless,
    report_until,
)

from streampack import PackedDataLoader
from streampack.cli.build import build_dataset
from streampack.cli.config import read_config
from streampack.cli.demo.prepare import demo_config
from streampack.cli.demo.show import run_demo
from streampack.cli.verbs import Demo

OUT = Path("demo-output")
TRAINING = [sys.executable, str(Path(__file__).with_name("train.py"))]


def main() -> None:
    """Run the demo, then train, kill, resume and compare."""
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    run_demo(Demo(out=OUT))
    config, console = demo_config(OUT), Console(highlight=False)
    console.print()
    console.rule("3  trained, killed, resumed", align="left")
    before, after = crash_and_resume(config, OUT, num_steps, console)
    show_comparison(digests(config, num_steps), before, after, console)


def digests(config: Path, num_steps: int) -> list[str]:
    """Return the digests of the batches of a run that never stops, read without workers."""
    loader = PackedDataLoader(build_dataset(read_config(config), config))
    return [batch_digest(batch) for batch in islice(endless(loader), num_steps)]


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


if __name__ == "__main__":
    main()
