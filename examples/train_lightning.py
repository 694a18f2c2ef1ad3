"""Train a tiny decoder on packed batches with Lightning's Trainer.

::

    python examples/train_lightning.py                    30 steps on data that it makes up
    python examples/train_lightning.py --steps 60         resumes from the last checkpoint

    PackedDataLoader --> Trainer.fit --> training_step --> OUT/last.ckpt
            <------- load_state_dict --- PackedData <--- state_dict ---'

Lightning saves and loads a loader's state by itself, but not always: a checkpoint of an epoch's end
is resumed without it, or with an epoch of one batch. So `PackedData` keeps the state, and
`SteadyLoader` continues after the last batch wherever Lightning ended its epoch.

Cost: 15 to 25 ms a step on one core, after about 10 s of importing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional

from streampack import (
    Mixing,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
    block_causal_mask,
    loss_weights,
)
from streampack.formats import global_units
from streampack.write import write_stream

VOCABULARY = 256
MAX_SEQ_LEN = 128
GLOBAL_BATCH_SIZE = 8  # packs in an optimizer step


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
        """Return this rank's part of the loss: a mean over the targets of all ranks."""
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
        """Return what Lightning steps with."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class SteadyLoader(PackedDataLoader):
    """Begins every iteration after the batch last delivered, wherever Lightning broke one off."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begin the next epoch, or continue this one."""
        self.load_state_dict(self.state_dict())
        return super().__iter__()


class PackedData(LightningDataModule):
    """The loader, and its state in every checkpoint."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.paths = [out / "data" / "long", out / "data" / "short"]

    def prepare_data(self) -> None:
        """Write two small streams of random tokens, once; Lightning calls this on one rank."""
        rng = np.random.default_rng(0)
        for path, longest in zip(self.paths, (150, 30), strict=True):
            samples = [rng.integers(1, VOCABULARY, n) for n in rng.integers(2, longest, 100)]
            if not path.exists():
                write_stream(samples, path)

    def setup(self, stage: str) -> None:  # noqa: ARG002 - Lightning names it
        """Make this rank's loader; which rank it is, Lightning says."""
        num_ranks = self.trainer.world_size
        world = World(
            rank=self.trainer.global_rank,
            num_ranks=num_ranks,
            ranks_per_node=num_ranks // self.trainer.num_nodes,
        )
        dataset = PackedStreamingDataset(
            streams=[Stream(local=str(path)) for path in self.paths],
            packing=Packing(max_seq_len=MAX_SEQ_LEN),
            mixing=Mixing(global_batch_size=GLOBAL_BATCH_SIZE),
            batch_size=GLOBAL_BATCH_SIZE // num_ranks,
            world=world,
        )
        self.loader = SteadyLoader(dataset)

    def train_dataloader(self) -> PackedDataLoader:
        """Return the loader; Lightning leaves one that is not torch's as it is."""
        return self.loader

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the checkpoint was taken."""
        self.loader.load_state_dict(state_dict)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, from the last checkpoint if there is one."""
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
        datamodule=PackedData(args.out),
        ckpt_path=str(checkpoint) if checkpoint.exists() else None,
    )


if __name__ == "__main__":
    main()
