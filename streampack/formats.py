"""Batch formats, attention masks and loss weights for trainers.

::

    for batch in loader:                              # native
        model(**streampack.formats.to_hf(batch))

    PackedStreamingDataset(..., batch_format="hf")    # converted where batches are read

All take the native batch. docs/formats.md shows each format, docs/loss.md the weights.

Cost: see each function; `global_units` is one all_reduce of one integer per optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed

from streampack.batch.batch import Batch
from streampack.batch.compact import expand, to_compact
from streampack.batch.formats.huggingface import to_hf, to_hf_flash, to_llama_factory
from streampack.batch.formats.others import to_llm_foundry, to_megatron, to_olmo_core
from streampack.batch.formats.pytorch import to_torchtitan, to_torchtitan_flat, to_torchtune
from streampack.batch.formats.registry import FORMATS, get_format, to_native
from streampack.batch.layout import unpad
from streampack.batch.loss_weights import Average, count_units, loss_weights
from streampack.batch.masks import (
    additive_mask,
    block_causal_mask,
    block_mask,
    dense_mask,
    document_mask_mod,
    fixed_cu_seqlens,
)
from streampack.errors import ConfigError
from streampack.runtime.rank_digest import gather_values, group_of
from streampack.world import World

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
    world: World | None = None,
) -> int:
    """Return the tokens, samples or packs with a target in one optimizer step, over all ranks.

    Args:
        batches: This rank's native micro-batches of the step.
        average: What to count; see `streampack.loss_weights`.
        group: The ranks that have different batches, by default all. Leave out tensor, sequence and
            pipeline parallel ranks, which have the same batches, or pass `world`.
        device: Where to sum, by default where the batches are. NCCL needs a GPU.
        world: `dataset.world`, to count ranks that share a batch, or a slice of one, only once. The
            sum is then made on the CPU.

    Raises:
        ConfigError: If `batches` is empty: every rank must pass its own.
    """
    if not batches:
        raise ConfigError(
            f"batches={batches!r} is empty; pass the micro-batches of one optimizer step"
        )
    units = sum(count_units(batch, average=average) for batch in batches)
    if not (distributed.is_available() and distributed.is_initialized()):
        return units
    if world is not None:
        own = (world.device, world.context_rank), units
        return sum(dict(gather_values(own, group or group_of(world))).values())
    total = torch.tensor(units, device=device or batches[0]["labels"].device)
    distributed.all_reduce(total, group=group)
    return int(total)
