"""What the ranks compare of a source before the first batch, without iterating over it.

::

    list, map-style dataset     length; 16 samples, read by index
    Hugging Face iterable       list of shards, seeds of its shuffles
    generator, other iterable   length, if it has one

Each rank takes every n-th sample of its own copy of a source. If the copies differ in order or
length, some samples are delivered twice, and others never.

Cost: 32 reads per source that has an index.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streampack.errors import DataError
from streampack.runtime.rank_digest import digest_of
from streampack.streams import IterableStream
from streampack.streams.source_traits import (
    fingerprint_of,
    has_index,
    num_items,
    shards_of,
    shuffle_seeds,
)

NUM_COMPARED = 16


def source_view(stream: IterableStream, name: str) -> dict[str, Any]:
    """Return what ranks compare of a stream, as JSON; None where it is unknown."""
    source = stream.source
    return {
        "name": name,
        "fingerprint": fingerprint_of(source),
        "source": {
            "length": num_items(source),
            "shuffle seeds": shuffle_seeds(source),
            "list of shards": shards_of(source),
            f"samples ({NUM_COMPARED} were compared)": _samples(stream),
        },
    }


def _samples(stream: IterableStream) -> str | None:
    """Return a digest of samples spread over a source; None without an index.

    Samples that differ when they are read a second time, as after augmentation, do not count.
    """
    num = num_items(stream.source)
    if not num or not has_index(stream.source):
        return None
    numbers = np.unique(np.linspace(0, num - 1, NUM_COMPARED).astype(np.int64)).tolist()
    read, again = ([_contents(stream, number) for number in numbers] for _ in range(2))
    return digest_of(
        [one if one == other else None for one, other in zip(read, again, strict=True)]
    )


def _contents(stream: IterableStream, number: int) -> list[Any]:
    """Return what a sample contributes to packs, or its error."""
    source: Any = stream.source
    try:
        item = source[number]
        if stream.tokenizer is not None:
            return [stream.text_of(item, number)]
        sample = stream.sample(item, number)
    except DataError as error:
        return [str(error)]
    except Exception as error:  # raised again when the sample is read
        return [type(error).__name__]
    rows = (sample.tokens, sample.labels, sample.loss_mask)
    return [None if row is None else row.tolist() for row in rows]
