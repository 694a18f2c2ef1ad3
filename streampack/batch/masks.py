"""Attention masks from document ids: each token attends to its own segment, up to itself.

For one pack with ``document_ids = 1 1 2 0 0``, rows are queries::

             k0 k1 k2 k3 k4
        q0    x  .  .  .  .
        q1    x  x  .  .  .
        q2    .  .  x  .  .
        q3    .  .  .  x  .     padding="identity": padding attends to itself
        q4    .  .  .  c  x     padding="causal": also (c) to the padding before it

Padding is never a target, and no real token attends to it, so the choice does not affect the loss.

Cost: `dense_mask` and `block_causal_mask` make B * S * S bools, `additive_mask` as many floats, for
models of small S. `block_mask` makes a few numbers per 128 x 128 tokens, `document_mask_mod`
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.data import get_worker_info

from streampack._checks import check_choice, read_count
from streampack.errors import ConfigError

MaskMod: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
PaddingMask = Literal["identity", "causal"]


def dense_mask(document_ids: torch.Tensor, *, padding: PaddingMask = "identity") -> torch.Tensor:
    """Return the attention mask in the shape that torchtune's decoders take.

    Args:
        document_ids: 1..n in a pack, 0 is padding; shape (B, S).
        padding: "identity": padding sees only itself; "causal": also the padding before it.

    Returns:
        True where query i sees key j, bool, shape (B, S, S).

    Raises:
        ConfigError: If `padding` is unknown.

    >>> dense_mask(torch.tensor([[1, 1, 2, 0]])).int()[0].tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    """
    check_choice("padding", padding, PaddingMask)
    queries, keys = document_ids[:, :, None], document_ids[:, None, :]
    mask = queries == keys  # (B, S, S)
    if padding == "identity":
        # Padding has id 0, so it would see the padding before it.
        mask &= queries > 0
    mask = mask.tril_()
    # Padding too: a row without any True becomes NaN in softmax.
    mask.diagonal(dim1=-2, dim2=-1).fill_(True)
    return mask


def block_causal_mask(
    document_ids: torch.Tensor, *, padding: PaddingMask = "identity"
) -> torch.Tensor:
    """Return the attention mask for ``scaled_dot_product_attention(attn_mask=...)``.

    Args:
        document_ids: 1..n in a pack, 0 is padding; shape (B, S).
        padding: "identity": padding sees only itself; "causal": also the padding before it.

    Returns:
        True where query i sees key j, bool, shape (B, 1, S, S); the 1 is for the heads.

    >>> block_causal_mask(torch.tensor([[1, 1, 2, 0]])).int()[0, 0].tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    """
    return dense_mask(document_ids, padding=padding)[:, None]


def additive_mask(
    document_ids: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    padding: PaddingMask = "identity",
) -> torch.Tensor:
    """Return an additive mask, for `scaled_dot_product_attention` and transformers.

    Args:
        document_ids: 1..n in a pack, 0 is padding; shape (B, S).
        dtype: Dtype of the model's attention, a floating type.
        padding: "identity": padding sees only itself; "causal": also the padding before it.

    Returns:
        0 where query i sees key j, else the lowest finite value; shape (B, 1, S, S). Not -inf:
        some kernels turn -inf into NaN.

    Raises:
        ConfigError: If `dtype` is not a floating type.

    >>> additive_mask(torch.tensor([[1, 2]]))[0, 0, 1].tolist()
    [-3.4028234663852886e+38, 0.0]
    """
    if not dtype.is_floating_point:
        raise ConfigError(
            f"dtype={dtype} is not a floating type; pass the model's dtype, or use a bool mask"
        )
    hidden = ~block_causal_mask(document_ids, padding=padding)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=document_ids.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)


def document_mask_mod(document_ids: torch.Tensor, *, padding: PaddingMask = "identity") -> MaskMod:
    """Return the same mask as a function, for FlexAttention's ``create_block_mask``.

    Returns:
        A function (batch, head, query, key) -> bool.

    >>> sees = document_mask_mod(torch.tensor([[1, 1, 2, 0]]))
    >>> zero, one, two = torch.tensor(0), torch.tensor(1), torch.tensor(2)
    >>> bool(sees(zero, zero, one, zero)), bool(sees(zero, zero, two, one))
    (True, False)
    """
    check_choice("padding", padding, PaddingMask)
    least = 1 if padding == "identity" else 0

    def _sees(
        batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        document = document_ids[batch, query]
        same = (document == document_ids[batch, key]) & (document >= least) & (query >= key)
        return same | (query == key)

    return _sees


def block_mask(document_ids: torch.Tensor, *, padding: PaddingMask = "identity") -> BlockMask:
    """Return the same mask for FlexAttention, on the device of `document_ids`.

    Make it in the training process, once per batch, after moving the batch to its device. All
    layers share it.

    Raises:
        ConfigError: In a worker of a data loader, which cannot send a BlockMask.

    >>> block_mask(torch.ones(2, 256, dtype=torch.int32)).shape
    (2, 1, 256, 256)
    """
    info: Any = get_worker_info()
    if info is not None:
        raise ConfigError(
            f"a BlockMask was requested in worker {info.id} of {info.num_workers}; it belongs on "
            "the training device, so call block_mask(batch['document_ids']) in the training loop"
        )
    num_rows, row_tokens = document_ids.shape
    return create_block_mask(
        document_mask_mod(document_ids, padding=padding),
        num_rows,
        None,
        row_tokens,
        row_tokens,
        device=str(document_ids.device),
    )


def fixed_cu_seqlens(cu_seqlens: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return `cu_seqlens` of constant shape, for CUDA graphs and ``torch.compile``.

    Args:
        cu_seqlens: Segment edges, int32, shape (n + 1,).
        capacity: Maximum number of segments; B * S is always enough.

    Returns:
        int32, shape (capacity + 1,). The last value repeats: empty segments.

    Raises:
        ConfigError: If there are more segments.

    >>> fixed_cu_seqlens(torch.tensor([0, 3, 8], dtype=torch.int32), 4).tolist()
    [0, 3, 8, 8, 8]
    """
    capacity = read_count("capacity", capacity)
    num_segments = len(cu_seqlens) - 1
    if num_segments > capacity:
        raise ConfigError(
            f"a batch has {num_segments} segments, padding included, but capacity={capacity}; "
            "raise it: B * S is always enough"
        )
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(capacity - num_segments)])
