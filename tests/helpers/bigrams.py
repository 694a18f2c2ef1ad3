"""A Lightning model that predicts each token from the previous one, on native batches.

::

    training_step      the mean loss over a batch's targets; 0 if it has none
    validation_step    the same, logged with the number of targets as its weight
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy

from streampack.lightning import PackedData

VOCABULARY = 99


class Bigrams(LightningModule):
    """A bigram table; its weights are the same in every instance."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.logits = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits(self.embedding(tokens))

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        logits = self(batch["tokens"])
        losses = cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="sum")
        return losses / max(batch["num_targets"], 1)

    def validation_step(self, batch: dict[str, Any]) -> None:
        loss, count = self.training_step(batch), batch["num_targets"]
        self.log("val_loss", loss, batch_size=count, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def held_out_loss(dataset: Any, **options: Any) -> float:
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, **options)
    data = PackedData(held_out=dataset, batch_size=2)
    (metrics,) = trainer.validate(Bigrams(), datamodule=data, verbose=False)
    return metrics["val_loss"]


def loss_one_by_one(samples: Sequence[Any]) -> float:
    """Return the mean loss over all targets, computed one sample at a time."""
    total, count = 0.0, 0
    with torch.no_grad():
        for sample in samples:
            tokens = torch.tensor(sample["tokens"])
            is_target = torch.tensor(sample["loss_mask"][1:]) > 0
            losses = cross_entropy(Bigrams()(tokens[:-1]), tokens[1:], reduction="none")
            total += losses[is_target].sum().item()
            count += int(is_target.sum())
    return total / count
