"""Flash attention in transformers without a GPU: its own code, but a kernel in plain torch.

::

    model --> flash_attention_mask --> flash_attention_forward --> varlen kernel (here: SDPA)
              all from transformers                                by cu_seqlens, causal
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from transformers import modeling_flash_attention_utils as theirs
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "flash_in_torch"


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """The kernel for padded rows; tensors have shape (B, S, heads, dim)."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    out = functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def _attend_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor, **others: Any
) -> torch.Tensor:
    """The kernel for concatenated sequences; tensors have shape (T, heads, dim)."""
    edges = cu_seqlens_q.tolist()
    parts = [
        _attend(q[None, a:b], k[None, a:b], v[None, a:b], **others)[0]
        for a, b in pairwise(edges)
        if a < b
    ]
    return torch.cat(parts)


@contextmanager
def flash_in_torch() -> Iterator[str]:
    """Yield the name of an attention that uses all of transformers' code except the kernel."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, flash_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, flash_attention_mask)
    kernels = {
        "_flash_fn": _attend,
        "_flash_varlen_fn": _attend_varlen,
        "_pad_fn": theirs._pad_input,
        "_unpad_fn": theirs._unpad_input,
        "_loaded_implementation": NAME,  # keeps transformers 5 from importing another
        "_process_flash_kwargs_fn": theirs._lazy_define_process_function(_attend_varlen),
    }
    known = {name: kernel for name, kernel in kernels.items() if hasattr(theirs, name)}
    with mock.patch.multiple(theirs, **known):
        yield NAME
