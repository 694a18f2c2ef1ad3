"""Epoch quotas of each iterable: over all workers, and for one worker.

::

    proportion                 shares of an epoch that ends with its sources (`Mixing.stop`)
    proportion + epoch_size    a number of samples (or tokens) for each
    repeat, choose             the same; a stream with neither in such a mix: one pass

A worker takes every P-th item of the endless sequence of passes, P being the number of workers, so
all workers together take each item exactly as often as the weights ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from streampack.config import Mixing
from streampack.errors import ConfigError
from streampack.mix.apportion import apportion
from streampack.mix.weights import Weight, check_amount, check_weights, exact_share, resolve_weights
from streampack.online.source_slice import SourceSlice, WorkerSlice
from streampack.streams import IterableStream
from streampack.texts.source_traits import is_one_shot, num_items

NO_END = 1 << 62  # samples


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerQuota:
    """How much of its slice of a stream a worker takes in an epoch."""

    amount: int | None = None
    """Samples or tokens; None means one pass."""
    by_tokens: bool = False
    skipped: int | None = None
    """Samples of the slice's endless sequence of passes that belong to earlier epochs; None: every
    epoch starts a new pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochQuotas:
    """Amounts of each stream in an epoch, over all workers."""

    amounts: tuple[int | None, ...]
    """Relative shares, or samples (or tokens). None until a source was read through."""
    repeats: tuple[float | None, ...]
    """Passes over each stream that is weighted by passes; otherwise None."""
    are_quotas: bool
    """Whether the amounts are absolute, and not only relative shares."""
    mixing: Mixing

    def quota(self, stream: int, epoch: int, slice_: SourceSlice) -> WorkerQuota:
        amount, repeat = self.amounts[stream], self.repeats[stream]
        worker_slice = slice_.worker_slice
        if not self.are_quotas:
            passes = NO_END if self.mixing.stop == "repeat" else None
            return WorkerQuota(amount=passes if amount else 0)
        if self.mixing.weight_unit == "tokens":
            shares = apportion(amount or 0, [1] * worker_slice.num_slices)
            return WorkerQuota(amount=shares[worker_slice.index], by_tokens=True)
        # Balanced sampling continues where the epoch before stopped.
        is_balanced = self.mixing.sampling_method == "balanced"
        number = epoch if is_balanced else 0
        total = slice_.total
        if total is None and repeat is not None:
            own, total = slice_.count()
            if total is None:
                first, last = _of_passes(exact_share(repeat) * own, number, worker_slice)
                return WorkerQuota(amount=last - first, skipped=first if is_balanced else None)
            amount = int(exact_share(repeat) * total)
        is_counted = slice_.total is None  # such a source may reshuffle in every pass
        if total is None:
            return WorkerQuota(amount=worker_slice.num_of(amount or 0))
        # The epoch takes items [begin, begin + amount) of the endless sequence of passes.
        begin = number * (amount or 0)
        # How many items before each end belong to this slice: of whole passes, then of the last.
        first, last = (
            at // total * worker_slice.num_of(total) + worker_slice.num_of(at % total)
            if total
            else 0
            for at in (begin, begin + (amount or 0))
        )
        starts_anew = is_counted and not is_balanced
        return WorkerQuota(amount=last - first, skipped=None if starts_anew else first)


def _of_passes(exact: Fraction, number: int, worker_slice: WorkerSlice) -> tuple[int, int]:
    """Return the range of samples of a slice that cannot see the sizes of the other slices.

    Each slice rounds up in a different epoch: over P slices, the floors of x + p / P sum to the
    floor of P * x, and no slice is ever a whole sample off its exact share.
    """
    # Exact fractions: a float that rounds the other way would lose or repeat a sample.
    shift = Fraction(worker_slice.index, worker_slice.num_slices)
    return int(number * exact + shift), int((number + 1) * exact + shift)


