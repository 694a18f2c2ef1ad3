"""Attention masks from document ids: a token sees its own segment, up to itself, and nothing else.

For one pack with ``document_ids = 1 1 2 0``, rows are queries::

             k0 k1 k2 k3
        q0    x  .  .  .
        q1    x  x  .  .
        q2    .  .  x  .
        q3    .  .  .  x      padding sees itself: a row without any x becomes NaN in softmax

Cost: `block_causal_mask` makes B * S * S bools, for models of small S; `document_mask_mod` makes
nothing, FlexAttention asks it block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

__all__ = ["MaskMod", "block_causal_mask", "document_mask_mod"]

MaskMod: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]


def block_causal_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Return which tokens see which, for ``scaled_dot_product_attention(attn_mask=...)``.

    Args:
        document_ids: 1..n in a pack, 0 is padding; shape (B, S).

    Returns:
        True where query i sees key j, bool, shape (B, 1, S, S); the 1 is for the heads.

    >>> block_causal_mask(torch.tensor([[1, 1, 2, 0]])).int()[0, 0].tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    """
    queries, keys = document_ids[:, None, :, None], document_ids[:, None, None, :]
    mask = (queries == keys) & (queries > 0)  # (B, 1, S, S)
    mask = mask.tril_()
    mask.diagonal(dim1=-2, dim2=-1).fill_(True)
    return mask


def document_mask_mod(document_ids: torch.Tensor) -> MaskMod:
    """Return the same mask as a function, for FlexAttention's ``create_block_mask``.

    Args:
        document_ids: 1..n in a pack, 0 is padding; shape (B, S).

    Returns:
        A function (batch, head, query, key) -> bool.

    >>> sees = document_mask_mod(torch.tensor([[1, 1, 2, 0]]))
    >>> zero, one, two = torch.tensor(0), torch.tensor(1), torch.tensor(2)
    >>> bool(sees(zero, zero, one, zero)), bool(sees(zero, zero, two, one))
    (True, False)
    """

    def sees(
        batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        document = document_ids[batch, query]
        same = (document == document_ids[batch, key]) & (document > 0) & (query >= key)
        return same | (query == key)

    return sees
