"""Batches of any format, compared and hashed; streams with and without labels and loss masks."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streampack import PackedStreamingDataset, Packing, Stream
from tests.helpers.builders import stream_of

LENGTHS = np.random.default_rng(7).integers(1, 200, 300).tolist()


def stream_with_targets(folder: Path, targets: str) -> Stream:
    """Write a stream with targets marked by a "mask" or by "labels", or with neither ("plain")."""
    if targets == "plain":
        return stream_of(folder, LENGTHS)
    name = {"mask": "loss_mask", "labels": "labels"}[targets]
    with import_module("streaming").MDSWriter(
        out=str(folder), columns={"tokens": "ndarray:int32", name: "ndarray:int32"}
    ) as writer:
        for number, length in enumerate(LENGTHS):
            tokens = np.arange(number, number + length, dtype=np.int32)
            is_target = tokens % 3 > 0
            values = is_target if name == "loss_mask" else np.where(is_target, tokens, -100)
            writer.write({"tokens": tokens, name: values.astype(np.int32)})
    shifted = {} if name == "loss_mask" else {"labels_shifted": False}
    return Stream(local=str(folder), **{name: name}, **shifted)


def dataset_of(
    stream: Stream, batch_format: Any = "native", batch_size: int | None = None
) -> PackedStreamingDataset:
    return PackedStreamingDataset(
        [stream],
        packing=Packing(max_seq_len=64),
        batch_size=batch_size or (1 if batch_format == "llama_factory" else 3),  # its maximum
        batch_format=batch_format,
    )


def same(one: Any, other: Any) -> bool:
    """Whether two batches of any format are equal, down to the types of their containers."""
    if torch.is_tensor(one):
        return torch.is_tensor(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return type(one) is type(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def digest(batch: Any) -> str:
    """Return a hash of a batch of any format: names, types, shapes and every byte."""
    hashed = blake2b(digest_size=12)
    for value in _leaves(batch):
        hashed.update(value)
    return hashed.hexdigest()


def _leaves(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        for key in sorted(value):
            yield key.encode()
            yield from _leaves(value[key])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.contiguous().numpy().tobytes()
    else:
        yield repr(value).encode()
