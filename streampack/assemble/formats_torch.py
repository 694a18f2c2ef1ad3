"""Formats for torchtune and torchtitan.

A row of 5 with two segments and a padding token::

                torchtune                        torchtitan
    tokens      a0   a1 | b0   b1 |  0           input       a0   a1 | b0   b1 |  0
    labels    -100   a1 |-100  b1 |-100          labels      a1 -100 | b1 -100 |-100
    input_pos    0    1 |  0    1 |  0           positions    0    1 |  0    1 |  0
    mask      (B, S, S)                          (the trainer makes its mask from positions)

Both call the model with what the batch holds, so there is no room for epoch and position: the state
of a run is ``loader.state_dict()`` of a `PackedDataLoader`.

Cost: B * S * S bools for torchtune's dense mask; nothing for torchtitan.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

from streampack.assemble.batch import Batch
from streampack.assemble.layout import check_carried, check_restarts, unshifted_labels
from streampack.assemble.masks import PaddingMask, block_mask, dense_mask
from streampack.config import check_choice

__all__ = ["TitanBatch", "to_torchtitan", "to_torchtitan_flat", "to_torchtune"]

Mask = Literal["bool", "block"]
TitanBatch: TypeAlias = tuple[dict[str, torch.Tensor], torch.Tensor]


def to_torchtune(
    batch: Batch,
    *,
    shifted: bool = False,
    mask: Mask = "bool",
    padding: PaddingMask = "identity",
) -> dict[str, Any]:
    """Return what torchtune's recipes take: they pop labels and call ``model(**batch)``.

    Labels are unshifted, as the recipes of torchtune 0.6 shift them.

    Args:
        batch: A native batch.
        shifted: Keep labels shifted, for recipes that do not shift them (torchtune's main branch).
        mask: "bool", or "block" for FlexAttention: made on the batch's device, so not in workers.
        padding: Whether padding sees only itself, or the padding before it too (as torchtune's
            own packs).

    Returns:
        tokens, labels, input_pos: int64, shape (B, S).
        mask: bool, shape (B, S, S), or a BlockMask.

    Raises:
        ConfigError: If the batch has a field that this format cannot carry, is not native, or a
            BlockMask is asked for in a worker.
    """
    check_carried(batch, "torchtune")
    check_choice("mask", mask, Mask)
    make = dense_mask if mask == "bool" else block_mask
    return {
        "tokens": batch["tokens"],
        "labels": batch["labels"] if shifted else unshifted_labels(batch),
        "input_pos": batch["input_pos"],
        "mask": make(batch["document_ids"], padding=padding),
    }


def to_torchtitan(batch: Batch) -> TitanBatch:
    """Return what torchtitan's trainer takes: inputs and labels, row by row.

    Labels are shifted.

    Args:
        batch: A native batch.

    Returns:
        The inputs: input and positions, int64, shape (B, S); and the labels, int64, shape (B, S).

    Raises:
        ConfigError: If positions do not restart in every segment, if the batch has a field that
            this format cannot carry, or is not native.
    """
    check_restarts(batch, "torchtitan")
    check_carried(batch, "torchtitan")
    return {"input": batch["tokens"], "positions": batch["input_pos"]}, batch["labels"]


def to_torchtitan_flat(batch: Batch) -> TitanBatch:
    """Return what torchtitan's newer trainer takes: all packs in one line, T = B * S.

    Labels are shifted.

    Args:
        batch: A native batch.

    Returns:
        The inputs: input and positions, int64, shape (T,); and the labels, int64, shape (T,).

    Raises:
        ConfigError: As `to_torchtitan`.
    """
    check_restarts(batch, "torchtitan_flat")
    check_carried(batch, "torchtitan_flat")
    inputs = {"input": batch["tokens"].flatten(), "positions": batch["input_pos"].flatten()}
    return inputs, batch["labels"].flatten()
