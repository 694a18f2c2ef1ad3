"""`Order`: which sample comes next."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

from streampack._checks import convert_fields, read_bool, read_integer, read_optional_count
from streampack.config.combinations import check_combination
from streampack.errors import ConfigError

SHUFFLE_BLOCK_SIZE = 262_144
PACK_SHUFFLE = 32_768
SAMPLES_PER_PACK = 4  # limits a window of shuffled packs of short samples


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which sample comes next.

    Raises:
        ConfigError: If seed is not an integer of at least 0, shuffle is not a bool, or a count is
            below 1.
    """

    seed: int = 9176
    """Seed of all randomness, at least 0. The default is that of MosaicML Streaming."""
    shuffle: bool = True
    """False: read samples in stored order. Streams are still mixed."""
    shuffle_block_size: int | None = None
    """Number of samples shuffled together. It bounds the number of shards in use at a time. None:
    262,144. A source may state a smaller number for its stream."""
    num_lanes: int | None = None
    """Number of independent read positions per stream, each over its own part of the shards. It
    stays fixed for the whole run. None: the number of nodes of the first run."""
    pack_shuffle: int | None = None
    """Number of packs shuffled together, over all lanes and streams, so that a batch has pieces
    of many samples. 0: packs keep the order in which they are packed. None: 32,768 with `shuffle`,
    otherwise 0. A window of packs also ends after 4 times as many samples as packs, after half a
    shuffle block, and after one pass over its streams; if streams are mixed by tokens, after the
    tokens that this many samples have on average. For iterables: packs that each worker shuffles
    together, or fewer if `Buffers` has no room for as many; None means 0."""

    def __post_init__(self) -> None:
        convert_fields(self, _read_seed, "seed")
        convert_fields(self, read_bool, "shuffle")
        convert_fields(self, read_optional_count, "shuffle_block_size", "num_lanes")
        if isinstance(self.pack_shuffle, bool) or self.pack_shuffle != 0:
            convert_fields(self, read_optional_count, "pack_shuffle")
        else:
            object.__setattr__(self, "pack_shuffle", 0)
        check_combination({"pack_shuffle": self.pack_shuffle, "shuffle": self.shuffle})

    @cached_property
    def pack_window(self) -> tuple[int, int]:
        """Packs and samples after which a window ends, whichever comes first; (0, 0): no shuffle.

        >>> Order().pack_window, Order(shuffle_block_size=1000).pack_window
        ((32768, 131072), (32768, 500))
        """
        num_packs = self.pack_shuffle
        if num_packs is None:
            num_packs = PACK_SHUFFLE if self.shuffle else 0
        return num_packs, min(SAMPLES_PER_PACK * num_packs, -(-self.block_size // 2))

    @cached_property
    def block_size(self) -> int:
        """Number of samples shuffled together."""
        return self.shuffle_block_size or SHUFFLE_BLOCK_SIZE


def _read_seed(name: str, value: Any) -> int:
    way_out = "a seed is an integer of at least 0, such as 17; shuffle=False keeps stored order"
    # read_integer accepts 17.0, but two large float seeds could round to the same integer.
    if isinstance(value, Real) and not hasattr(value, "__index__"):
        raise ConfigError(f"{name}={value!r} is not an integer; {way_out}", option=name)
    return read_integer(name, value, way_out, 0)
