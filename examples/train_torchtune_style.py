"""Train a tiny decoder on packed batches in a loop like those of torchtune's recipes.

::

    python examples/train_torchtune_style.py                    30 steps, made-up data
    python examples/train_torchtune_style.py --steps 60         resumes from the last checkpoint

    batch    {tokens, labels, input_pos, mask}          batch_format="torchtune"
    step     labels = batch.pop("labels")
             logits = model(**batch)                    so the batch has no other keys
             labels move one to the left                torchtune 0.6: they come unshifted
             gradients / targets of all micro-batches

The model has the signature of torchtune's `TransformerDecoder`. The sampler and epochs of the
recipes are not needed, since the loader shuffles and counts epochs, and its state is in the
checkpoint.

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
    """One layer of attention and feed-forward, called as torchtune's `TransformerDecoder`."""

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

    def forward(
        self, tokens: Tensor, *, mask: Tensor | None = None, input_pos: Tensor | None = None
    ) -> Tensor:
        """Return logits, shape (B, S, vocabulary), for a mask of shape (B, S, S)."""
        if mask is None or input_pos is None:
            raise ValueError("packs need mask= and input_pos=")
        hidden = self.embedding(tokens) + self.positions(input_pos)  # (B, S, dim)
        heads = self.query_key_value(hidden).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.transpose(1, 3).unbind(2)  # (B, heads, S, dim of a head)
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
        hidden = hidden + self.attended(seen.transpose(1, 2).flatten(2))
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


def make_loader(out: Path) -> PackedDataLoader:
    """Return a loader over the made-up streams."""
    dataset = PackedStreamingDataset(
        streams=[Stream(local=str(path)) for path in make_up_data(out / "data")],
        packing=Packing(max_seq_len=MAX_SEQ_LEN),
        # An epoch is a whole number of optimizer steps; with more ranks, each one accumulates less.
        mixing=Mixing(global_batch_size=GLOBAL_BATCH_SIZE),
        batch_size=BATCH_SIZE,
        batch_format="torchtune",
    )
    return PackedDataLoader(dataset)


def epoch_after_epoch(loader: PackedDataLoader) -> Iterator[dict[str, Any]]:
    """Yield batches endlessly; each iteration over the loader is the next epoch."""
    while True:
        yield from loader


def loss_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the sum of the losses of a micro-batch, like `_loss_step` in the recipes."""
    labels = batch.pop("labels")
    logits = model(**batch)
    nothing = labels.new_full((len(labels), 1), IGNORED)
    labels = torch.hstack((labels[:, 1:], nothing))
    # The recipes multiply the mean by the number of targets. But a batch that fills up an epoch may
    # contain nothing but padding; the mean of no losses is NaN, and so is zero times it.
    return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")


def train_step(model: nn.Module, optimizer: Any, micro_batches: Sequence[Any]) -> float:
    """Train on one global batch; return its mean loss over all targets."""
    num_tokens, running_loss = 0, 0.0
    for batch in micro_batches:
        num_tokens += int((batch["labels"] != IGNORED).sum())
        loss = loss_step(model, batch)
        loss.backward()
        running_loss += float(loss.detach())
    # On several ranks: num_tokens is summed over them, and gradients are scaled by ranks / that.
    for parameter in model.parameters():
        parameter.grad /= num_tokens
    optimizer.step()
    optimizer.zero_grad()
    return running_loss / num_tokens


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
    parser.add_argument("--out", type=Path, default=Path("train-output/torchtune_style"))
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps in all")
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = make_loader(args.out)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoint = args.out / "checkpoint.pt"
    step = load(checkpoint, parts)
    batches = epoch_after_epoch(loader)
    while step < args.steps:
        micro_batches = list(islice(batches, GLOBAL_BATCH_SIZE // BATCH_SIZE))
        loss = train_step(model, optimizer, micro_batches)
        step += 1
        epoch = loader.state_dict()["epoch"]
        print(f"epoch {epoch} step {step} loss {loss:.4f}", flush=True)
        if step % args.save_every == 0:
            save(checkpoint, parts, step)


if __name__ == "__main__":
    main()
