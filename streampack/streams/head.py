"""A shard's own head against index.json: its columns, before any of its samples is believed.

::

    num_samples | offsets | {"column_names": [...], "column_encodings": [...], ...} | samples
                          '----- must name the columns of index.json, in its order ----'

Counts and offsets are checked where samples are found (mds.py).

Cost: parsing one small JSON text per opening of a shard, some 20 us.
"""

from __future__ import annotations

import json

import numpy as np

from streampack.errors import DataError
from streampack.streams.index import Shard
from streampack.streams.mds import ByteArray

__all__ = ["check_columns"]

MAX_HEAD_BYTES = 2**20


def check_columns(data: ByteArray, shard: Shard, where: str) -> None:
    """Compare the columns that a shard states with those that index.json states for it.

    Args:
        data: The shard's bytes, shape (num_bytes,).
        shard: What index.json says of it.
        where: The stream and the shard, for messages.

    Raises:
        DataError: If they differ, or the shard's head cannot be read.
    """
    begin = 8 + 4 * shard.num_samples
    stated_samples, end = data[:8].view(np.uint32).tolist() if len(data) >= begin else (0, 0)
    # Counts and offsets that cannot be are refused by who reads them; heads may be left out.
    if stated_samples != shard.num_samples or not begin < end <= min(
        len(data), begin + MAX_HEAD_BYTES
    ):
        return
    try:
        head = json.loads(data[begin:end].tobytes())
        stated = tuple(tuple(head[f"column_{field}"]) for field in ("names", "encodings", "sizes"))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(
            f"{where}: its head of {end - begin} bytes does not state its columns "
            f"({type(error).__name__}: {error}); the shard is damaged: delete it if it is a cached "
            "copy, else write the stream anew"
        ) from error
    layout = shard.layout
    expected = (layout.names, layout.encodings, layout.sizes)
    for field, ours, theirs in zip(("names", "encodings", "sizes"), expected, stated, strict=True):
        if ours != theirs:
            raise DataError(
                f"{where}: column_{field} is {list(theirs)} in the shard, but index.json says "
                f"{list(ours)}; they do not belong together: fetch or write both anew"
            )
