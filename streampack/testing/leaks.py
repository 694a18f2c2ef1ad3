"""Leak test for models trained on packs: do tokens attend across segment edges?

::

    packed     a0 a1 a2 | b0 b1 | pad        one forward pass with mask and positions
    alone      a0 a1 a2                      a pass for each segment by itself
               b0 b1
    law        equal logits, token by token

To know what a real change is, the tokens before a segment's last one are replaced. Weak leaks, such
as those of short convolutions at their initial weights, show if every second segment is replaced,
then the others.

Cost: three forward passes of the batch, one for each of its segments, and one for each of the
4 longest; after a failure, one of the batch for each segment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch

from streampack.batch.formats.huggingface import to_hf
from streampack.batch.formats.registry import BatchFormat, Formatter, get_format
from streampack.batch.layout import CARRIED, check_native, unpad
from streampack.errors import ConfigError

LogitsOf: TypeAlias = Callable[[dict[str, Any]], torch.Tensor]
MAX_NAMED = 3  # leaking segments listed in a message
MAX_MEASURED = 4  # segments that get another context to measure a real change
ROUNDING = 8.0  # bound of a logit's rounding error, in units of epsilon times the largest logit
LEAST_SHARE = 1e-3  # fraction of a real change that counts as a difference from the segment alone
LEAST_LEAK = 1e-5  # the same between passes of one shape, which differ by far less if none leaks
LEAST_CONTRAST = 4.0  # least ratio of a real change to the tolerance for a meaningful check

DIFFERS = "differ by {:.3g} from those of the same tokens alone"
MOVES = "change by {:.3g} if tokens of other segments are replaced"


class InconclusiveError(ConfigError):
    """A leak could not have been seen, in this batch or in the logits of this model."""


class LeakError(AssertionError):
    """A segment's logits are not those that it has alone."""


def assert_no_leak(
    model: Callable[..., Any],
    batch: dict[str, Any],
    *,
    atol: float | None = None,
    batch_format: BatchFormat = "hf",
) -> None:
    """Check that a segment's logits are the same in its pack as alone.

    Args:
        model: A causal model of transformers, which is called as
            ``model(**to_hf(batch)).logits``, also in a wrapper of peft, DistributedDataParallel or
            torch.compile; or any function of the batch that returns logits, shape (B, S,
            vocabulary). In eval mode: with dropout, any two passes differ.
        batch: A native batch, on the model's device.
        atol: Largest difference of a logit that counts as rounding. None: 8 times the epsilon of
            the model's dtype times the largest logit. Weaker leaks go unnoticed, so check a
            bfloat16 model as ``model.float()``, without TF32. Differences below a fraction of a
            real change within a segment are rounding too: a thousandth against the segment alone, a
            hundred-thousandth if other segments are replaced.
        batch_format: How batches are passed to a transformers model: "hf", "hf_flash" for flash
            attention, or a function that keeps the B * S tokens in their order.

    Raises:
        LeakError: An AssertionError, if a segment's logits differ, or change with other segments.
            Names its row, stream and sample, and the segments that leaked into it, or reports that
            positions are ignored; for a model of transformers also a way out that was tried.
        ConfigError: If the model is neither.
        InconclusiveError: A ConfigError, if no row has two segments, or replacing tokens hardly
            changes the logits.
    """
    check_native(batch, "assert_no_leak")
    _check_edges(batch)
    try:
        _check(model, batch, get_format(batch_format), atol)
    except LeakError as error:
        if not hasattr(model, "config"):
            raise
        raise LeakError(f"{error}. {_way_out(model, batch, atol)}") from error


def _check(
    model: Callable[..., Any], batch: dict[str, Any], convert: Formatter, atol: float | None
) -> None:
    logits_of = _logits_of(model, convert)
    with torch.no_grad():
        packed = logits_of(batch)
        rounding = _rounding(model, packed) if atol is None else atol
        _check_logits(logits_of, batch, packed, rounding)


def _way_out(model: Any, batch: dict[str, Any], atol: float | None) -> str:
    """Return what keeps samples apart in a model of transformers: the 4-D mask only if it does."""
    options: dict[str, Any] = {"dense": True}
    if (dtype := next(model.parameters()).dtype) != torch.float32:
        options["dtype"] = dtype
    tried = ""
    with suppress(Exception):  # a leak too, or what the model raises where it takes no such mask
        _check(model, batch, partial(to_hf, **options), atol)
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        tried = f"batch_format=functools.partial(streampack.formats.to_hf, {given}), which keeps "
        tried += "them apart, or "
    return (
        f"Use {tried}Packing(max_samples_per_pack=1); docs/architectures.md has what was measured "
        "with other attention and versions of transformers"
    )


