"""Assemble: from tokens and segments to the tensors of a training step."""

from streampack.assemble.batch import (
    Batch,
    fill_compact,
    make_batch,
    make_batches,
    make_compacts,
)
from streampack.assemble.blocks import Blocks, Scratch
from streampack.assemble.compact import expand, to_compact
from streampack.assemble.formats import (
    FORMATS,
    BatchFormat,
    Formatter,
    check_format,
    get_format,
    has_name,
    is_light,
    to_native,
)
from streampack.assemble.formats_hf import to_hf, to_hf_flash, to_llama_factory
from streampack.assemble.formats_other import to_llm_foundry, to_megatron, to_olmo_core
from streampack.assemble.formats_torch import to_torchtitan, to_torchtitan_flat, to_torchtune
from streampack.assemble.layout import segment_starts, unpad
from streampack.assemble.masks import (
    additive_mask,
    block_causal_mask,
    block_mask,
    dense_mask,
    document_mask_mod,
    fixed_cu_seqlens,
)
from streampack.assemble.weights import Average, count_units, loss_weights

__all__ = [
    "FORMATS",
    "Average",
    "Batch",
    "BatchFormat",
    "Blocks",
    "Formatter",
    "Scratch",
    "additive_mask",
    "block_causal_mask",
    "block_mask",
    "check_format",
    "count_units",
    "dense_mask",
    "document_mask_mod",
    "expand",
    "fill_compact",
    "fixed_cu_seqlens",
    "get_format",
    "has_name",
    "is_light",
    "loss_weights",
    "make_batch",
    "make_batches",
    "make_compacts",
    "segment_starts",
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
