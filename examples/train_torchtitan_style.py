"""Train a tiny decoder on packed batches in a loop like torchtitan's trainer.

::

    python examples/train_torchtitan_style.py                    30 steps, made-up data
    python examples/train_torchtitan_style.py --steps 60         resumes from the last checkpoint
    python examples/train_torchtitan_style.py --flat             all packs of a batch in one line

    batch    ({input, positions}, labels)               batch_format="torchtitan"
    step     global_valid_tokens                        targets of all micro-batches
             masks = model.get_attention_masks(positions)
             model(input, positions=..., attention_masks=masks)
             loss = sum of losses / global_valid_tokens

The model has the signature of torchtitan's `Decoder` and makes its mask the same way: a document
begins wherever a position is 0. It uses SDPA, because FlexAttention has no backward pass on a CPU.

Cost: 15 to 25 ms per step on one core.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from streampack import (
    Mixing,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
)
from streampack.write import write_stream

VOCABULARY = 256
MAX_SEQ_LEN = 128
BATCH_SIZE = 4  # packs in a micro-batch
GLOBAL_BATCH_SIZE = 8  # packs in an optimizer step
IGNORED = -100  # the label of a token that is not a target


class Decoder(nn.Module):
    """One layer of attention and feed-forward, called as torchtitan's `Decoder`.

    With flat batches, shapes (B, S) become (T,), and no tensor has a batch axis.
    """

    def __init__(self, dim: int = 32, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Embedding(MAX_SEQ_LEN, dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.attended = nn.Linear(dim, dim)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )
        self.logits = nn.Linear(dim, VOCABULARY)

    def get_attention_masks(self, positions: Tensor) -> Tensor:
        """Return which query sees which key, bool, shape (B, 1, S, S)."""
        documents = (positions == 0).cumsum(-1)  # (B, S)
        same = documents[..., :, None] == documents[..., None, :]  # (B, S, S)
        return same.tril()[..., None, :, :]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_masks: Tensor | None = None,
    ) -> Tensor:
        """Return logits, shape (B, S, vocabulary)."""
        if positions is None or attention_masks is None:
            raise ValueError("packs need positions= and attention_masks=")
        hidden = self.embedding(tokens) + self.positions(positions)  # (B, S, dim)
        heads = self.query_key_value(hidden).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.transpose(-4, -2).unbind(-3)  # (B, heads, S, dim of a head)
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_masks)
        hidden = hidden + self.attended(seen.transpose(-3, -2).flatten(-2))
        return self.logits(hidden + self.feed_forward(hidden))


def make_up_data(folder: Path) -> list[Path]:
    """Write two small streams of random tokens, unless they exist."""
    rng = np.random.default_rng(0)
    paths = [folder / "long", folder / "short"]
    for path, longest in zip(paths, (150, 30), strict=True):
        samples = [rng.integers(1, VOCABULARY, n) for n in rng.integers(2, longest, 100)]
        if not path.exists():
            write_stream(samples, path)
    return paths


def make_loader(out: Path, batch_format: str) -> PackedDataLoader:
    """Return a loader over the made-up streams."""
    dataset = PackedStreamingDataset(
        streams=[Stream(local=str(path)) for path in make_up_data(out / "data")],
        packing=Packing(max_seq_len=MAX_SEQ_LEN),
        # An epoch is a whole number of optimizer steps; with more ranks, each one accumulates less.
        mixing=Mixing(global_batch_size=GLOBAL_BATCH_SIZE),
        batch_size=BATCH_SIZE,
        batch_format=batch_format,
    )
    return PackedDataLoader(dataset)


def epoch_after_epoch(loader: PackedDataLoader) -> Iterator[Any]:
    """Yield batches endlessly; each iteration over the loader is the next epoch."""
    while True:
        yield from loader


def train_step(model: Decoder, optimizer: Any, batches: Iterator[Any]) -> float:
    """Train on one global batch; return its mean loss over all targets."""
    micro_batches = list(islice(batches, GLOBAL_BATCH_SIZE // BATCH_SIZE))
    # On several ranks this is summed over them, and so are the gradients.
    global_valid_tokens = sum(int((labels != IGNORED).sum()) for _, labels in micro_batches)
    total = 0.0
    for input_dict, labels in micro_batches:
        extra = {key: value for key, value in input_dict.items() if key != "input"}
        extra["attention_masks"] = model.get_attention_masks(positions=extra["positions"])
        logits = model(input_dict["input"], **extra)
        losses = functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss = losses / global_valid_tokens
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return total


def save(path: Path, parts: dict[str, Any], step: int) -> None:
    """Write a checkpoint so that the old or the new one is complete whenever the process dies."""
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"step": step, **states}, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def load(path: Path, parts: dict[str, Any]) -> int:
    """Load the checkpoint into all parts; return its number of steps."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return int(saved["step"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, resuming from the last checkpoint if there is one."""
    parser = argparse.ArgumentParser(description="Train on packs; resume if started again.")
    parser.add_argument("--out", type=Path, default=Path("train-output/torchtitan_style"))
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps in all")
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--flat", action="store_true", help="a batch is one line of tokens")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = make_loader(args.out, "torchtitan_flat" if args.flat else "torchtitan")
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoint = args.out / "checkpoint.pt"
    step = load(checkpoint, parts)
    batches = epoch_after_epoch(loader)
    while step < args.steps:
        loss = train_step(model, optimizer, batches)
        step += 1
        epoch = loader.state_dict()["epoch"]
        print(f"epoch {epoch} step {step} loss {loss:.4f}", flush=True)
        if step % args.save_every == 0:
            save(checkpoint, parts, step)


if __name__ == "__main__":
    main()