def _check_logits(
    logits_of: LogitsOf, batch: dict[str, Any], packed: torch.Tensor, rounding: float
) -> None:
    differences, change = _compare(logits_of, batch, packed)
    tolerance = max(rounding, LEAST_SHARE * change)
    is_conclusive = change > LEAST_CONTRAST * tolerance
    # In an inconclusive check, a difference far beyond rounding is still a failure.
    limit = tolerance if is_conclusive else LEAST_CONTRAST * tolerance
    # TF32 rounds so much more that experts could be accused.
    is_exact = torch.get_float32_matmul_precision() == "highest"
    least = max(rounding, (LEAST_LEAK if is_exact else LEAST_SHARE) * change)
    found = [(value, limit, tolerance, DIFFERS) for value in differences]
    found += [(value, least, least, MOVES) for value in _moved_by_others(logits_of, batch, packed)]
    for number, (value, most, atol, what) in enumerate(found):
        # Negated, so that a NaN fails too.
        if not value <= most:
            number %= len(differences)
            why = _why(logits_of, batch, packed, number, atol)
            raise LeakError(
                f"{_name(batch, number)} have logits that {what.format(value)}, more than "
                f"atol={atol:.3g}; {why}"
            )
    if not is_conclusive:
        raise InconclusiveError(
            "the check is inconclusive: replacing the tokens before a segment's last one moves its "
            f"logits by {change:.3g}, which must be more than {LEAST_CONTRAST:g} times the "
            f"rounding error, {tolerance:.3g}; is the head zero, or are the weights too "
            "small? Use larger weights, or check in a finer type: model.float(), model.double()"
        )


def _check_edges(batch: dict[str, Any]) -> None:
    rows, lengths = batch["segments"][:, 0], batch["segments"][:, 5]
    most = int(rows.bincount().max()) if len(rows) else 0
    if most < 2:
        raise InconclusiveError(
            "the check is inconclusive: no row of the batch has two segments "
            f"({len(rows)} segments in {len(batch['tokens'])} rows), so no edge can leak; take a "
            "batch of shorter samples or a larger max_seq_len"
        )
    if int(lengths.max()) < 2:
        raise InconclusiveError(
            f"the check is inconclusive: each of {len(rows)} segments has a single token, so no "
            "earlier token can change its logits; take a batch with longer samples"
        )


