"""The decoder of bench_gain.py; the batch decides which attention it uses.

::

    "causal"    rows of one sample: is_causal=True
    "mask"      packs: block_causal_mask, made in the step
    "segments"  packs as one row: causal attention of each segment by itself, in a loop on a CPU, by
                FlashAttention's varlen kernel on a GPU
    "blocks"    packs: FlexAttention with block_mask, compiled (GPU)

Cost: with dim=256 and 2 layers about 1.8 million weights, a third of them the table of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from streampack import block_causal_mask
from streampack.batch.masks import block_mask

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
causal: Attend = partial(scaled_dot_product_attention, is_causal=True)


def attention_of(batch: dict[str, Any], kind: str) -> Attend:
    """Return the attention of a batch: "causal", "mask", "segments" or "blocks"."""
    if kind == "mask":
        mask = block_causal_mask(batch["document_ids"])
        return partial(scaled_dot_product_attention, attn_mask=mask)
    if kind == "causal":
        return causal
    if kind == "blocks":
        return partial(compiled_flex(), block_mask=block_mask(batch["document_ids"]))
    if batch["tokens"].is_cuda:
        return varlen_of(batch)
    lengths = batch["cu_seqlens"].diff().tolist()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(*(heads.split(lengths, dim=2) for heads in (query, key, value)), strict=True)
        return torch.cat([causal(*part) for part in parts], dim=2)

    return attend


@cache
def compiled_flex() -> Any:
    """Return FlexAttention, compiled once."""
    return torch.compile(flex_attention, dynamic=False)


def varlen_of(batch: dict[str, Any]) -> Attend:
    """Return FlashAttention over the segments of a batch of one row."""
    from torch.nn.attention.varlen import varlen_attn  # not in every torch that the CPU runs on

    edges, longest = batch["cu_seqlens"], batch["max_seqlen"]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = (heads[0].transpose(0, 1).contiguous() for heads in (query, key, value))
        seen = varlen_attn(*rows, edges, edges, longest, longest, window_size=(-1, 0))
        return seen.transpose(0, 1)[None]

    return attend


def rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary embedding: rotate each pair of values by its angle; (B, heads, S, head)."""
    one, other = heads.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1)


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.before_attention = nn.RMSNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.attended = nn.Linear(dim, dim, bias=False)
        self.feed_forward = nn.Sequential(
            nn.RMSNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, hidden: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """Return the new hidden states, shape (B, S, dim)."""
        heads = self.query_key_value(self.before_attention(hidden))
        heads = heads.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        rotated = (rotate(each, angles).to(heads.dtype) for each in heads[:2])  # autocast: bfloat16
        seen = attend(*rotated, heads[2])
        hidden = hidden + self.attended(seen.transpose(1, 2).flatten(2))
        output: Tensor = hidden + self.feed_forward(hidden)
        return output


class Decoder(nn.Module):
    """A small decoder with rotary embeddings; the caller provides the attention."""

    def __init__(self, vocabulary: int, dim: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim)
        half = dim // num_heads // 2
        self.register_buffer("speeds", 10_000.0 ** (-torch.arange(half) / half))

    def forward(self, batch: dict[str, Any], kind: str) -> Tensor:
        """Return logits, shape (B, S, vocabulary)."""
        attend = attention_of(batch, kind)
        angles = batch["input_pos"][:, None, :, None] * self.speeds  # (B, 1, S, half of a head)
        hidden = self.embedding(batch["tokens"])
        for block in self.blocks:
            hidden = block(hidden, angles, attend)
        logits: Tensor = self.norm(hidden) @ self.embedding.weight.T
        return logits
