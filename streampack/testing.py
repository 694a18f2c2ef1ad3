"""Checks for those who train on packs: does my model see over the edge of a segment?

::

    packed     a0 a1 a2 | b0 b1 | pad        one forward pass with mask and positions
    alone      a0 a1 a2                      a pass for each segment by itself
               b0 b1
    law        equal logits, token by token

Where they differ, the tokens of every other segment are changed in turn: the one whose change moves
the logits is the one that was seen.

Cost: one forward pass of the batch, and one for each of its segments; after a failure, one of the
batch for each segment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias

import torch

from streampack.assemble import block_causal_mask, dense_mask, segment_starts, to_hf
from streampack.config import check_choice
from streampack.errors import ConfigError

__all__ = ["Decoder", "LogitsOf", "assert_no_leak"]

Style = Literal["hf", "torchtune", "decoder", "batch"]
LogitsOf: TypeAlias = Callable[[dict[str, Any]], torch.Tensor]
MAX_NAMED = 3  # segments that a message names as seen


class Decoder(Protocol):
    """A causal language model that takes positions and a mask."""

    def __call__(
        self, tokens: torch.Tensor, *, mask: torch.Tensor, input_pos: torch.Tensor
    ) -> torch.Tensor:
        """Return logits, shape (B, S, vocabulary).

        Args:
            tokens: int64, shape (B, S).
            mask: True where query i sees key j, bool, shape (B, 1, S, S).
            input_pos: int64, shape (B, S).
        """


def assert_no_leak(
    model: Decoder | Callable[..., Any],
    batch: dict[str, Any],
    *,
    atol: float = 1e-5,
    style: Style | None = None,
) -> None:
    """Check that a model gives a segment the same logits in its pack as alone.

    Args:
        model: The model, in eval mode: dropout would make any two passes differ.
        batch: A native batch, on the model's device.
        atol: Largest difference of a logit that rounding may make.
        style: How the model is called; None: what the names of its arguments say.

            - "hf": ``model(**to_hf(batch)).logits``, a causal model of transformers
            - "torchtune": ``model(tokens, mask=(B, S, S), input_pos=...)``
            - "decoder": the same with a mask of shape (B, 1, S, S)
            - "batch": ``model(batch)`` returns logits, shape (B, S, vocabulary): any function

    Raises:
        AssertionError: Naming row, stream and sample of the first segment that differs, and which
            segments it saw; or that its positions are ignored.
        ConfigError: If the arguments' names do not tell how to call the model.
    """
    logits_of = _logits_of(model, style)
    with torch.no_grad():
        packed = logits_of(batch)
        for number, start in enumerate(segment_starts(batch).tolist()):
            inside = _tokens_of(batch, number, start)
            alone = logits_of(_alone(batch, number, inside))[0]
            difference = float((packed.flatten(0, 1)[inside] - alone).abs().max())
            # Written so that a NaN fails too.
            if not difference <= atol:
                why = _why(logits_of, batch, packed, number, atol)
                raise AssertionError(
                    f"{_name(batch, number)} have logits that differ by {difference:.3g} from "
                    f"those of the same tokens alone, more than atol={atol}; {why}"
                )


def _logits_of(model: Callable[..., Any], style: Style | None) -> LogitsOf:
    """Return a function from a native batch to logits."""
    if style is None:
        style = _guess_style(model)
    check_choice("style", style, Style)
    if style == "hf":
        return lambda batch: model(**to_hf(batch)).logits
    if style == "batch":
        return model
    make_mask = dense_mask if style == "torchtune" else block_causal_mask
    return lambda batch: model(
        batch["tokens"], mask=make_mask(batch["document_ids"]), input_pos=batch["input_pos"]
    )


def _guess_style(model: Callable[..., Any]) -> Style:
    """Tell from the names of its arguments how a model is called.

    Raises:
        ConfigError: If they do not tell.
    """
    names = inspect.signature(getattr(model, "forward", model)).parameters
    required = [
        name
        for name, parameter in names.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if "input_ids" in names:
        if "position_ids" not in names:
            raise ConfigError(
                f"{type(model).__name__} takes input_ids but no position_ids, so it cannot know "
                "where a sample begins and would see over the edges of packs; train another model "
                "on packs, or pass style='batch' with a function that gives it a mask"
            )
        return "hf"
    if {"tokens", "mask", "input_pos"} <= set(names):
        return "torchtune" if "encoder_input" in names else "decoder"
    if len(required) == 1:
        return "batch"
    raise ConfigError(
        f"a model with the arguments {', '.join(names)} is none that assert_no_leak knows how to "
        "call; pass a function that takes the batch and returns logits"
    )


def _tokens_of(batch: dict[str, Any], number: int, start: int) -> torch.Tensor:
    """Return where the tokens of a segment lie in the B * S, without its padding; (length,)."""
    length = int(batch["segments"][number, 5])
    return torch.arange(start, start + length, device=batch["tokens"].device)


def _alone(batch: dict[str, Any], number: int, inside: torch.Tensor) -> dict[str, Any]:
    """Return a native batch of one segment and nothing else, B = 1."""
    length = len(inside)
    segment = batch["segments"][number : number + 1].clone()
    segment[:, 0] = 0
    return {
        **{key: batch[key].flatten()[inside][None] for key in ("tokens", "labels", "input_pos")},
        "document_ids": torch.ones_like(batch["document_ids"].flatten()[inside][None]),
        "cu_seqlens": torch.tensor([0, length], dtype=torch.int32, device=inside.device),
        "max_seqlen": length,
        "segments": segment,
        "epoch": batch["epoch"],
        "position": batch["position"],
    }


def _name(batch: dict[str, Any], number: int) -> str:
    """Name a segment by what it is."""
    row, stream, _, sample, start, length = batch["segments"][number].tolist()
    return f"row {row}: tokens {start} to {start + length} of stream {stream}, sample {sample}"


def _why(
    logits_of: LogitsOf, batch: dict[str, Any], packed: torch.Tensor, number: int, atol: float
) -> str:
    """Say why a segment's logits are not those that it has alone."""
    if bool(packed.isnan().any()):
        return "the model's logits are NaN"
    if _moved(packed, logits_of(batch)) > atol:
        return "two passes of the same batch differ, so nothing can be told: call model.eval()"
    starts = segment_starts(batch).tolist()
    inside = _tokens_of(batch, number, starts[number])
    own = packed.flatten(0, 1)[inside]
    seen = []
    for other in _nearest_first(batch, number):
        changed = _with_other_tokens(batch, _tokens_of(batch, other, starts[other]))
        if _moved(own, logits_of(changed).flatten(0, 1)[inside]) > atol:
            seen.append(_name(batch, other))
        if len(seen) == MAX_NAMED:
            break
    reasons = [f"the segment saw {name}" for name in seen]
    # Other positions that begin with 0 as well, and lie in every table of positions.
    halved = batch | {"input_pos": batch["input_pos"] // 2}
    is_other = not torch.equal(halved["input_pos"], batch["input_pos"])
    if is_other and _moved(packed, logits_of(halved)) <= atol:
        reasons.append("the model ignores input_pos: its logits are the same with others")
    elif not seen:
        reasons.append("the segment saw no other, so the model does not use input_pos as it should")
    return "; ".join(reasons)


def _nearest_first(batch: dict[str, Any], number: int) -> list[int]:
    """Return the other segments: those of the row from the nearest on, then those of others."""
    rows = batch["segments"][:, 0].tolist()
    others = [other for other in range(len(rows)) if other != number]
    return sorted(others, key=lambda k: (rows[k] != rows[number], abs(k - number)))


def _with_other_tokens(batch: dict[str, Any], inside: torch.Tensor) -> dict[str, Any]:
    """Return the batch with every one of these tokens another, of those that the batch has."""
    known = batch["tokens"].unique()  # sorted
    if len(known) == 1:
        known = torch.cat([known, known ^ 1])
    tokens = batch["tokens"].clone()
    flat = tokens.view(-1)
    places = (known[None] == flat[inside][:, None]).int().argmax(1)
    flat[inside] = known[(places + 1) % len(known)]
    return batch | {"tokens": tokens}


def _moved(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the largest difference."""
    return float((before - after).abs().max())
