"""Slices of batches for context parallelism: which formats take them, and whole batches of them.

One row of two documents on rank 0 of 2, ``context_layout="zigzag"``::

    whole         a0 a1 a2 a3 a4 a5 b0 b1           slice         a0 a1 | b0 b1
    labels        a1 a2 a3 a4 a5  .  b1 .           labels        a1 a2 | b1  .
    input_pos      0  1  2  3  4  5  0  1           input_pos      0  1 |  0  1
    document_ids   1  1  1  1  1  1  2  2           document_ids   1  1 |  2  2
                                                    chunks       [0, 2]   [6, 8]
    cu_seqlens     0                 6     8        cu_seqlens     0 6 8, as in the whole batch

cu_seqlens, max_seqlen and segments are those of the whole batch: attention over several ranks needs
all edges.

Cost: `merge_slices` copies each tensor twice; `slice_batch` once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from streampack.batch.batch import Batch
from streampack.batch.formats.pytorch import to_torchtitan_flat
from streampack.batch.formats.registry import Formatter, options_of, unwrapped
from streampack.batch.layout import CARRIED, CHUNKS, check_keys, check_native, places
from streampack.config import Packing
from streampack.config.combinations import check_combination
from streampack.errors import ConfigError
from streampack.gather.context_slice import ContextSlice
from streampack.world import World

# Fields of a batch that are equal in all of its slices.
COMMON = ("cu_seqlens", "segments", "max_seqlen", *CARRIED)


def context_slice(
    world: World, packing: Packing, convert: Formatter, batch_tokens: int
) -> ContextSlice | None:
    """Return the checked slice that a rank gets of each row; None if rows stay whole.

    `batch_tokens` are the token slots of a batch, before it is cut.

    >>> from streampack.formats import to_megatron
    >>> world = World(num_ranks=2, replication=2, context_parallel=2)
    >>> context_slice(world, Packing(max_seq_len=8), to_megatron, 8)
    Traceback (most recent call last):
    streampack.errors.ConfigError: batch_format='megatron' needs context_layout=...
    """
    if world.context_parallel == 1:
        return None
    context = ContextSlice(
        rank=world.context_rank, num_ranks=world.context_parallel, layout=world.context_layout
    )
    unit = "document" if context.is_per_document else "row"
    check_combination(
        {
            **options_of(convert),
            "context_parallel": world.context_parallel,
            "context_layout": world.context_layout,
            "max_seq_len": packing.max_seq_len,
            "cost": packing.cost,
            "pad_to_multiple": packing.pad_to_multiple or 1,
            f"the chunks of a {unit}": context.num_parts,
        }
    )
    if unwrapped(convert)[0] is to_torchtitan_flat and not context.is_per_document:
        return replace(context, frame_tokens=batch_tokens)
    return context


def slice_batch(batch: Batch, context: ContextSlice) -> Batch:
    """Return the slice of a native batch for one rank.

    Fields of the user's own are cut too, if they are tensors of shape (B, S, ...).
    """
    check_native(batch, "slice_batch")
    shape = batch["tokens"].shape
    chunks = torch.from_numpy(context.chunks(batch["cu_seqlens"].cpu().numpy(), shape[0]))
    at = places({CHUNKS: chunks.to(batch["tokens"].device)})
    rows = (shape[0], shape[1] // context.num_ranks)
    cut = {
        key: value.flatten(0, 1)[at].unflatten(0, rows)
        if _is_per_token(key, value, shape)
        else value
        for key, value in batch.items()
    }
    return {**cut, CHUNKS: chunks}


def merge_slices(slices: Sequence[Mapping[str, Any]]) -> Batch:
    """Merge the slices of all context-parallel ranks into the native batch that they came from.

    Args:
        slices: The slices of one batch, native, in any order. Fields of your own, such as losses,
            are merged if they are tensors of shape (B, S / n, ...), and otherwise taken from the
            first slice.

    Raises:
        ConfigError: If one is not a native slice, they are of different batches, or a slice is
            missing or given twice.

    >>> from streampack import IterableStream, PackedIterableDataset, Packing, World
    >>> samples, packing = [[1, 2, 3, 4, 5], [6, 7, 8]], Packing(max_seq_len=8)
    >>> slices = [
    ...     next(iter(PackedIterableDataset([IterableStream(samples)], packing=packing, world=World(
    ...         rank=rank, num_ranks=2, replication=2, context_parallel=2))))
    ...     for rank in range(2)
    ... ]
    >>> [own["tokens"].tolist() for own in slices], merge_slices(slices)["tokens"].tolist()
    ([[[1, 2, 7, 8]], [[3, 4, 5, 6]]], [[1, 2, 3, 4, 5, 6, 7, 8]])
    """
    _check_slices(slices)
    first = slices[0]
    shape, total = first["tokens"].shape, int(first["cu_seqlens"][-1])
    at = torch.cat([places(dict(own)).to(first["tokens"].device) for own in slices])
    is_held = torch.zeros(total, dtype=torch.bool, device=at.device)
    is_held[at] = True
    num_held = int(is_held.sum())
    if not len(at) == num_held == total:
        raise ConfigError(
            f"{len(slices)} slices hold {num_held} of the {total} slots of their batch; "
            "pass the slices of all context-parallel ranks, each once"
        )
    merged: Batch = {}
    for key, value in first.items():
        merged[key] = value
        if _is_per_token(key, value, shape):
            parts = torch.cat([own[key].flatten(0, 1) for own in slices])
            whole = torch.empty_like(parts)
            whole[at] = parts
            merged[key] = whole.view(shape[0], -1, *value.shape[2:])
    del merged[CHUNKS]
    return merged


def _is_per_token(key: str, value: Any, shape: torch.Size) -> bool:
    is_common = key in (*COMMON, CHUNKS)  # they may have that shape by chance
    return not is_common and torch.is_tensor(value) and value.shape[:2] == shape


def _check_slices(slices: Sequence[Mapping[str, Any]]) -> None:
    if not slices:
        raise ConfigError(f"slices={slices!r} is empty; pass those of all context-parallel ranks")
    for own in slices:
        check_keys(own, "native", ("tokens", *COMMON), "merge_slices")
        if CHUNKS not in own:
            raise ConfigError(
                f"merge_slices takes slices, but a batch has no {CHUNKS!r}, so it is whole; use it "
                "as it is, or set World(context_parallel=...)"
            )
        for key in COMMON:
            if not torch.equal(torch.as_tensor(own[key]), torch.as_tensor(slices[0][key])):
                raise ConfigError(
                    f"slices are of different batches: {key} differs; pass the slices of one step, "
                    "from ranks that share rows"
                )
