"""What the ranks compare of a source before the first batch: 32 reads if it has an index."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from streampack.runtime.rank_digest import UNKNOWN, digest_of_values
from streampack.streams import IterableStream
from streampack.texts.source_traits import has_index, hugging_face_steps, num_items
from streampack.types import State

NUM_COMPARED = 16


def source_view(stream: IterableStream, where: str) -> State:
    """Return what ranks compare of a stream, as JSON; `where` names it in the keys.

    For a Hugging Face iterable, that is the list of its shards and what seeds its shuffles. Files
    count by name, because nodes may keep copies in different folders.
    """
    source = stream.source
    steps = [getattr(source, "_shuffling", None), *hugging_face_steps(source)]
    seeds = [getattr(getattr(step, "generator", None), "bit_generator", None) for step in steps]
    arguments = [value for step in steps for value in getattr(step, "kwargs", {}).values()]
    shards = [value for value in arguments if isinstance(value, list)]
    names = re.sub(r'"[^"]*/', '"', json.dumps(shards, default=_brief))
    samples, again = (digest_of_values(_samples(stream)) for _ in range(2))
    if samples != again:  # augmented at random
        samples = UNKNOWN
    return {
        f"length of {where}": num_items(source),
        f"shuffle seeds of {where}": digest_of_values(
            [seed.state for seed in seeds if seed is not None]
        ),
        f"list of shards of {where}": digest_of_values(names),
        f"samples ({NUM_COMPARED} were compared) of {where}": samples,
    }


def _brief(value: Any) -> Any:
    """Return the length and two rows of a table, or the type of anything else."""
    is_table = has_index(value) and len(value) > 0
    return [len(value), value[0], value[len(value) - 1]] if is_table else type(value).__name__


def _samples(stream: IterableStream) -> list[Any]:
    num = num_items(stream.source) or 0 if has_index(stream.source) else 0
    numbers = np.unique(np.linspace(0, num - 1, min(num, NUM_COMPARED)).astype(int)).tolist()
    return [_contents(stream, number) for number in numbers]


def _contents(stream: IterableStream, number: int) -> Any:
    """Return what a sample contributes to packs, or the type of its error."""
    source: Any = stream.source
    try:
        if stream.tokenizer is not None:
            return stream.text_of(source[number], number)
        tokens, labels, loss_mask, _ = stream.sample(source[number], number)
    except Exception as error:  # raised again when the sample is packed
        return type(error).__name__
    return [row if row is None else row.tolist() for row in (tokens, labels, loss_mask)]