def _rounding(model: Callable[..., Any], logits: torch.Tensor) -> float:
    """Return the bound of a logit's rounding error, from the coarsest dtype involved."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    dtypes = {logits.dtype} | {one.dtype for one in parameters if one.dtype.is_floating_point}
    if torch.is_autocast_enabled(logits.device.type):
        dtypes.add(torch.get_autocast_dtype(logits.device.type))
    epsilon = max(torch.finfo(dtype).eps for dtype in dtypes)
    return ROUNDING * epsilon * float(logits.abs().max())


def _compare(
    logits_of: LogitsOf, batch: dict[str, Any], packed: torch.Tensor
) -> tuple[list[float], float]:
    """Compare the logits of each segment in its pack and alone, and measure a real change.

    Returns:
        The difference of each segment's logits, and the largest change of a last token's logits
        when the tokens before it are replaced. The last token stays: a leak is between tokens.
    """
    lengths = batch["segments"][:, 5]
    measured = set(lengths.argsort(descending=True, stable=True)[:MAX_MEASURED].tolist())
    differences, change = [], 0.0
    for number, inside in enumerate(_tokens_of_segments(batch)):
        alone = logits_of(_alone(batch, number, inside))[0]
        differences.append(_difference(packed.flatten(0, 1)[inside], alone))
        if number in measured and len(inside) > 1:
            changed = _with_other_tokens(batch, inside[:-1])
            other = logits_of(_alone(changed, number, inside))[0]
            change = max(change, _difference(alone[-1], other[-1]))
    return differences, change


def _moved_by_others(
    logits_of: LogitsOf, batch: dict[str, Any], packed: torch.Tensor
) -> list[float]:
    tokens = _tokens_of_segments(batch)
    moved = [0.0] * len(tokens)
    for first in (0, 1):
        changed = _with_other_tokens(batch, torch.cat(tokens[1 - first :: 2]))
        logits = logits_of(changed).flatten(0, 1)
        for number in range(first, len(tokens), 2):
            inside = tokens[number]
            moved[number] = _difference(packed.flatten(0, 1)[inside], logits[inside])
    return moved


def _logits_of(model: Callable[..., Any], convert: Formatter) -> LogitsOf:
    if not _is_of_transformers(model):
        return model

    def logits_of(batch: dict[str, Any]) -> torch.Tensor:
        inputs = {key: value for key, value in convert(batch).items() if key not in CARRIED}
        logits: torch.Tensor = model(**inputs).logits
        return logits.view(*batch["tokens"].shape, -1)  # "hf_flash" has all packs in one row

    return logits_of


def _is_of_transformers(model: Callable[..., Any]) -> bool:
    """Return whether a model is one of transformers, and not a function of a batch."""
    names = inspect.signature(getattr(model, "forward", model)).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in names.values())
    inner = _inner(model) if takes_any and "position_ids" not in names else None
    if inner is not None:
        return _is_of_transformers(inner)
    if "input_ids" in names:
        if "position_ids" not in names:
            raise ConfigError(
                f"{type(model).__name__} takes input_ids but no position_ids, so it cannot know "
                "where a sample begins and would attend across edges; take one sample in a row, "
                "Packing(max_samples_per_pack=1), train another model on packs, or pass a function "
                "of the batch that gives it a mask"
            )
        return True
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = [each for each in names.values() if each.kind not in variable]
    if "mask" in names or sum(each.default is each.empty for each in own) != 1:
        raise ConfigError(
            f"assert_no_leak cannot call a model with the arguments {', '.join(names)}; pass a "
            "function that takes the batch and returns logits"
        )
    return False


def _inner(model: Any) -> Any:
    """Return the model in a wrapper of peft, DistributedDataParallel or torch.compile; or None."""
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    return getattr(model, "module", getattr(model, "_orig_mod", None))


def _tokens_of_segments(batch: dict[str, Any]) -> list[torch.Tensor]:
    return list(unpad(batch)["indices"].split(batch["segments"][:, 5].tolist()))


def _alone(batch: dict[str, Any], number: int, inside: torch.Tensor) -> dict[str, Any]:
    length = len(inside)
    segment = batch["segments"][number : number + 1].clone()
    segment[:, 0] = 0
    return {
        **{key: batch[key].flatten()[inside][None] for key in ("tokens", "labels", "input_pos")},
        "document_ids": torch.ones_like(batch["document_ids"].flatten()[inside][None]),
        "cu_seqlens": torch.tensor([0, length], dtype=torch.int32, device=inside.device),
        "max_seqlen": length,
        "segments": segment,
        **{key: batch[key] for key in CARRIED},
    }


def _name(batch: dict[str, Any], number: int) -> str:
    row, stream, _, sample, start, length = batch["segments"][number].tolist()
    return f"row {row}: tokens {start} to {start + length} of stream {stream}, sample {sample}"


def _why(
    logits_of: LogitsOf, batch: dict[str, Any], packed: torch.Tensor, number: int, tolerance: float
) -> str:
    if bool(packed.isnan().any()):
        return "the model's logits are NaN"
    if _difference(packed, logits_of(batch)) > tolerance:
        return (
            "two passes of the same batch differ, so the check is inconclusive: call model.eval()"
        )
    tokens = _tokens_of_segments(batch)
    inside = tokens[number]
    expected = packed.flatten(0, 1)[inside]
    # The other segments: those of the same row by distance, then those of other rows.
    rows = batch["segments"][:, 0].tolist()
    others = sorted(range(len(rows)), key=lambda k: (rows[k] != rows[number], abs(k - number)))[1:]
    seen = []
    for other in others:
        changed = _with_other_tokens(batch, tokens[other])
        if _difference(expected, logits_of(changed).flatten(0, 1)[inside]) > tolerance:
            seen.append(_name(batch, other))
        if len(seen) == MAX_NAMED:
            break
    reasons = [f"the segment saw {name}" for name in seen]
    # Different positions that still begin with 0 and fit any position table.
    halved = batch | {"input_pos": batch["input_pos"] // 2}
    differs = not torch.equal(halved["input_pos"], batch["input_pos"])
    if differs and _difference(packed, logits_of(halved)) <= tolerance:
        reasons.append("the model ignores input_pos: its logits are the same with others")
    elif not seen:
        reasons.append("the segment saw no other, so the model does not use input_pos correctly")
    return "; ".join(reasons)


def _with_other_tokens(batch: dict[str, Any], inside: torch.Tensor) -> dict[str, Any]:
    known = batch["tokens"].unique()  # sorted
    if len(known) == 1:
        known = torch.cat([known, known ^ 1])
    tokens = batch["tokens"].clone()
    flat = tokens.view(-1)
    places = (known[None] == flat[inside][:, None]).int().argmax(1)
    flat[inside] = known[(places + 1) % len(known)]
    return batch | {"tokens": tokens}


def _difference(before: torch.Tensor, after: torch.Tensor) -> float:
    return float((before - after).abs().max())
