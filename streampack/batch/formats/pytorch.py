"""Formats for torchtune and torchtitan.

Both pass the batch to the model, so neither carries epoch and position. Save the state of a run
with ``loader.state_dict()`` of a `PackedDataLoader`.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

from streampack._checks import check_choice
from streampack.batch.batch import Batch
from streampack.batch.layout import check_carried, check_restarts, in_one_row, unshifted_labels
from streampack.batch.masks import PaddingMask, block_mask, dense_mask

Mask = Literal["bool", "block"]
TitanBatch: TypeAlias = tuple[dict[str, torch.Tensor], torch.Tensor]


def to_torchtune(
    batch: Batch, *, shifted: bool = False, mask: Mask = "bool", padding: PaddingMask = "identity"
) -> dict[str, Any]:
    """Return the inputs of torchtune's recipes, which pop labels and call ``model(**batch)``.

    Labels are unshifted: the recipes of torchtune 0.6 shift them.

    Args:
        batch: A native batch.
        shifted: Keep labels shifted, for recipes that do not shift them (torchtune's main branch).
        mask: "bool", or "block" for FlexAttention. A BlockMask is made on the batch's device, so
            not in workers.
        padding: "identity": padding attends only to itself; "causal": also to the padding before
            it, as in torchtune's own packs.

    Returns:
        tokens, labels, input_pos: int64, shape (B, S).
        mask: bool, shape (B, S, S), or a BlockMask.

    Raises:
        ConfigError: If the batch has a field that this format cannot carry, is not native, or a
            BlockMask is requested in a worker.
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
    """Return the inputs and labels of torchtitan's trainer, row by row.

    Labels are shifted.

    Returns:
        The inputs: input and positions, int64, shape (B, S); and the labels, int64, shape (B, S).
        For a slice, shape (B, S / n): the parts that torchtitan's trainer cuts of whole rows. A
        mask of documents needs the positions of whole rows, which a slice does not have.

    Raises:
        ConfigError: If positions do not restart in every segment, the batch has a field that this
            format cannot carry, or it is not native.
    """
    check_carried(batch, "torchtitan", takes_slices=True)
    check_restarts(batch, "torchtitan")
    return {"input": batch["tokens"], "positions": batch["input_pos"]}, batch["labels"]


def to_torchtitan_flat(batch: Batch, *, pad_to: int | None = None) -> TitanBatch:
    """Return the inputs and labels of torchtitan's newer trainer, all packs in one row, T = B * S.

    Labels are shifted.

    Args:
        batch: A native batch.
        pad_to: Leave padding out, then pad the row to a multiple of this: few values of T.

    Returns:
        The inputs: input and positions, int64, shape (T,); and the labels, int64, shape (T,). Of a
        slice, shape (T / n,), as in `to_torchtitan`; the one row of T is cut, not each pack.

    Raises:
        ConfigError: As `to_torchtitan`.
    """
    check_carried(batch, "torchtitan_flat", takes_slices=pad_to is None)
    check_restarts(batch, "torchtitan_flat")
    batch = in_one_row(batch, pad_to)
    inputs = {"input": batch["tokens"].flatten(), "positions": batch["input_pos"].flatten()}
    return inputs, batch["labels"].flatten()
