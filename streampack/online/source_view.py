"""What the ranks compare of a source before the first batch, without iterating over it.

Each rank takes every n-th sample of its own copy of a source. If the copies differ in order or
length, some samples are delivered twice, and others never.

Cost: 32 reads per source that has an index.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from streampack.runtime.rank_digest import digest_of
from streampack.streams import IterableStream
from streampack.streams.source_traits import has_index, is_hugging_face, num_items
from streampack.types import State

NUM_COMPARED = 16


def source_view(stream: IterableStream, name: str) -> State:
    """Return what ranks compare of a stream, as JSON.

    Of a Hugging Face iterable, that is the list of its shards and what seeds its shuffles. Files
    count by name, because nodes may keep copies in different folders.
    """
    source, parts = stream.source, []
    if is_hugging_face(source):
        parts = [
            getattr(source, "_shuffling", None),
            *_parts(getattr(source, "_ex_iterable", None)),
        ]
    seeds = [getattr(getattr(part, "generator", None), "bit_generator", None) for part in parts]
    arguments = [list(getattr(part, "kwargs", {}).values()) for part in parts]
    shards = [value for values in arguments for value in values if isinstance(value, list)]
    names = re.sub(r'"[^"]*/', '"', json.dumps(shards, default=_brief))
    compared = {
        "length": num_items(source),
        "shuffle seeds": digest_of([seed.state for seed in seeds if seed is not None]),
        "list of shards": digest_of(names),
        f"samples ({NUM_COMPARED} were compared)": digest_of(_samples(stream)),
    }
    return {"name": name, "source": compared}


def _parts(inner: Any) -> list[Any]:
    """Return the steps of a Hugging Face iterable, from the last to its sources."""
    before = [getattr(inner, "ex_iterable", None), *getattr(inner, "ex_iterables", ())]
    return [inner, *(part for each in before if each is not None for part in _parts(each))]


def _brief(value: Any) -> Any:
    """Return the length and two rows of a table, or the type of anything else."""
    is_table = has_index(value) and len(value) > 0
    return [len(value), value[0], value[len(value) - 1]] if is_table else type(value).__name__


def _samples(stream: IterableStream) -> list[Any]:
    """Return samples spread over a source that has an index.

    None stands for a sample that differs when it is read a second time, as after augmentation.
    """
    num = num_items(stream.source) if has_index(stream.source) else 0
    numbers = np.unique(np.linspace(0, max((num or 0) - 1, 0), NUM_COMPARED).astype(int)).tolist()
    read, again = ([_contents(stream, number) for number in numbers if num] for _ in range(2))
    return [one if one == other else None for one, other in zip(read, again, strict=True)]


def _contents(stream: IterableStream, number: int) -> Any:
    """Return what a sample contributes to packs, or the type of its error."""
    source: Any = stream.source
    try:
        if stream.tokenizer is not None:
            return stream.text_of(source[number], number)
        sample = stream.sample(source[number], number)
    except Exception as error:  # raised again when the sample is packed
        return type(error).__name__
    rows = (sample.tokens, sample.labels, sample.loss_mask)
    return [row if row is None else row.tolist() for row in rows]
