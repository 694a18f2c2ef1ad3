"""How much of each stream an epoch takes: MosaicML Streaming's weights as pure functions.

::

    proportion  2 : 6     over streams of 100 + 200 samples   ->   75, 225      (relative)
    repeat      3, 0.25                                       ->  300,  50      (absolute)
    choose      250, -                                        ->  250, 200      (absolute)

Relative and absolute weights cannot be combined. A weight is any real number and is read as the
decimal it was written as: 0.29, Decimal("0.29") and Fraction(29, 100) are equal. The stream objects
are not modified, so they can be reused. Cost: O(streams).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import Any

import numpy as np

from streampack._checks import MAX_COUNT, show_number
from streampack.config.mixing import WeightUnit
from streampack.errors import ConfigError
from streampack.mix.apportion import largest_remainders

MAX_DIGITS = 400
LEAST_WEIGHT = Fraction(5e-324)  # smallest positive float


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """The weight of a stream: at most one of the three. None of them means ``repeat=1``."""

    name: str
    """Name of the stream, for messages."""
    proportion: float | Fraction | Decimal | None = None
    """Share relative to the other streams' proportions."""
    repeat: float | Fraction | Decimal | None = None
    """Passes through the stream per epoch."""
    choose: int | None = None
    """Samples (or tokens, see weight_unit) per epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The amount that an epoch takes of one stream."""

    amount: int
    """Number of samples or tokens."""
    unit: WeightUnit = "samples"
    """Unit of `amount`."""


def check_weights(weights: Sequence[Weight]) -> None:
    """Validate each weight, and that they can be combined."""
    if not weights:
        raise ConfigError(f"streams={weights!r} is empty; pass at least one Stream")
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
            shown = show_number(value) if isinstance(value, str | int) else str(value)
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
    """Reject weights that are not finite or negative, and fractional values of choose."""
    try:
        exact = exact_share(value)
    except (OverflowError, TypeError, ValueError):  # inf, not a number, nan
        raise ConfigError(f"{what} must be a number of at least 0, such as 0.5 or 2") from None
    if exact < 0:
        raise ConfigError(f"{what} must be a number of at least 0; 0 leaves the stream out")
    if exact and not LEAST_WEIGHT <= exact <= 1 / LEAST_WEIGHT:
        raise ConfigError(f"{what} is further from 1 than a float can be; write one such as 0.5")
    if key == "repeat" and exact > MAX_COUNT:
        raise ConfigError(f"{what} is more than {MAX_COUNT} passes, the most; lower it")
    if key == "choose" and exact.denominator != 1:
        raise ConfigError(
            f"{what} must be a whole number of samples (or tokens); round it, or use repeat"
        )


def exact_share(value: object) -> Fraction:
    """Read a number as its shortest decimal: 0.29 is 29/100, not the nearest binary float.

    Raises a TypeError if it is not a real number, or is a bool; a ValueError if it is nan, or a
    Decimal of hundreds of digits; an OverflowError if it is infinite.

    >>> exact_share(0.29) == exact_share(np.float32(0.29)) == Fraction(29, 100)
    True
    """
    match value:
        case bool():
            raise TypeError(f"{value} is not a number")
        case Integral():
            return Fraction(int(value))  # arithmetic on numpy's integers would wrap around
        case Decimal() if value.is_finite() and abs(value.adjusted()) > MAX_DIGITS:
            raise ValueError(f"its {abs(value.adjusted())} digits would take all memory")
        case Rational() | Decimal():
            return Fraction(value)
        case np.floating():
            return Fraction(str(value))  # shortest digits that round-trip at its own precision
        case Real():
            return Fraction(repr(float(value)))
    raise TypeError(f"{value!r} is not a number")


def _relative(total: int, shares: Sequence[Any], arithmetic: str, seed: int) -> list[int]:
    if arithmetic == "exact":
        # Fractions, so that no rounding moves a sample from one stream to another.
        exact = [exact_share(share) for share in shares]
        whole = sum(exact)
        return largest_remainders(total, [share / whole for share in exact])
    # MosaicML Streaming 0.13: floors of float64 products; random streams get the shortfall.
    normal = np.array(shares, np.float64)
    normal /= normal.sum()
    counts = (total * normal).astype(np.int64)
    lucky = np.random.default_rng(seed).choice(len(counts), total - counts.sum(), False)
    counts[lucky] += 1
    return [int(count) for count in counts]


def _absolute(weight: Weight, num_samples: int, unit: WeightUnit, arithmetic: str) -> Quota:
    if weight.choose is not None:
        return Quota(amount=int(weight.choose), unit=unit)
    if weight.repeat is None:
        # Neither repeat nor choose: one pass.
        return Quota(amount=num_samples)
    if arithmetic == "mosaicml":
        # Its own product of an int or a float, which may be one less than the exact one.
        repeat = int(weight.repeat) if isinstance(weight.repeat, Integral) else weight.repeat
        return Quota(amount=int(repeat * int(num_samples)))
    return Quota(amount=int(exact_share(weight.repeat) * int(num_samples)))


def resolve_weights(
    weights: Sequence[Weight],
    sizes: Sequence[tuple[int, int]],
    *,
    epoch_size: int | None = None,
    unit: WeightUnit = "samples",
    arithmetic: str = "exact",
    seed: int = 0,
) -> tuple[Quota, ...]:
    """Return the quota of each stream for one epoch, given the (samples, tokens) that it has.

    Raises a ConfigError if the weights do not fit together, or the epoch would be empty. The
    options are those of `Mixing`; `seed` distributes the shortfall of arithmetic="mosaicml".

    >>> pair = [Weight(name="a", proportion=2), Weight(name="b", proportion=6)]
    >>> [quota.amount for quota in resolve_weights(pair, [(100, 0), (200, 0)])]
    [75, 225]
    """
    check_weights(weights)
    held = [tokens if unit == "tokens" else samples for samples, tokens in sizes]
    plain = all(weight.repeat is None and weight.choose is None for weight in weights)
    relative: list[Any] = [w.proportion for w in weights if w.proportion is not None]
    if not relative and plain and epoch_size is not None:
        # No weights but an epoch size: shares by size.
        relative = held
    if relative:
        amounts = _relative(epoch_size or sum(held), relative, arithmetic, seed)
        quotas = tuple(Quota(amount=amount, unit=unit) for amount in amounts)
    elif epoch_size is not None:
        raise ConfigError(
            f"epoch_size={epoch_size} needs proportions, but the streams set repeat or choose; "
            "omit epoch_size, or use proportion"
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
    for weight, quota in zip(weights, quotas, strict=True):
        check_amount(weight, quota.amount)
    return quotas


def check_amount(weight: Weight, amount: int) -> None:
    """Check that a stream's share of an epoch does not exceed MAX_COUNT samples or tokens."""
    if amount > MAX_COUNT:
        raise ConfigError(
            f"stream {weight.name!r}: an epoch would take {show_number(amount)} of its samples or "
            f"tokens, and {MAX_COUNT} is the most; lower its repeat or choose"
        )
