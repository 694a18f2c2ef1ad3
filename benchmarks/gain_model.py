"""The decoder of bench_gain.py: its attention is told by the batch, not built in.

::

    "causal"    rows of one sample: is_causal=True
    "mask"      packs: block_causal_mask, made in the step
    "segments"  packs as one row: causal attention of each segment by itself, as varlen kernels do

Cost: with dim=256 and 2 layers about 1.8 million weights, a third of them the table of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from streampack import block_causal_mask
from streampack.cli.demo.train import rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
causal: Attend = partial(scaled_dot_product_attention, is_causal=True)


def attention_of(batch: dict[str, Any], kind: str) -> Attend:
    """Return the attention of a batch: "causal", "mask" or "segments"."""
    if kind == "mask":
        mask = block_causal_mask(batch["document_ids"])
        return partial(scaled_dot_product_attention, attn_mask=mask)
    if kind == "causal":
        return causal
    lengths = batch["cu_seqlens"].diff().tolist()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(*(heads.split(lengths, dim=2) for heads in (query, key, value)), strict=True)
        return torch.cat([causal(*part) for part in parts], dim=2)

    return attend


class Block(nn.Module):
    """Attention and a feed-forward layer, each on what the sum so far holds."""

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
        seen = attend(rotate(heads[0], angles), rotate(heads[1], angles), heads[2])
        hidden = hidden + self.attended(seen.transpose(1, 2).flatten(2))
        output: Tensor = hidden + self.feed_forward(hidden)
        return output


class Decoder(nn.Module):
    """A small decoder with rotary embeddings, whose attention comes from outside."""

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
