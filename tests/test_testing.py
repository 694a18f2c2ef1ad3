"""The leak check, with a decoder that is right and with three that are wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from streampack.assemble import make_batch
from streampack.read import Rows
from streampack.testing import assert_no_leak
from streampack.types import Packs

VOCABULARY, DIM, HEADS, MAX_POSITION = 50, 32, 4, 64


class TinyDecoder(nn.Module):
    """Two layers of attention and nothing else that matters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.positions = nn.Embedding(MAX_POSITION, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(2))
        self.out = nn.Linear(DIM, VOCABULARY)

    def forward(
        self, tokens: torch.Tensor, *, mask: torch.Tensor, input_pos: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions(input_pos)  # (B, S, DIM)
        for layer in self.layers:
            heads = layer(hidden).unflatten(-1, (3, HEADS, DIM // HEADS))
            query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, HEADS, S, DIM / HEADS)
            seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            hidden = hidden + seen.transpose(1, 2).flatten(2)
        return self.out(hidden)


class SeesAll(TinyDecoder):
    """Attends causally over the whole pack."""

    def forward(
        self, tokens: torch.Tensor, *, mask: torch.Tensor, input_pos: torch.Tensor
    ) -> torch.Tensor:
        return super().forward(tokens, mask=torch.ones_like(mask).tril(), input_pos=input_pos)


class CountsOn(TinyDecoder):
    """Numbers the pack's tokens, not the segment's."""

    def forward(
        self, tokens: torch.Tensor, *, mask: torch.Tensor, input_pos: torch.Tensor
    ) -> torch.Tensor:
        on = torch.arange(tokens.shape[1]).expand_as(input_pos)
        return super().forward(tokens, mask=mask, input_pos=on)


class IsNan(TinyDecoder):
    """Broken altogether."""

    def forward(
        self, tokens: torch.Tensor, *, mask: torch.Tensor, input_pos: torch.Tensor
    ) -> torch.Tensor:
        return super().forward(tokens, mask=mask, input_pos=input_pos) * float("nan")


def packed(positions: str) -> dict[str, Any]:
    """Two packs and a padding pack of 24 tokens: whole samples, a cut one, its rest, padding."""
    segments = [[0, 0, 0, 0, 7, 7], [1, 0, 3, 0, 12, 12], [0, 0, 1, 0, 5, 14]]
    segments += [[0, 0, 1, 5, 9, 14], [1, 0, 4, 0, 1, 1]]
    packs = Packs(segments=np.array(segments), ends=np.array([3, 5]))
    tokens = np.random.Generator(np.random.Philox(3)).integers(1, VOCABULARY, (3, 24))
    tokens[1, 10:] = 0
    tokens[2] = 0
    next_tokens = np.array([-100, -100, tokens[1, 0], -100, -100])
    rows = Rows(tokens=tokens, next_tokens=next_tokens, labels=None)
    return make_batch(rows, packs, epoch=0, position=2, positions=positions)


@pytest.mark.parametrize("positions", ["restart", "continue"])
def test_packed_logits_equal_unpacked_logits(positions: str) -> None:
    assert_no_leak(TinyDecoder(), packed(positions), atol=1e-5)


@pytest.mark.parametrize("model", [SeesAll(), CountsOn()])
def test_a_model_that_sees_over_the_edge_is_caught_at_the_first_segment_it_shows(
    model: TinyDecoder,
) -> None:
    with pytest.raises(AssertionError, match=r"row 0: tokens 0 to 12 of stream 1, sample 3 .*atol"):
        assert_no_leak(model, packed("restart"))


def test_logits_that_are_nan_are_caught() -> None:
    with pytest.raises(AssertionError, match="differ by nan"):
        assert_no_leak(IsNan(), packed("restart"))


def test_the_summed_loss_of_packs_is_that_of_their_segments_alone() -> None:
    model, batch = TinyDecoder(), packed("restart")
    ones = torch.ones(1, 1, 24, 24, dtype=torch.bool)
    with torch.no_grad():
        mask = batch["document_ids"][:, None, :, None] == batch["document_ids"][:, None, None]
        logits = model(batch["tokens"], mask=mask & ones.tril(), input_pos=batch["input_pos"])
        together = functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )
        apart = torch.zeros(())
        for row, first, last, follows in [
            (0, 0, 7, 0),
            (0, 7, 19, 0),
            (0, 19, 24, 1),
            (1, 0, 9, 0),
        ]:
            tokens = batch["tokens"][row : row + 1, first:last]
            targets = torch.full((last - first,), -100)
            targets[:-1] = tokens[0, 1:]
            if follows:
                targets[-1] = batch["tokens"][1, 0]
            size = last - first
            out = model(
                tokens, mask=ones[:, :, :size, :size].tril(), input_pos=torch.arange(size)[None]
            )
            apart += functional.cross_entropy(out[0], targets, reduction="sum")
    assert float((together - apart).abs()) < 1e-3
