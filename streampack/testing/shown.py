"""Batches and packs as plain values, which are equal if and only if every tensor is equal.

::

    show(batch)          a batch of any format: every key, dtype, shape and byte
    rows(batch)          the packs of a native batch that have tokens
    all_rows(datasets)   the packs of a whole world, in the order of the plan
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from streampack.batch.batch import FILLED
from streampack.runtime.resumable import engine_of
from streampack.world import World


def show(value: Any) -> Any:
    """Return a batch, or any nested dicts, lists and tuples of tensors, as plain values.

    >>> show({"tokens": torch.tensor([1]), "epoch": 0})
    (('epoch', 0), ('tokens', ('int64', (1,), b'\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00')))
    """
    if isinstance(value, Mapping):
        return tuple((key, show(value[key])) for key in sorted(value))
    if isinstance(value, list | tuple):
        return tuple(map(show, value))
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous()
        content = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return str(value.dtype).removeprefix("torch."), tuple(value.shape), content
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return value


def rows(batch: dict[str, Any]) -> list[tuple[bytes, ...]]:
    """Return the packs of a native batch that have tokens: their segments, and their rows."""
    segments = batch["segments"].numpy()
    shown = []
    for row in range(len(batch["tokens"])):
        own = segments[segments[:, 0] == row, 1:]
        if len(own):
            shown.append((own.tobytes(), *(batch[key][row].numpy().tobytes() for key in FILLED)))
    return shown


def worlds(num_ranks: int, num_nodes: int = 1, replication: int = 1) -> list[World]:
    """Return the world of each rank."""
    return [
        World(
            rank=rank,
            num_ranks=num_ranks,
            ranks_per_node=num_ranks // num_nodes,
            replication=replication,
        )
        for rank in range(num_ranks)
    ]


def in_slot_order(ranks: Sequence[Any], position: int) -> list[Any]:
    """Return one rank of each place, in the order of their batches in the step at `position`.

    The device at place p takes the device batches k with k mod num_devices == p.
    """
    by_slot = {engine_of(rank).spec.view().first_slot(position): rank for rank in ranks}
    return [rank for _, rank in sorted(by_slot.items())]


def steps(loaders: Sequence[Iterable[dict[str, Any]]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the batches of all ranks, step by step; all ranks must take as many."""
    yield from (list(step) for step in zip(*loaders, strict=True))


def all_rows(ranks: Sequence[Any], position: int = 0) -> list[tuple[bytes, ...]]:
    """Return the packs of a world from `position` on, each once whatever the replication.

    Raises:
        AssertionError: If ranks disagree on the position of a step.
    """
    found: list[tuple[bytes, ...]] = []
    for step in steps(in_slot_order(ranks, position)):
        positions = {batch["position"] for batch in step}
        if len(positions) > 1:
            raise AssertionError(f"ranks disagree on the position: {sorted(positions)}")
        for batch in step:
            found += rows(batch)
    return found
