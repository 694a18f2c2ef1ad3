"""Check streams that have packs of their own length: `Stream(max_seq_len=...)`.

::

    Packing(max_seq_len=4096), batch_size=8     Stream(max_seq_len=16384)    4 slots a pack
                                                batch_size 8, 4              2 packs, 1 pack
                                                batch_size 2                 refused: half a pack

Cost: none without such streams.
"""

from __future__ import annotations

import math

from streampack.config import Packing
from streampack.errors import ConfigError
from streampack.plan import Recipe


def slots_per_pack(name: str, max_seq_len: int | None, packing: Packing) -> int:
    """Return the length of a stream's packs, in units of the packing's max_seq_len.

    >>> slots_per_pack("books", 4096, Packing(max_seq_len=1024))
    4
    """
    size = packing.max_seq_len
    slots, rest = divmod(max_seq_len or size, size)
    if rest:
        lengths = [str(multiple * size) for multiple in (slots, slots + 1) if multiple]
        raise ConfigError(
            f"stream {name!r}: max_seq_len={max_seq_len} is not a multiple of Packing(max_seq_len="
            f"{size}); set it to {' or '.join(lengths)}, or leave it out"
        )
    return slots


def check_pack_lengths(recipe: Recipe, batch_size: int) -> None:
    """Refuse device batches that do not hold whole packs of one length.

    `batch_size` is the number of slots of a device batch in this world.
    """
    slots = [stream.slots_per_pack for stream in recipe.streams]
    if max(slots) == 1:
        return
    longest = recipe.streams[slots.index(max(slots))]
    own = f"stream {longest.name!r}: max_seq_len={max(slots) * recipe.packing.max_seq_len}"
    method = recipe.mixing.batching_method
    if method in ("random", "stratified"):
        raise ConfigError(
            f"{own} needs batches of one stream, but batching_method={method!r} mixes streams in a "
            "batch; set batching_method to 'device_per_stream' or 'per_stream', or leave the "
            "stream's max_seq_len out"
        )
    _check_batch_size(recipe, batch_size, math.lcm(*slots), own)


def _check_batch_size(recipe: Recipe, batch_size: int, multiple: int, own: str) -> None:
    """Refuse device batches that are not whole packs, or do not divide what holds one stream."""
    # A new run's lane_run is its batch_size.
    if recipe.lane_run % multiple:
        size = -(-recipe.lane_run // multiple) * multiple
        raise ConfigError(
            f"{own} is not a whole part of a device batch: batch_size={recipe.lane_run} packs of "
            f"Packing(max_seq_len={recipe.packing.max_seq_len}) is not a multiple of {multiple}; "
            f"begin the run with batch_size={size}, or shorten the stream's max_seq_len"
        )
    name, size = "the run's first batch_size", recipe.lane_run
    if recipe.mixing.batching_method == "per_stream":
        name, size = "global_batch_size", recipe.global_batch_size
        if size % recipe.lane_run:
            raise ConfigError(
                f"{own} needs global_batch_size={size} to be a multiple of the run's first "
                f"batch_size={recipe.lane_run}; set it to "
                f"{-(-size // recipe.lane_run) * recipe.lane_run}"
            )
    if batch_size % multiple or size % batch_size:
        sizes = [n for n in range(multiple, size + 1, multiple) if size % n == 0]
        raise ConfigError(
            f"{own}: batch_size={batch_size} would cut packs or mix their lengths in a batch: it "
            f"is not both a multiple of {multiple} and a divisor of {name}={size}; set it to "
            f"{' or '.join(map(str, sizes))}, on any number of ranks"
        )
