"""Train a tiny decoder on packed batches with Lightning's Trainer.

::

    python examples/train_lightning.py                    30 steps on made-up data
    python examples/train_lightning.py --steps 60         resumes from the last checkpoint

    PackedDataLoader --> Trainer.fit --> training_step --> OUT/last.ckpt
            <------- load_state_dict --- PackedData <-- all ranks ---'

`PackedData` fills in the options that the datasets do not set, and saves the state of every rank in
each checkpoint. No matter where Lightning ends an epoch, its next one begins with the next batch.

Cost: 15 to 25 ms per step on one core, after about 10 s of imports.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional

from streampack import (
    PackedStreamingDataset,
    Packing,
    Stream,
    block_causal_mask,
    loss_weights,
)
from streampack.formats import global_units
from streampack.lightning import PackedData
from streampack.write import write_stream

VOCABULARY = 256
MAX_SEQ_LEN = 128
GLOBAL_BATCH_SIZE = 8  # packs in an optimizer step of one rank


class Decoder(LightningModule):
    """One layer: attention within each document of a pack, then a feed-forward network."""

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

    def forward(self, tokens: Tensor, input_pos: Tensor, document_ids: Tensor) -> Tensor:
        """Return logits, shape (B, S, vocabulary)."""
        hidden = self.embedding(tokens) + self.positions(input_pos)  # (B, S, dim)
        heads = self.query_key_value(hidden).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.transpose(1, 3).unbind(2)  # (B, heads, S, dim of a head)
        mask = block_causal_mask(document_ids)  # (B, 1, S, S)
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + self.attended(seen.transpose(1, 2).flatten(2))
        return self.logits(hidden + self.feed_forward(hidden))

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        """Return this rank's part of the mean loss over the targets of all ranks."""
        logits = self(batch["tokens"], batch["input_pos"], batch["document_ids"])
        losses = functional.cross_entropy(
            logits.transpose(1, 2), batch["labels"], reduction="none"
        )  # (B, S), and 0 where the label is -100
        weights = loss_weights(
            batch, units=global_units([batch]), num_ranks=self.trainer.world_size
        )
        loss = (weights * losses).sum()
        whole = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")  # of all ranks
        self.print(f"epoch {batch['epoch']} step {self.global_step + 1} loss {whole:.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer for Lightning."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_up_data(folder: Path) -> list[Path]:
    """Write two small streams of random tokens, unless they exist."""
    rng = np.random.default_rng(0)
    paths = [folder / "long", folder / "short"]
    for path, longest in zip(paths, (150, 30), strict=True):
        samples = [rng.integers(1, VOCABULARY, n) for n in rng.integers(2, longest, 100)]
        if not path.exists():
            write_stream(samples, path)
    return paths


def make_data(out: Path) -> PackedData:
    """Return the DataModule, for streams that one process writes."""
    dataset = PackedStreamingDataset(
        streams=[Stream(local=str(path)) for path in make_up_data(out / "data")],
        packing=Packing(max_seq_len=MAX_SEQ_LEN),
    )
    return PackedData(dataset, batch_size=GLOBAL_BATCH_SIZE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, resuming from the last checkpoint if there is one."""
    parser = argparse.ArgumentParser(description="Train on packs; resume if started again.")
    parser.add_argument("--out", type=Path, default=Path("train-output/lightning"))
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps in all")
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    saving = ModelCheckpoint(
        dirpath=args.out,
        filename="last",
        every_n_train_steps=args.save_every,
        enable_version_counter=False,
    )
    trainer = Trainer(
        max_steps=args.steps,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = args.out / "last.ckpt"
    trainer.fit(
        Decoder(),
        datamodule=make_data(args.out),
        ckpt_path=str(checkpoint) if checkpoint.exists() else None,
    )


if __name__ == "__main__":
    main()
