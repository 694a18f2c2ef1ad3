"""Check of a shard's own header against index.json: its columns, before any sample is read.

::

    num_samples | offsets | {"column_names": [...], "column_encodings": [...], ...} | samples
                          '----- must name the columns of index.json, in its order ----'

Counts and offsets are checked where samples are located (columns.py).

Cost: parsing one small JSON text each time a shard is opened, about 20 us.
"""

from __future__ import annotations

import json

import numpy as np

from streampack.errors import DataError
from streampack.mds.columns import ByteArray
from streampack.mds.index import Shard

MAX_HEAD_BYTES = 2**20


def check_columns(data: ByteArray, shard: Shard, where: str) -> None:
    """Compare the columns in a shard's header with those in index.json.

    Args:
        data: The shard's bytes, shape (num_bytes,).
        shard: The shard's entry in index.json.
        where: The stream and the shard, for messages.

    Raises:
        DataError: If they differ, or the shard's header cannot be read.
    """
    begin = 8 + 4 * shard.num_samples
    stated_samples, end = data[:8].view(np.uint32).tolist() if len(data) >= begin else (0, 0)
    # Invalid counts and offsets are refused by their reader; the header is optional.
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
