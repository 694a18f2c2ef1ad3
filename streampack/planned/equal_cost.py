"""Packs of equal cost, `Packing(max_cost=...)`: what cannot have them, and how many to expect.

::

    lengths of up to 64 shards --sizes in a pack--> slots that all tokens of a stream will take

Cost: none without `max_cost`; otherwise about 0.1 us a sample of these shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from streampack.config import Packing
from streampack.config.combinations import check_combination
from streampack.pack import fit_samples
from streampack.pack.cost import check_max_cost, sizes_in_pack
from streampack.streams import TokenStream
from streampack.types import LENGTH, Int64Array

NUM_SHARDS = 64  # shards whose lengths are looked at


def check_equal_cost(packing: Packing, streams: Sequence[TokenStream]) -> None:
    """Refuse `max_cost` where packs of equal cost are not possible."""
    check_max_cost(packing)
    for stream in streams:
        given = {
            "max_cost": packing.max_cost,
            "Stream(max_seq_len)": stream.max_seq_len,
            "a length file": not stream.cache.is_remote or stream.has_length_file,
        }
        check_combination(given, f"stream {stream.name!r}: ")


def slots_of_equal_cost(
    stream: TokenStream, lengths_of: Callable[[int], Int64Array], packing: Packing, num_tokens: int
) -> int | None:
    """Return the slots of packs that a stream is expected to take; None without `max_cost`."""
    if packing.max_cost is None:
        return None
    shards = np.unique(np.linspace(0, stream.num_shards - 1, NUM_SHARDS).astype(np.int64))
    lengths = np.concatenate([lengths_of(shard) for shard in shards.tolist()])
    samples = np.zeros((len(lengths), 4), np.int64)
    samples[:, 3] = lengths
    overflow = "split" if packing.overflow == "error" else packing.overflow
    pieces = fit_samples(samples, packing.max_seq_len, overflow, [stream.name])[:, LENGTH]
    sizes = sizes_in_pack(pieces, packing)
    return num_tokens * int(sizes.sum()) // max(int(pieces.sum()), 1)
