"""How much of each stream an epoch takes: MosaicML Streaming's weights as pure functions.

::

    proportion  2 : 6     over streams of 100 + 200 samples   ->   75, 225      (relative)
    repeat      3, 0.25                                       ->  300,  50      (absolute)
    choose      250, -                                        ->  250, 200      (absolute)

Relative and absolute weights do not mix. A weight is any real number, read exactly as it is
written: 0.29, Decimal("0.29") and Fraction(29, 100) are the same. Nothing is written back to the
streams, so the same objects can be used again. Cost: O(streams).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import Any, Literal

import numpy as np

from streampack.errors import ConfigError
from streampack.mix.apportion import largest_remainders

__all__ = ["Quota", "Weight", "check_weights", "exact_share", "resolve_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """What a stream asks for: at most one of the three; none of them is ``repeat=1``."""

    name: str
    """The stream, for messages."""
    proportion: float | Fraction | Decimal | None = None
    """Share relative to the other streams' proportions."""
    repeat: float | Fraction | Decimal | None = None
    """Times to take the stream in an epoch."""
    choose: int | None = None
    """Samples (or tokens, by weight_unit) to take in an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What an epoch takes of one stream."""

    amount: int
    """How many."""
    unit: Literal["samples", "tokens"] = "samples"
    """Of what."""


def check_weights(weights: Sequence[Weight]) -> None:
    """Refuse weights that mean nothing, alone or together.

    Raises:
        ConfigError: Naming the stream, the value and the way out.
    """
    if not weights:
        raise ConfigError("streams=[] is empty; pass at least one Stream")
    for number, weight in enumerate(weights):
        asked = {
            key: value
            for key in ("proportion", "repeat", "choose")
            if (value := getattr(weight, key)) is not None
        }
        if len(asked) > 1:
            raise ConfigError(
                f"stream {number} ({weight.name!r}) sets {' and '.join(asked)}; "
                "set at most one of proportion, repeat and choose"
            )
        for key, value in asked.items():
            shown = repr(value) if isinstance(value, str) else str(value)
            _check_value(f"stream {number} ({weight.name!r}): {key}={shown}", key, value)
    relative = [weight.proportion is not None for weight in weights]
    if any(relative) and not all(relative):
        number = relative.index(False)
        raise ConfigError(
            f"stream {number} ({weights[number].name!r}) has no proportion, but others have one; "
            "every stream must use proportion, or none"
        )
    if all(relative) and not any(weight.proportion for weight in weights):
        raise ConfigError(f"all {len(weights)} proportions are 0; give at least one stream more")


def _check_value(what: str, key: str, value: object) -> None:
    """Refuse a weight that is no finite number of at least 0, and a part of a chosen sample."""
    try:
        exact = exact_share(value)
    except (OverflowError, TypeError, ValueError):  # inf, no number at all, nan
        raise ConfigError(f"{what} must be a number of at least 0, such as 0.5 or 2") from None
    if exact < 0:
        raise ConfigError(f"{what} must be a number of at least 0; 0 leaves the stream out")
    if key == "choose" and exact.denominator != 1:
        raise ConfigError(
            f"{what} must be a whole number of samples (or tokens); round it, or use repeat"
        )


def exact_share(value: object) -> Fraction:
    """Read a number as it is written: 0.29 is 29/100, not the float beside it.

    Raises:
        TypeError: If it is no real number; a bool and text are none.
        ValueError: If it is nan.
        OverflowError: If it is infinite.

    >>> exact_share(0.29) == exact_share(np.float32(0.29)) == Fraction(29, 100)
    True
    """
    match value:
        case bool():
            raise TypeError(f"{value} is no number")
        case Integral():
            return Fraction(int(value))  # numpy's own integers would wrap around
        case Rational() | Decimal():
            return Fraction(value)
        case np.floating():
            return Fraction(str(value))  # the fewest digits that mean this number in its own width
        case Real():
            return Fraction(repr(float(value)))
    raise TypeError(f"{value!r} is no number")


def _relative(total: int, shares: Sequence[Any], arithmetic: str, seed: int) -> list[int]:
    """Split an epoch of `total` by relative `shares`."""
    if arithmetic == "exact":
        exact = [exact_share(share) for share in shares]
        whole = sum(exact)
        return largest_remainders(total, [share / whole for share in exact])
    # MosaicML Streaming 0.13: floors of float64 products, the shortfall to streams drawn by chance.
    normal = np.array(shares, np.float64)
    normal /= normal.sum()
    counts = (total * normal).astype(np.int64)
    lucky = np.random.default_rng(seed).choice(len(counts), total - counts.sum(), False)
    counts[lucky] += 1
    return [int(count) for count in counts]


def _absolute(weight: Weight, num_samples: int, unit: str, arithmetic: str) -> Quota:
    """Return what a stream with repeat, choose or nothing asks for."""
    if weight.choose is not None:
        return Quota(amount=int(weight.choose), unit="tokens" if unit == "tokens" else "samples")
    if weight.repeat is None:
        return Quota(amount=num_samples)
    if arithmetic == "mosaicml":
        repeat = int(weight.repeat) if isinstance(weight.repeat, Integral) else weight.repeat
        return Quota(amount=int(repeat * int(num_samples)))
    return Quota(amount=int(exact_share(weight.repeat) * int(num_samples)))


def resolve_weights(
    weights: Sequence[Weight],
    sizes: Sequence[tuple[int, int]],
    *,
    epoch_size: int | None = None,
    unit: str = "samples",
    arithmetic: str = "exact",
    seed: int = 0,
) -> tuple[Quota, ...]:
    """Return what an epoch takes of each stream.

    Args:
        weights: What each stream asks for.
        sizes: Samples and tokens that each stream holds.
        epoch_size: Samples (or tokens) of an epoch, for relative weights or none.
        unit: What proportion, choose and epoch_size count, "samples" or "tokens".
        arithmetic: "exact", or "mosaicml" for that library's rounding, bit for bit.
        seed: Only "mosaicml" uses it, to hand out the shortfall.

    Raises:
        ConfigError: If the weights do not fit together, or nothing would be chosen.

    >>> pair = [Weight(name="a", proportion=2), Weight(name="b", proportion=6)]
    >>> [quota.amount for quota in resolve_weights(pair, [(100, 0), (200, 0)])]
    [75, 225]
    """
    check_weights(weights)
    held = [tokens if unit == "tokens" else samples for samples, tokens in sizes]
    proportions = [weight.proportion for weight in weights]
    plain = all(weight.repeat is None and weight.choose is None for weight in weights)
    relative: Sequence[Any] | None = None
    if all(proportion is not None for proportion in proportions):
        relative = [proportion for proportion in proportions if proportion is not None]
    elif plain and epoch_size is not None:
        relative = held
    if relative is not None:
        amounts = _relative(epoch_size or sum(held), relative, arithmetic, seed)
        kind: Literal["samples", "tokens"] = "tokens" if unit == "tokens" else "samples"
        quotas = tuple(Quota(amount=amount, unit=kind) for amount in amounts)
    elif epoch_size is not None:
        raise ConfigError(
            f"epoch_size={epoch_size} needs proportions, but the streams set repeat or choose; "
            "leave epoch_size out, or use proportion"
        )
    else:
        quotas = tuple(
            _absolute(weight, samples, unit, arithmetic)
            for weight, (samples, _) in zip(weights, sizes, strict=True)
        )
    if not any(quota.amount for quota in quotas):
        raise ConfigError(
            f"the weights choose 0 {unit} of {len(weights)} streams; "
            "raise repeat, choose or epoch_size"
        )
    return quotas
