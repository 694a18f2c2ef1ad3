"""The tensors of a training step, made from rows of tokens and segments.

In: rows of int32 tokens and their segments. Out: a dict of tensors, or the output of a
`batch_format`; attention masks and loss weights. May import `gather` and every room before it. The
first room that needs torch. Pure functions: no files, no clocks.

Cost: one pass over the tokens; see each format for its additional cost.
"""

from streampack.batch.batch import (
    Batch,
    fill_compact,
    make_batch,
    make_batches,
    make_compacts,
)
from streampack.batch.buffer_pool import BufferPool, Scratch
from streampack.batch.compact import expand, to_compact
from streampack.batch.formats.huggingface import to_hf, to_hf_flash, to_llama_factory
from streampack.batch.formats.others import to_llm_foundry, to_megatron, to_olmo_core
from streampack.batch.formats.pytorch import to_torchtitan, to_torchtitan_flat, to_torchtune
from streampack.batch.formats.registry import (
    FORMATS,
    BatchFormat,
    Formatter,
    check_format,
    get_format,
    is_builtin,
    is_cheap,
    to_native,
)
from streampack.batch.layout import segment_starts, unpad
from streampack.batch.loss_weights import Average, count_units, loss_weights
from streampack.batch.masks import (
    additive_mask,
    block_causal_mask,
    block_mask,
    dense_mask,
    document_mask_mod,
    fixed_cu_seqlens,
)

__all__ = [
    "FORMATS",
    "Average",
    "Batch",
    "BatchFormat",
    "BufferPool",
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
    "is_builtin",
    "is_cheap",
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
