"""The demo's training process: an ordinary loop, with a checkpoint that survives SIGKILL.

::

    checkpoint.pt --> model, optimizer, loader      if there is one
    batch --> loss --> step                         one line of JSON per step, for the parent
          '-> every few steps: checkpoint.pt        written under another name, then renamed

Started by ``streampack demo`` as ``python -m streampack.cli.demo.train CONFIG CHECKPOINT STEPS``.

Cost: about a second per step of 2 x 2,048 tokens on two cores.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from streampack.cli.build import build_dataset
from streampack.cli.config import read_config
from streampack.cli.demo.model import Decoder, next_token_loss
from streampack.cli.demo.prepare import VOCABULARY
from streampack.loader.loader import PackedDataLoader

SAVE_EVERY = 4

LEARNING_RATE = 3e-3


def fingerprint(batch: Mapping[str, Any]) -> str:
    """Return a digest of all tensors and numbers of a batch.

    >>> one = {"tokens": torch.tensor([1, 2]), "epoch": 0}
    >>> fingerprint(one) == fingerprint({**one, "epoch": 1})
    False
    """
    digest = blake2b(digest_size=8)
    for name in sorted(batch):
        value = batch[name]
        content = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value)
        digest.update(f"{name} ".encode())
        digest.update(content if isinstance(content, bytes) else content.encode())
    return digest.hexdigest()


def train(config: Path, checkpoint: Path, num_steps: int) -> Iterator[dict[str, Any]]:
    """Train to step `num_steps`, from the checkpoint if there is one; yield a report per step."""
    described = read_config(config)
    torch.manual_seed(described.order.seed)
    model = Decoder(VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    dataset = build_dataset(described, config)
    loader = PackedDataLoader(dataset, num_workers=described.num_workers)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    step = load(checkpoint, parts)
    batches = endless(loader)
    while step < num_steps:
        batch = next(batches)
        logits = model(batch["tokens"], batch["input_pos"], batch["document_ids"])
        loss = next_token_loss(logits, batch["labels"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step += 1
        if step % SAVE_EVERY == 0:
            save(checkpoint, parts, step)
        yield {"step": step, "loss": round(loss.item(), 3), "batch": fingerprint(batch)}


def endless(loader: PackedDataLoader) -> Iterator[Any]:
    """Yield the loader's batches, epoch after epoch."""
    while True:
        yield from loader


def save(checkpoint: Path, parts: Mapping[str, Any], step: int) -> None:
    """Replace the checkpoint atomically, so that a crash leaves either the old or the new one."""
    written = checkpoint.with_suffix(".new")
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"step": step, **states}, written)
    os.replace(written, checkpoint)


def load(checkpoint: Path, parts: Mapping[str, Any]) -> int:
    """Load the checkpoint into every part; return the number of steps done by then."""
    if not checkpoint.exists():
        return 0
    saved = torch.load(checkpoint, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return int(saved["step"])


if __name__ == "__main__":
    for report in train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])):
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
