"""Checks for those who train on packs: does my model see over the edge of a segment?

::

    packed     a0 a1 a2 | b0 b1 | pad        one forward pass with mask and positions
    alone      a0 a1 a2                      a pass for each segment by itself
               b0 b1
    law        equal logits, token by token

Cost: one forward pass of the batch, and one for each of its segments.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from streampack.assemble.masks import block_causal_mask

__all__ = ["Decoder", "assert_no_leak"]


class Decoder(Protocol):
    """A causal language model that takes positions and a mask, as torchtune's decoders do."""

    def __call__(
        self, tokens: torch.Tensor, *, mask: torch.Tensor, input_pos: torch.Tensor
    ) -> torch.Tensor:
        """Return logits, shape (B, S, vocabulary).

        Args:
            tokens: int64, shape (B, S).
            mask: True where query i sees key j, bool, shape (B, 1, S, S).
            input_pos: int64, shape (B, S).
        """


def assert_no_leak(model: Decoder, batch: dict[str, Any], *, atol: float = 1e-5) -> None:
    """Check that a model gives a segment the same logits in its pack as alone.

    Args:
        model: The model, in eval mode: dropout would make any two passes differ.
        batch: A native batch; the keys used are tokens, input_pos, document_ids and segments.
        atol: Largest difference of a logit that rounding may make.

    Raises:
        AssertionError: Naming row, stream and sample of the first segment that differs.
    """
    document_ids = batch["document_ids"]
    with torch.no_grad():
        packed = model(
            batch["tokens"], mask=block_causal_mask(document_ids), input_pos=batch["input_pos"]
        )
        seen: dict[int, int] = {}
        for row, stream, _, sample, start, length in batch["segments"].tolist():
            seen[row] = seen.get(row, 0) + 1
            inside = document_ids[row] == seen[row]  # (S,)
            tokens = batch["tokens"][row, inside][None]  # (1, length)
            alone = model(
                tokens,
                mask=block_causal_mask(torch.ones_like(tokens)),
                input_pos=batch["input_pos"][row, inside][None],
            )
            difference = float((packed[row, inside] - alone[0]).abs().max())
            # Written so that a NaN fails too.
            if not difference <= atol:
                raise AssertionError(
                    f"row {row}: tokens {start} to {start + length} of stream {stream}, sample "
                    f"{sample} have logits that differ by {difference:.3g} from those of the same "
                    f"tokens alone, more than atol={atol}; the model attends outside the segment "
                    "or does not use input_pos"
                )
