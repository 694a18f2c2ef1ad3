"""`Mixing`: how many samples of each stream, and in which batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from streampack._checks import (
    check_choice,
    convert_fields,
    is_weight,
    parse_count,
    read_optional_count,
)
from streampack.errors import ConfigError

BatchingMethod = Literal["random", "stratified", "per_stream", "device_per_stream"]
WeightUnit = Literal["samples", "tokens"]
SamplingMethod = Literal["balanced", "fixed"]
EpochEnd = Literal["pad", "drop", "carry"]
Arithmetic = Literal["exact", "mosaicml"]
Stop = Literal["all_exhausted", "first_exhausted", "repeat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """How many samples an epoch takes from each stream, and how streams share batches.

    Raises:
        ConfigError: If a choice is unknown, or a number is below 1.
    """

    batching_method: BatchingMethod = "random"
    """How often a stream is chosen. random: for each sample. stratified: for each pack. per_stream:
    for each global batch. device_per_stream: for each device batch."""
    weight_unit: WeightUnit = "samples"
    """Unit of proportion, choose and epoch_size."""
    epoch_size: int | str | None = None
    """Samples (or tokens, see weight_unit) per epoch. Text such as "10k" is accepted and stored as
    an int. None: all samples of the streams, or the total of their repeat and choose."""
    sampling_method: SamplingMethod = "balanced"
    """balanced: each epoch continues where the previous one stopped. fixed: every epoch takes the
    same samples."""
    global_batch_size: int | None = None
    """Packs per optimizer step, over all ranks. None: one batch of each device of the first run."""
    epoch_end: EpochEnd = "pad"
    """End of an epoch. pad: deliver every chosen token and fill the last batch with padding. drop:
    omit an incomplete last batch. With per_stream and device_per_stream, pad and drop also fill or
    omit the last batches of each stream. carry: continue into the next epoch without a break;
    an epoch may miss samples of a small stream and have others twice. For evaluation, use pad."""
    arithmetic: Arithmetic = "exact"
    """Rounding of shares to whole samples. exact: largest remainders. mosaicml: bit-for-bit as in
    MosaicML Streaming."""
    stop: Stop = "all_exhausted"
    """End of an epoch of iterable sources. all_exhausted: when every source has ended.
    first_exhausted: when one of them has. repeat: never; sources that end are restarted."""
    max_repeats: float | Mapping[str, float] | None = None
    """Maximum number of times that a run of chapters may take a stream: one number for all streams,
    or numbers by name. This is only a check: a run that would exceed it, in the lane with the
    fewest tokens of the stream, is refused when it starts or is amended. The run needs an end.
    None: no limit."""

    def __post_init__(self) -> None:
        check_choice("batching_method", self.batching_method, BatchingMethod)
        check_choice("weight_unit", self.weight_unit, WeightUnit)
        check_choice("sampling_method", self.sampling_method, SamplingMethod)
        check_choice("epoch_end", self.epoch_end, EpochEnd)
        check_choice("arithmetic", self.arithmetic, Arithmetic)
        check_choice("stop", self.stop, Stop)
        convert_fields(self, read_optional_count, "global_batch_size")
        convert_fields(self, parse_count, "epoch_size")
        most = self.max_repeats
        values: Iterable[Any] = most.values() if isinstance(most, Mapping) else [most]
        if most is not None and not all(is_weight(value) and value > 0 for value in values):
            raise ConfigError(
                f"max_repeats={most!r:.80} is not a number above 0, nor such numbers by name of a "
                'stream; write 4, or {"math": 2}'
            )

    def max_repeats_of(self, name: str) -> float | None:
        """Return the most times that a run may take a stream, or None.

        >>> Mixing(max_repeats={"math": 2}).max_repeats_of("web")
        """
        most = self.max_repeats
        return most.get(name) if isinstance(most, Mapping) else most
