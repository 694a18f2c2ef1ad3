"""Loss weights that make the average independent of packing; docs/loss.md has an example.

The loss is ``sum(weight * loss of token) / units``, where units are the tokens, samples or packs
with a target in the *global* batch: all micro-batches of an optimizer step, on all ranks. A
`Stream(loss_weight=...)` is one more factor of its targets, and changes no divisor.

Cost: two passes over the labels.
"""

from __future__ import annotations

from typing import Literal

import torch

from streampack._checks import check_choice, read_count
from streampack.batch.batch import Batch
from streampack.batch.layout import CHUNKS, begins, check_native, token_weights
from streampack.errors import ConfigError
from streampack.types import IGNORED

Average = Literal["tokens", "samples", "packs"]


def loss_weights(
    batch: Batch, *, average: Average = "tokens", units: int | None = None, num_ranks: int = 1
) -> torch.Tensor:
    """Return the weight of each token's loss.

    Args:
        batch: A native batch.
        average: "tokens", "samples" or "packs": which of these have equal weight. A piece of a
            split sample counts as a sample: its other pieces are in other batches. Slices of
            context-parallel ranks allow only "tokens".
        units: Number of units in the global batch, from `global_units`. The weights are then
            final: sum the weighted losses, call backward for each micro-batch, and do not divide.
            None: the units of this batch; its weights then sum to 1, or to the mean
            `Stream(loss_weight=...)` of these units. For a slice, pass the units
            of all slices.
        num_ranks: Ranks that average their gradients, as DDP and FSDP do: weights are multiplied
            by it. 1 if gradients are summed, or if `units` counts this rank only.

    Returns:
        float32, shape (B, S); 0 where the label is -100.

    Raises:
        ConfigError: If `average` is unknown or a slice lacks targets for it, or `units` or
            `num_ranks` is below 1.

    >>> batch = {"tokens": torch.zeros(1, 6), "labels": torch.tensor([[1, 2, 3, -100, 5, -100]]),
    ...     "input_pos": None, "document_ids": None, "cu_seqlens": torch.tensor([0, 4, 6]),
    ...     "max_seqlen": 4, "segments": None, "epoch": 0, "position": 1}
    >>> loss_weights(batch, average="samples", units=1).mul(3).round()[0].int().tolist()
    [1, 1, 1, 0, 3, 0]
    """
    num_ranks = read_count("num_ranks", num_ranks)
    if units is not None and units < 1:
        raise ConfigError(
            f"units={units} must be at least 1; a step without any target has no loss: skip its "
            "backward pass on all ranks"
        )
    per_unit, of = _targets_per_unit(batch, average)
    if units is None:
        units = max(int((per_unit > 0).sum()), 1)
    weights: torch.Tensor = (batch["labels"] != IGNORED) / per_unit[of].clamp(min=1)
    weights *= num_ranks / units
    streams = token_weights(batch)
    return weights if streams is None else weights * streams


def count_units(batch: Batch, *, average: Average = "tokens") -> int:
    """Return the tokens, samples or packs of a native batch that have a target.

    Raises:
        ConfigError: If `average` is unknown.
    """
    return int((_targets_per_unit(batch, average)[0] > 0).sum())


def _targets_per_unit(batch: Batch, average: Average) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the targets of each unit, int64, shape (u,), and each token's unit, shape (B, S)."""
    check_native(batch, "loss_weights", takes_slices=True)
    check_choice("average", average, Average)
    if CHUNKS in batch and average != "tokens":
        raise ConfigError(
            f"average={average!r} weighs all targets of one of the {average}, and this slice of a "
            "context-parallel rank has a part of them; set average='tokens', or put the slices of "
            "all ranks together with streampack.merge_slices"
        )
    labels: torch.Tensor = batch["labels"]
    is_target = labels != IGNORED
    if average == "tokens":
        number = torch.arange(labels.numel(), device=labels.device).view(labels.shape)
        return is_target.flatten().long(), number
    if average == "samples":
        of = begins(batch).flatten().cumsum(0).view(labels.shape) - 1
    else:
        of = torch.arange(len(labels), device=labels.device)[:, None].expand_as(labels)
    return torch.bincount(of[is_target], minlength=int(of.max()) + 1), of
