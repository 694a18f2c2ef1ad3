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
    """One side of a split: of each block of 1 / fraction shards or rows, one is held out.

    A hash of the block's number gives its place. Token files are numbered each by itself, and their
    names are hashed too. So two streams of the same token files, in any lists, or of the same
    shards never share a sample at the same `fraction` and `by`, and what is appended moves nothing.

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
    """What is held out: a "shard", which suits a remote, as held-out samples would be in every
    shard that is fetched; or a "row", which is a sample, and of conversations with several samples
    the conversation."""

    def __post_init__(self) -> None:
        check_choice("side", self.side, Side)
        check_choice("by", self.by, By)
        if not (is_weight(self.fraction) and MIN_FRACTION <= self.fraction < 1):
            raise ConfigError(
                f"fraction={self.fraction!r:.40} is not a number from {MIN_FRACTION} up to 1; "
                "write the held-out share, such as 0.005",
                option="fraction",
            )
