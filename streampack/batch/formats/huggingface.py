"""Formats for transformers, and for trainers built on it.

`to_hf` returns no attention_mask: one of all ones, or one that numbers documents, disables the
search for edges in eager, SDPA and FlexAttention. So does a cache, hence use_cache=False.

Cost: one pass for the labels; B * S * S floats for a dense mask.
"""

from __future__ import annotations

from typing import Any

import torch

from streampack.batch.batch import Batch
from streampack.batch.layout import (
    CARRIED,
    NATIVE,
    check_carried,
    check_native,
    check_restarts,
    in_one_row,
    unshifted_labels,
)
from streampack.batch.masks import additive_mask, fixed_cu_seqlens
from streampack.config.combinations import check_combination


def to_hf(
    batch: Batch,
    *,
    shift_labels: bool = False,
    dense: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return the inputs of transformers' causal models: ``model(**to_hf(batch))``.

    Labels are unshifted. For attn_implementation "sdpa", "eager" and "flex_attention", at any B.
    For flash attention use `to_hf_flash`: it finds the edges of packs only at B = 1. Some models
    do not look for edges in position_ids: docs/formats.md names them.

    Args:
        batch: A native batch; other fields, such as images, are passed through.
        shift_labels: Also add the shifted labels, which transformers then uses for its loss. They
            keep one target per cut that unshifted labels lose: the token after the cut, which
            is in another pack.
        dense: Add a 4-D attention_mask, for models that do not find edges in position_ids; not for
            "flex_attention".
        dtype: Dtype of that mask: the model's.

    Returns:
        input_ids, labels, position_ids: int64, shape (B, S).
        use_cache: False.
        attention_mask: with `dense`: 0 or the lowest value of `dtype`, shape (B, 1, S, S).
        shift_labels: with `shift_labels`: int64, shape (B, S).
        epoch, position: ints; transformers' models ignore unknown arguments.

    Raises:
        ConfigError: If positions do not restart in every segment, or the batch is not native.
    """
    check_native(batch, "batch_format='hf'")
    check_restarts(batch, "hf")
    inputs = _inputs(batch, shift_labels=shift_labels) | {"use_cache": False}
    if dense:
        inputs["attention_mask"] = additive_mask(batch["document_ids"], dtype=dtype)
    return inputs | _other_fields(batch)


def to_hf_flash(
    batch: Batch,
    *,
    pad_to: int | None = None,
    capacity: int | None = None,
    shift_labels: bool = False,
) -> dict[str, Any]:
    """Return the inputs of transformers' causal models with flash attention, all packs in one row.

    Labels are unshifted. Keys and types are those of its `DataCollatorWithFlattening`.

    Args:
        batch: A native batch.
        pad_to: Leave padding out, then pad the row to a multiple of this: few values of T. 1: no
            padding, so T differs between batches. A batch of padding only keeps some.
        capacity: Give cu_seq_lens the constant shape (capacity + 1,), for CUDA graphs.
        shift_labels: Also add the shifted labels, as in `to_hf`.

    Returns:
        input_ids, labels, position_ids: int64, shape (1, T); T is B * S, or less as above.
        cu_seq_lens_q, cu_seq_lens_k: int32, shape (n + 1,).
        max_length_q, max_length_k, epoch, position: ints.
        use_cache: False.

    Raises:
        ConfigError: If positions do not restart in every segment, there are more segments than
            `capacity`, the batch has a field that this format cannot carry, or it is not native.
    """
    check_carried(batch, "hf_flash")
    check_restarts(batch, "hf_flash")
    batch = in_one_row(batch, pad_to)
    inputs = _inputs(batch, shift_labels=shift_labels)
    cu_seqlens = batch["cu_seqlens"]
    if capacity is not None:
        cu_seqlens = fixed_cu_seqlens(cu_seqlens, capacity)
    return {
        **{key: value.flatten()[None] for key, value in inputs.items()},
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": batch["max_seqlen"],
        "max_length_k": batch["max_seqlen"],
        "use_cache": False,
        **{key: batch[key] for key in CARRIED},
    }


def to_llama_factory(
    batch: Batch, *, dense: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return the inputs of LLaMA-Factory's models and collator with `neat_packing`.

    Labels are unshifted. There are two modes, by attention implementation:

    - Flash attention, B = 1: transformers drops a mask without zeros and finds the edges in
      position_ids. So the padding at the row's end is omitted, as LLaMA-Factory does.
    - SDPA and eager, any B: ``dense=True``, the 4-D mask that LLaMA-Factory's collator makes.

    Args:
        batch: A native batch; other fields are passed through.
        dense: Make the 4-D mask here.
        dtype: Dtype of that mask: the model's.

    Returns:
        input_ids, labels, position_ids: int64, shape (1, T) without padding; with `dense` (B, S).
            Fields with a value for each token are cut too; a batch of padding only is kept.
        attention_mask: int64, shape (1, T): 1..n. With `dense`: 0 or the lowest value of `dtype`,
            shape (B, 1, S, S); unlike LLaMA-Factory's mask, padding attends to itself.
        epoch, position: ints.

    Raises:
        ConfigError: If the batch is not native; without `dense`, also if B is not 1 or positions
            do not restart in every segment.
    """
    check_native(batch, "to_llama_factory")
    document_ids = batch["document_ids"]
    made = _inputs(batch) | _other_fields(batch)
    if dense:
        return made | {"attention_mask": additive_mask(document_ids, dtype=dtype)}
    check_combination({"batch_format": "llama_factory", "batch_size": len(document_ids)})
    check_restarts(batch, "llama_factory")
    made["attention_mask"] = document_ids.long().clamp(min=1)
    used = int(document_ids.count_nonzero()) or document_ids.shape[1]
    return {
        key: value[:, :used]
        if torch.is_tensor(value) and value.shape[:2] == document_ids.shape
        else value
        for key, value in made.items()
    }


def _inputs(batch: Batch, *, shift_labels: bool = False) -> dict[str, Any]:
    inputs = {
        "input_ids": batch["tokens"],
        "labels": unshifted_labels(batch),
        "position_ids": batch["input_pos"],
    }
    return inputs | {"shift_labels": batch["labels"]} if shift_labels else inputs


def _other_fields(batch: Batch) -> dict[str, Any]:
    return {key: value for key, value in batch.items() if key in CARRIED or key not in NATIVE}
