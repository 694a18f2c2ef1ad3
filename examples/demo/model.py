"""The demo's model: a decoder of a few layers that reads packs.

::

    tokens       (B, S)   input tokens
    input_pos    (B, S)   position of each token in its document: rotary embedding
    document_ids (B, S)   document of each token: the mask of scaled dot product attention

It has about 900,000 weights, over half of them in the token embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from streampack import block_causal_mask
from streampack.types import IGNORED

ROTARY_BASE = 10_000.0


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

    def forward(self, hidden: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        batch, length, dim = hidden.shape
        # (B, S, 3 * dim) -> 3 x (B, heads, S, dim of a head)
        heads = self.query_key_value(self.before_attention(hidden))
        heads = heads.view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = rotate(heads[0], angles), rotate(heads[1], angles), heads[2]
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + self.attended(seen.transpose(1, 2).reshape(batch, length, dim))
        output: Tensor = hidden + self.feed_forward(hidden)
        return output


class SmallDecoder(nn.Module):
    """A decoder of a few layers that reads packs."""

    speeds: Tensor
    """Rotary frequencies in radians per position, shape (half of a head,)."""

    def __init__(
        self, vocabulary: int, *, dim: int = 128, num_layers: int = 2, num_heads: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim)
        half = dim // num_heads // 2
        self.register_buffer("speeds", ROTARY_BASE ** (-torch.arange(half) / half))

    def forward(self, tokens: Tensor, input_pos: Tensor, document_ids: Tensor) -> Tensor:
        mask = block_causal_mask(document_ids)  # (B, 1, S, S)
        angles = input_pos[:, None, :, None] * self.speeds  # (B, 1, S, half of a head)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, angles, mask)
        logits: Tensor = self.norm(hidden) @ self.embedding.weight.T
        return logits


def rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary embedding: rotate each pair of values by its angle; (B, heads, S, head)."""
    one, other = heads.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over the targets; labels are already shifted."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
