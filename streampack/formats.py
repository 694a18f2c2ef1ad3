"""What trainers need of a batch: formats, attention masks and loss weights.

::

    for batch in loader:                              # native
        model(**streampack.formats.to_hf(batch))

    PackedStreamingDataset(..., batch_format="hf")    # the same, made where batches are read

All are functions of the native batch; docs/formats.md shows each format, docs/loss.md the weights.
What a loss is divided by is known only to all ranks together::

    rank 0   micro-batches 0, 1   3,981 targets --.
                                                   +-- all_reduce --> 8,045 on every rank
    rank 1   micro-batches 0, 1   4,064 targets --'

A rank plans only the lanes it reads, and labels may be masked: it cannot count the others' targets.

Cost: see each; `global_units` one all_reduce of one integer for each optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed

from streampack.assemble import (
    FORMATS,
    Average,
    Batch,
    additive_mask,
    block_causal_mask,
    block_mask,
    count_units,
    dense_mask,
    document_mask_mod,
    expand,
    fixed_cu_seqlens,
    get_format,
    loss_weights,
    to_compact,
    to_hf,
    to_hf_flash,
    to_llama_factory,
    to_llm_foundry,
    to_megatron,
    to_native,
    to_olmo_core,
    to_torchtitan,
    to_torchtitan_flat,
    to_torchtune,
    unpad,
)
from streampack.errors import ConfigError

__all__ = [
    "FORMATS",
    "additive_mask",
    "block_causal_mask",
    "block_mask",
    "count_units",
    "dense_mask",
    "document_mask_mod",
    "expand",
    "fixed_cu_seqlens",
    "get_format",
    "global_units",
    "loss_weights",
    "to_compact",
    "to_hf",
    "to_hf_flash",
    "to_llama_factory",
    "to_llm_foundry",
    "to_megatron",
    "to_native",
    "to_olmo_core",
    "to_torchtitan",
    "to_torchtitan_flat",
    "to_torchtune",
    "unpad",
]


def global_units(
    batches: Sequence[Batch],
    *,
    average: Average = "tokens",
    group: distributed.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> int:
    """Return the tokens, samples or packs with a target in one optimizer step, over all ranks.

    Args:
        batches: This rank's native micro-batches of the step.
        average: What to count; see `streampack.loss_weights`.
        group: The ranks that have different batches; None: all. Tensor, sequence and pipeline
            parallel ranks have the same batches: leave them out.
        device: Where the number is summed; None: where the batches are. NCCL needs a GPU's.

    Raises:
        ConfigError: If there is no batch: every rank must call this with its own.
    """
    if not batches:
        raise ConfigError("batches=[] is empty; pass the micro-batches of one optimizer step")
    units = sum(count_units(batch, average=average) for batch in batches)
    if not (distributed.is_available() and distributed.is_initialized()):
        return units
    total = torch.tensor(units, device=device or batches[0]["labels"].device)
    distributed.all_reduce(total, group=group)
    return int(total)
