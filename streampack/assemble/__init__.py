"""Assemble: from tokens and segments to the tensors of a training step."""

from streampack.assemble.batch import Batch, make_batch
from streampack.assemble.masks import block_causal_mask, document_mask_mod

__all__ = ["Batch", "block_causal_mask", "document_mask_mod", "make_batch"]
