"""`HeldOut`: one side of a split of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streampack._checks import check_choice, is_weight
from streampack.config.moved import with_known_options
from streampack.errors import ConfigError

Side = Literal["train", "held_out"]
By = Literal["shard", "row"]
MIN_FRACTION = 1e-12


@with_known_options
@dataclass(frozen=True)
class HeldOut:
    """One side of a split that holds out one shard or row in every block of 1 / fraction.

    A hash of the block's number chooses which one. In token files, each file has its own numbers,
    and its name is hashed too. So a "train" and a "held_out" stream with the same `fraction` and
    `by` never share a sample of the same shards or token files, however the files are listed. Data
    that is appended later changes nothing for earlier data.

    Raises:
        ConfigError: If a value is invalid.

    >>> HeldOut("train", 0.005, by="shard").fraction
    0.005
    """

    side: Side
    """The side to use, "train" or "held_out"."""
    fraction: float
    """The share that is held out, such as 0.005; the same on both sides."""
    by: By
    """What is held out: a whole "shard", which suits a remote, because otherwise every shard that
    is fetched would contain held-out samples; or a "row", which is a sample, or a conversation if
    it makes several samples."""

    def __post_init__(self) -> None:
        check_choice("side", self.side, Side)
        check_choice("by", self.by, By)
        if not (is_weight(self.fraction) and MIN_FRACTION <= self.fraction < 1):
            raise ConfigError(
                f"fraction={self.fraction!r:.40} is not a number from {MIN_FRACTION} up to 1; "
                "write the held-out share, such as 0.005",
                option="fraction",
            )
