"""The demo's model and training: an ordinary loop with a checkpoint that survives SIGKILL.

::

    tokens       (B, S)   input tokens
    input_pos    (B, S)   position of each token in its document
    document_ids (B, S)   document of each token: the mask of attention

    checkpoint.pt --> model, optimizer, loader      if there is one
    batch --> loss --> step                         one line of JSON per step, for the parent
          '-> every few steps: checkpoint.pt        written under another name, then renamed
    one line of JSON --> `report_until`             in the parent, which kills after a step

Started by ``streampack demo`` as ``python -m streampack.cli.demo.train CONFIG CHECKPOINT STEPS``.
The model has about 900,000 weights, over half of them in the token embedding.

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
from torch import Tensor, nn
from torch.nn import functional

from streampack._paths import replaced
from streampack.batch.masks import block_causal_mask
from streampack.cli.build import build_dataset
from streampack.cli.config import read_config
from streampack.cli.demo.prepare import VOCABULARY
from streampack.errors import StreampackError
from streampack.loader.loader import PackedDataLoader
from streampack.types import IGNORED

POSITION_BASE = 10_000.0
SAVE_EVERY = 4
LEARNING_RATE = 3e-3

BatchReport = dict[str, Any]
"""What a process says about a step: its number and its batch's digest, and more."""


class SmallDecoder(nn.Module):
    """A decoder of a few layers that reads packs."""

    speeds: Tensor
    """Frequencies in radians per position, shape (dim / 2,)."""

    def __init__(
        self, vocabulary: int, *, dim: int = 128, num_layers: int = 2, num_heads: int = 2
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.embedding = nn.Embedding(vocabulary, dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        options: dict[str, Any] = {"dropout": 0.0, "norm_first": True, "batch_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, num_heads, 4 * dim, **options)
            for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(dim)
        half = torch.arange(dim // 2)
        self.register_buffer("speeds", POSITION_BASE ** (-2 * half / dim))

    def forward(self, tokens: Tensor, input_pos: Tensor, document_ids: Tensor) -> Tensor:
        angles = input_pos[..., None] * self.speeds  # (B, S, dim / 2)
        places = torch.cat([angles.sin(), angles.cos()], dim=-1)
        hidden = self.embedding(tokens) + 0.02 * places  # as large as an embedding
        seen = block_causal_mask(document_ids)[:, 0]  # (B, S, S)
        unseen = ~seen.repeat_interleave(self.num_heads, dim=0)  # (B * heads, S, S)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=unseen)
        logits: Tensor = self.norm(hidden) @ self.embedding.weight.T
        return logits


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over the targets; labels are already shifted."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def batch_digest(batch: Mapping[str, Any]) -> str:
    """Return a digest of all tensors and numbers of a batch.

    >>> one = {"tokens": torch.tensor([1, 2]), "epoch": 0}
    >>> batch_digest(one) == batch_digest({**one, "epoch": 1})
    False
    """
    digest = blake2b(digest_size=8)
    for name in sorted(batch):
        value = batch[name]
        value = value.tolist() if isinstance(value, Tensor) else value
        digest.update(f"{name} {value!r}".encode())
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
    checkpoint: Path,
    save_every: int,
    num_steps: int | None = None,
) -> Iterator[BatchReport]:
    """Use batches, from the checkpoint on if there is one; yield a report per step, then save.

    No checkpoint is therefore ahead of what the parent process was told.
    """
    step = load(checkpoint, parts)
    begin = time.perf_counter()
    for batch in islice(batches, None if num_steps is None else num_steps - step):
        step += 1
        waited_s, begin = time.perf_counter() - begin, time.perf_counter()
        report = {"step": step, "batch": batch_digest(batch), "waited_s": waited_s, **use(batch)}
        yield report | {"used_s": time.perf_counter() - begin}
        if step % save_every == 0:
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
    """Raise a StreampackError if the digests of batches are not those of the unbroken run."""
    reported = {(report["step"], report["batch"]) for report in reports}
    if differing := sorted(reported ^ set(enumerate(unbroken, 1))):
        raise StreampackError(f"batches differ from the unbroken run's: {differing}")


if __name__ == "__main__":
    send(train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
