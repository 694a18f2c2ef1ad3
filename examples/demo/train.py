"""The demo's processes: they use batches, report each step, and save a checkpoint.

::

    checkpoint.pt --> model, optimizer, loader      if there is one
    batch --> loss --> step                         one line of JSON per step, for the parent
          '-> every few steps: checkpoint.pt        written under another name, then renamed

Started by kill_and_resume.py as ``python train.py CONFIG CHECKPOINT STEPS``.

Cost: about a second per step of 2 x 2,048 tokens on two cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from model import SmallDecoder, next_token_loss

from streampack import PackedDataLoader
from streampack._paths import replaced
from streampack.cli.build import build_dataset
from streampack.cli.config import read_config
from streampack.cli.demo.prepare import VOCABULARY
from streampack.errors import StreampackError

SAVE_EVERY = 4
LEARNING_RATE = 3e-3

BatchReport = dict[str, Any]
"""What a process says about a step: its number and its batch's digest, and more."""


def batch_digest(batch: Mapping[str, Any]) -> str:
    """Return a digest of all tensors and numbers of a batch.

    >>> one = {"tokens": torch.tensor([1, 2]), "epoch": 0}
    >>> batch_digest(one) == batch_digest({**one, "epoch": 1})
    False
    """
    digest = blake2b(digest_size=8)
    for name in sorted(batch):
        value = batch[name]
        content = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value)
        digest.update(f"{name} ".encode())
        digest.update(content if isinstance(content, bytes) else content.encode())
    return digest.hexdigest()


def train(config: Path, checkpoint: Path, num_steps: int) -> Iterator[BatchReport]:
    """Train to step `num_steps`, from the checkpoint if there is one; yield a report per step."""
    described = read_config(config)
    torch.manual_seed(described.order.seed)
    model = SmallDecoder(VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    dataset = build_dataset(described, config)
    loader = PackedDataLoader(dataset, num_workers=described.num_workers)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}

    def _learn(batch: Mapping[str, Any]) -> BatchReport:
        logits = model(batch["tokens"], batch["input_pos"], batch["document_ids"])
        loss = next_token_loss(logits, batch["labels"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return {"loss": round(loss.item(), 3)}

    return report_steps(endless(loader), _learn, parts, checkpoint, SAVE_EVERY, num_steps)


def report_steps(
    batches: Iterable[Any],
    use: Callable[[Mapping[str, Any]], BatchReport],
    parts: Mapping[str, Any],
    checkpoint: Path | None,
    save_every: int,
    num_steps: int | None = None,
) -> Iterator[BatchReport]:
    """Use batches, from the checkpoint on if there is one; yield a report per step, then save.

    No checkpoint is therefore ahead of what the parent process was told. None: nothing is saved.
    """
    step = 0 if checkpoint is None else load(checkpoint, parts)
    begin = time.perf_counter()
    for batch in islice(batches, None if num_steps is None else num_steps - step):
        step += 1
        waited_s, begin = time.perf_counter() - begin, time.perf_counter()
        report = {"step": step, "batch": batch_digest(batch), "waited_s": waited_s, **use(batch)}
        yield report | {"used_s": time.perf_counter() - begin}
        if checkpoint is not None and step % save_every == 0:
            save(checkpoint, parts, step)
        begin = time.perf_counter()


def endless(loader: PackedDataLoader) -> Iterator[Any]:
    """Yield the loader's batches, epoch after epoch."""
    while True:
        yield from loader


def save(checkpoint: Path, parts: Mapping[str, Any], step: int) -> None:
    """Replace the checkpoint atomically, so that a crash leaves either the old or the new one."""
    states = {name: part.state_dict() for name, part in parts.items()}
    with replaced(checkpoint) as written:
        torch.save({"step": step, **states}, written)


def load(checkpoint: Path, parts: Mapping[str, Any]) -> int:
    """Load the checkpoint into every part; return the number of steps done by then."""
    if not checkpoint.exists():
        return 0
    saved = torch.load(checkpoint, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return int(saved["step"])


def report_until(
    kill_after: int | None,
    command: Sequence[str],
    log: Path,
    show: Callable[[BatchReport], None] = lambda _: None,
) -> tuple[list[BatchReport], int]:
    """Start a process and show its reports; kill it with SIGKILL after a step.

    Return the reports, those made before the signal arrived included, and the exit code: minus the
    signal's number if a signal ended it. A process that fails by itself is a StreampackError.
    """
    reports: list[BatchReport] = []
    is_killed = False
    with (
        log.open("a", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        for line in process.stdout or ():
            if not line.endswith("\n"):
                break  # killed in the middle of a report
            reports.append(json.loads(line))
            show(reports[-1])
            # Reports that were already on their way are read too.
            if reports[-1]["step"] == kill_after:
                process.kill()
                is_killed = True
    if process.returncode and not is_killed:
        raise StreampackError(
            f"the process ended with exit code {process.returncode} after {len(reports)} steps; "
            f"{log} says why"
        )
    return reports, process.returncode


def send(reports: Iterable[BatchReport]) -> None:
    """Write each report to the parent process as soon as it is made."""
    for report in reports:
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()


def check_same_batches(unbroken: Sequence[str], reports: Iterable[BatchReport]) -> None:
    """Raise a StreampackError if a report's batch is not that of the unbroken run, by digest."""
    differing = [one["step"] for one in reports if one["batch"] != unbroken[one["step"] - 1]]
    if differing:
        raise StreampackError(f"batches of steps {differing} differ from the unbroken run's")


if __name__ == "__main__":
    send(train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
