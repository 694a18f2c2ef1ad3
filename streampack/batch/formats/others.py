"""Formats for Megatron-LM, OLMo-core and llm-foundry. Padding at a row's end is a document."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from streampack.batch.batch import Batch
from streampack.batch.layout import (
    CARRIED,
    check_carried,
    in_one_row,
    real_tokens,
    row_edges,
    token_weights,
    unshifted_labels,
)
from streampack.errors import ConfigError
from streampack.types import IGNORED


def to_megatron(batch: Batch, *, pad_to: int | None = None) -> dict[str, Any]:
    """Return the inputs of Megatron-LM for packed sequences (thd); Megatron-LM takes B = 1.

    Labels are shifted; they are -100 where loss_mask is 0.

    Args:
        batch: A native batch.
        pad_to: First put all samples into one row, B = 1, padded to a multiple of this.

    Returns:
        tokens, labels, position_ids: int64, shape (B, S).
        loss_mask: float32, shape (B, S): 1 for targets, or their `Stream(loss_weight=...)`.
            Megatron-LM divides the loss by the sum of the mask.
        cu_seqlens: int32, shape (B, S + 1): segment edges in each row, then S.
        max_seqlen: int32, shape (B,): the longest segment of each row.
        epoch, position: ints.
        For a slice, the first four have shape (B, S / n), and the edges are those of whole rows:
        TransformerEngine divides them by the context-parallel size itself.

    Raises:
        ConfigError: If the batch has a field that this format cannot carry, or is not native.
    """
    check_carried(batch, "megatron", takes_slices=pad_to is None)
    batch = in_one_row(batch, pad_to)
    weights, edges = token_weights(batch), row_edges(batch)
    most = int(edges[0][-1]) + 1
    filled = [torch.cat([row, row[-1:].expand(most - len(row))]) for row in edges]
    return {
        "tokens": batch["tokens"],
        "labels": batch["labels"],
        "position_ids": batch["input_pos"],
        "loss_mask": (batch["labels"] != IGNORED).float() * (1 if weights is None else weights),
        "cu_seqlens": torch.stack(filled).int(),
        "max_seqlen": torch.stack([row.diff().max() for row in edges]).int(),
        **{key: batch[key] for key in CARRIED},
    }


def to_olmo_core(batch: Batch) -> dict[str, Any]:
    """Return the inputs of OLMo-core's train module.

    OLMo-core makes the labels itself, from input_ids and label_mask, and shifts them. So label_mask
    is unshifted: it marks the tokens that are targets. epoch and position cannot be carried.

    Args:
        batch: A native batch of plain text or with masked labels.

    Returns:
        input_ids: int64, shape (B, S).
        label_mask: bool, shape (B, S); False at the first token of every segment.
        doc_lens: int32, shape (B, most segments of a row), filled with 0; each row sums to S.
        max_doc_lens: the longest segment of each row, a list of ints.

    Raises:
        ConfigError: If a label is not the following token, the batch has a field that this format
            cannot carry, or it is not native.
    """
    check_carried(batch, "olmo_core")
    tokens, labels = batch["tokens"], unshifted_labels(batch)
    # Where padding follows a cut, its label is a token of another pack.
    mask = (labels != IGNORED) & real_tokens(batch)
    other = mask & (labels != tokens)
    if bool(other.any()):
        row, place = other.nonzero()[0].tolist()
        raise ConfigError(
            f"batch_format='olmo_core' takes its labels from the tokens, but row {row} has label "
            f"{int(labels[row, place])} for token {place}, which is {int(tokens[row, place])}; use "
            "another format for custom labels"
        )
    lengths = [row.diff() for row in row_edges(batch)]
    return {
        "input_ids": tokens,
        "label_mask": mask,
        "doc_lens": pad_sequence(lengths, batch_first=True).int(),
        "max_doc_lens": [int(row.max()) for row in lengths],
    }


def to_llm_foundry(batch: Batch) -> dict[str, Any]:
    """Return the inputs of llm-foundry's models.

    Labels are unshifted. Set ``attn_uses_sequence_id`` in the model's config, or segments leak.

    Returns:
        input_ids, labels: int64, shape (B, S).
        attention_mask: int64, shape (B, S): 0 for padding at a row's end.
        sequence_id: int64, shape (B, S): 0..n-1, padding -1.
        epoch, position: ints.

    Raises:
        ConfigError: If the batch has a field that this format cannot carry, or is not native.
    """
    check_carried(batch, "llm_foundry")
    document_ids = batch["document_ids"].long()
    return {
        "input_ids": batch["tokens"],
        "attention_mask": (document_ids > 0).long(),
        "labels": unshifted_labels(batch),
        "sequence_id": document_ids - 1,
        **{key: batch[key] for key in CARRIED},
    }