def epoch_amounts(streams: Sequence[IterableStream], mixing: Mixing, seed: int) -> EpochQuotas:
    """Resolve the weights of streams, which have names, by MosaicML Streaming's rules.

    Raises:
        ConfigError: If they cannot be combined, or need a size that a source does not have.

    >>> streams = [IterableStream([[1]] * 30, repeat=2), IterableStream([[1]] * 9)]
    >>> epoch_amounts(streams, Mixing(), 0).amounts
    (60, 9)
    """
    weights = [
        Weight(name=str(s.name), proportion=s.proportion, repeat=s.repeat, choose=s.choose)
        for s in streams
    ]
    check_weights(weights)
    is_absolute = any(s.repeat is not None or s.choose is not None for s in streams)
    asked = "stop='repeat'" if mixing.stop == "repeat" else ""
    if mixing.epoch_size is not None:
        asked = f"epoch_size={mixing.epoch_size}"
    if is_absolute and asked:
        raise ConfigError(
            f"{asked} needs proportions, but the streams set repeat or choose, which say what an "
            "epoch takes; omit it, or use proportion"
        )
    if is_absolute or asked:
        _check_again(streams, asked or "a stream with repeat or choose")
    repeats: list[float | None] = [None] * len(streams)
    if is_absolute:
        amounts, repeats = _absolute(streams, mixing)
        for weight, amount in zip(weights, amounts, strict=True):
            check_amount(weight, amount or 0)
    elif mixing.epoch_size is not None:
        amounts = _of_epoch_size(streams, weights, mixing, seed)
    else:
        shares = [exact_share(1 if s.proportion is None else s.proportion) for s in streams]
        # Integers in the exact ratio of the shares.
        whole = lcm(*(share.denominator for share in shares))
        amounts = [int(share * whole) for share in shares]
    if mixing.batching_method != "random" and None in amounts:  # slots are shared out by them
        raise ConfigError(
            f"batching_method={mixing.batching_method!r} shares out packs by what an epoch takes "
            f"of each stream, and stream {weights[amounts.index(None)].name!r} cannot say how many "
            "samples it has; give it choose=, or all streams a proportion"
        )
    return EpochQuotas(
        amounts=tuple(amounts),
        repeats=tuple(repeats),
        are_quotas=is_absolute or mixing.epoch_size is not None,
        mixing=mixing,
    )


def _check_again(streams: Sequence[IterableStream], asked: str) -> None:
    for stream in streams:
        if is_one_shot(stream.source):
            raise ConfigError(
                f"stream {stream.name!r}: {asked} needs sources that have a length or can be "
                f"iterated again, and a {type(stream.source).__name__} is neither; pass a list, a "
                "dataset, or an object with an __iter__ that makes a new generator"
            )


def _absolute(
    streams: Sequence[IterableStream], mixing: Mixing
) -> tuple[list[int | None], list[float | None]]:
    amounts: list[int | None] = []
    repeats: list[float | None] = []
    for stream in streams:
        if stream.choose is not None:
            amounts.append(int(stream.choose))
            repeats.append(None)
            continue
        repeat = 1 if stream.repeat is None else stream.repeat
        if mixing.weight_unit == "tokens":
            raise ConfigError(
                f"stream {stream.name!r} is taken by repeat={repeat} passes, but with weight_unit="
                "'tokens' its tokens would have to be known before they are read; give it choose=, "
                "all streams a proportion, or set weight_unit='samples'"
            )
        total = num_items(stream.source)
        amounts.append(None if total is None else int(exact_share(repeat) * total))
        repeats.append(repeat)
    if all(amount == 0 for amount in amounts):
        raise ConfigError(
            f"the weights choose 0 {mixing.weight_unit} of {len(streams)} streams; raise repeat or "
            "choose, or pass sources that hold something"
        )
    return amounts, repeats


def _of_epoch_size(
    streams: Sequence[IterableStream], weights: Sequence[Weight], mixing: Mixing, seed: int
) -> list[int | None]:
    sizes = [num_items(stream.source) for stream in streams]
    if streams[0].proportion is None and (None in sizes or mixing.weight_unit == "tokens"):
        unknown = weights[sizes.index(None) if None in sizes else 0].name
        raise ConfigError(
            f"epoch_size={mixing.epoch_size} without proportions goes by the streams' sizes in "
            f"{mixing.weight_unit}, and {unknown!r} "
            "does not say its own; give every stream a proportion"
        )
    quotas = resolve_weights(
        weights,
        [(size or 0, 0) for size in sizes],
        epoch_size=int(mixing.epoch_size or 0),
        unit=mixing.weight_unit,
        arithmetic=mixing.arithmetic,
        seed=seed,
    )
    return [quota.amount for quota in quotas]
