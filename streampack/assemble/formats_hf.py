"""Formats for transformers, and for trainers built on it.

A row of 5 with two segments and a padding token, as `to_hf` returns it::

    input_ids       a0   a1 | b0   b1 |  0
    labels        -100   a1 |-100  b1 |-100     unshifted; transformers shifts them
    position_ids     0    1 |  0    1 |  0      transformers finds the edges here
    use_cache     False                         with a cache it would not look, and leak

There is no attention_mask: one of all ones, or one that numbers documents, switches the search for
edges off in eager, SDPA and FlexAttention.

Cost: one pass for the labels; B * S * S floats for a dense mask.
"""

from __future__ import annotations

from typing import Any

import torch

from streampack.assemble.batch import Batch
from streampack.assemble.layout import (
    CARRIED,
    NATIVE,
    check_carried,
    check_native,
    check_restarts,
    unpad,
    unshifted_labels,
)
from streampack.assemble.masks import additive_mask, fixed_cu_seqlens
from streampack.errors import ConfigError

__all__ = ["to_hf", "to_hf_flash", "to_llama_factory"]


def to_hf(
    batch: Batch,
    *,
    shift_labels: bool = False,
    dense: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return what transformers' causal models take: ``model(**to_hf(batch))``.

    Labels are unshifted. For attn_implementation "sdpa", "eager" and "flex_attention", at any B.
    For flash attention take `to_hf_flash`: it sees the edges of a pack at B = 1 only.

    Args:
        batch: A native batch; other fields, such as images, are handed on as they are.
        shift_labels: Add the shifted labels too, which transformers then takes for its loss: they
            keep the one target a cut, the sample's next token in another pack, that unshifted
            labels leave out.
        dense: Add a 4-D attention_mask, for models that do not look at position_ids for edges;
            not for "flex_attention".
        dtype: Of that mask: the model's.

    Returns:
        input_ids, labels, position_ids: int64, shape (B, S).
        use_cache: False.
        attention_mask: with `dense`: 0 or the least number of `dtype`, shape (B, 1, S, S).
        shift_labels: with `shift_labels`: int64, shape (B, S).
        epoch, position: ints; models of transformers ignore arguments that they do not know.

    Raises:
        ConfigError: If positions do not restart in every segment, or this is no native batch.
    """
    check_restarts(batch, "hf")
    made = {
        "input_ids": batch["tokens"],
        "labels": unshifted_labels(batch),
        "position_ids": batch["input_pos"],
        "use_cache": False,
    }
    if shift_labels:
        made["shift_labels"] = batch["labels"]
    if dense:
        made["attention_mask"] = additive_mask(batch["document_ids"], dtype=dtype)
    return made | _handed_on(batch)


def to_hf_flash(
    batch: Batch,
    *,
    drop_padding: bool = False,
    capacity: int | None = None,
    shift_labels: bool = False,
    dense: bool = False,
) -> dict[str, Any]:
    """Return what transformers' causal models take with flash attention: all packs in one line.

    Labels are unshifted. Keys and types are those of its `DataCollatorWithFlattening`.

    Args:
        batch: A native batch.
        drop_padding: Leave padding out, so that T is the number of real tokens and differs from
            batch to batch; a batch of nothing but padding stays as it is, as no model takes T = 0.
        capacity: Give cu_seq_lens the constant shape (capacity + 1,), for CUDA graphs.
        shift_labels: Add the shifted labels too, as in `to_hf`.
        dense: Refused; here so that the message says what to do.

    Returns:
        input_ids, labels, position_ids: int64, shape (1, T); T is B * S.
        cu_seq_lens_q, cu_seq_lens_k: int32, shape (n + 1,).
        max_length_q, max_length_k: ints.
        use_cache: False.
        epoch, position: ints.

    Raises:
        ConfigError: If positions do not restart in every segment, if there are more segments than
            `capacity`, if the batch has a field that this format cannot carry, or is not native.
    """
    if dense:
        raise ConfigError(
            "batch_format='hf_flash' with dense=True: flash attention takes no dense mask, it "
            "reads cu_seq_lens; leave dense out, or use batch_format='hf' with sdpa or eager"
        )
    check_restarts(batch, "hf_flash")
    check_carried(batch, "hf_flash")
    flat = {
        "input_ids": batch["tokens"].flatten(),
        "labels": unshifted_labels(batch).flatten(),
        "position_ids": batch["input_pos"].flatten(),
    }
    if shift_labels:
        flat["shift_labels"] = batch["labels"].flatten()
    cu_seqlens, longest = batch["cu_seqlens"], batch["max_seqlen"]
    if drop_padding and len(batch["segments"]):
        bare = unpad(batch)
        flat = {key: value[bare["indices"]] for key, value in flat.items()}
        cu_seqlens, longest = bare["cu_seqlens"], bare["max_seqlen"]
    if capacity is not None:
        cu_seqlens = fixed_cu_seqlens(cu_seqlens, capacity)
    return {
        **{key: value[None] for key, value in flat.items()},
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
        "use_cache": False,
        **{key: batch[key] for key in CARRIED},
    }


def to_llama_factory(
    batch: Batch, *, dense: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return what LLaMA-Factory's collator and model take with `neat_packing`.

    Labels are unshifted. Its flash attention reads documents from the numbered attention_mask (at
    B = 1); its collator makes the 4-D mask from it for SDPA and eager attention. A model of plain
    transformers leaks with the numbered mask: pass ``dense=True``, or use `to_hf`.

    Args:
        batch: A native batch; other fields are handed on as they are.
        dense: Make the 4-D mask here.
        dtype: Of that mask: the model's.

    Returns:
        input_ids, labels, position_ids: int64, shape (B, S).
        attention_mask: int64, shape (B, S): 1..n, padding 0; with `dense` 0 or the least number of
            `dtype`, shape (B, 1, S, S). Other than LLaMA-Factory's own, padding sees itself.
        epoch, position: ints.

    Raises:
        ConfigError: If this is no native batch.
    """
    check_native(batch, "to_llama_factory")
    document_ids = batch["document_ids"]
    return {
        "input_ids": batch["tokens"],
        "labels": unshifted_labels(batch),
        "position_ids": batch["input_pos"],
        "attention_mask": (
            additive_mask(document_ids, dtype=dtype) if dense else document_ids.long()
        ),
    } | _handed_on(batch)


def _handed_on(batch: Batch) -> dict[str, Any]:
    """Return epoch, position, and what is not streampack's own."""
    return {key: value for key, value in batch.items() if key in CARRIED or key not in NATIVE}
