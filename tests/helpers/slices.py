"""The slots of each context-parallel rank, one at a time, by the rules of the trainers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

import torch
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
)

from streampack import World
from streampack.world import ContextLayout

LAYOUTS: tuple[Any, ...] = get_args(ContextLayout)
PER_TOKEN = ("tokens", "labels", "input_pos", "document_ids")


def head_and_tail(num_slots: int, num_ranks: int, rank: int) -> list[int]:
    """The part of a row that a rank gets from torch's ring attention with load balancing."""
    order = _HeadTailLoadBalancer(num_slots, num_ranks, "cpu")._generate_indices()[0]
    return order.chunk(num_ranks)[rank].tolist()


def thd_partition(edges: list[int], num_ranks: int, rank: int) -> list[int]:
    """`thd_partition_indices_kernel` of TransformerEngine (context_parallel.cu), a token at a time.

    There, each thread looks up the sequence and the position of one token of this rank.
    """
    own = [edge // num_ranks for edge in edges]  # edges of this rank's tokens
    found = []
    for token in range(own[-1]):
        sequence = max(number for number, edge in enumerate(own[:-1]) if edge <= token)
        length = own[sequence + 1] - own[sequence]
        index = token - own[sequence]
        offset = rank if index < length // 2 else (num_ranks - 1) * 2 - rank
        found.append(index + own[sequence] * num_ranks + length // 2 * offset)
    return found


def slots(layout: str, num_ranks: int, rank: int, edges: list[int], frame: int) -> list[int]:
    """The slots of a rank in a batch, in its order.

    `edges` are those of cu_seqlens; `frame` is the number of slots that are sliced as a unit.
    """
    if layout == "zigzag_per_document":
        return thd_partition(edges, num_ranks, rank)
    if layout == "contiguous_per_document":
        cut = list(pairwise(edges))
    else:
        cut = [(begin, begin + frame) for begin in range(0, edges[-1], frame)]
    found: list[int] = []
    for begin, end in cut:
        if layout == "zigzag":
            found += [begin + at for at in head_and_tail(end - begin, num_ranks, rank)]
        else:
            size = (end - begin) // num_ranks
            found += range(begin + rank * size, begin + (rank + 1) * size)
    return found


def context_worlds(num_ranks: int, layout: str = "zigzag", **options: Any) -> list[World]:
    """The ranks of one replica that split each row, without tensor parallelism."""
    return [
        World(
            rank=rank,
            **{"num_ranks": num_ranks, "replication": num_ranks, **options},
            context_parallel=num_ranks,
            context_layout=layout,  # type: ignore[arg-type]
        )
        for rank in range(num_ranks)
    ]


def cut(batch: dict[str, Any], layout: str, num_ranks: int, rank: int, flat: bool = False) -> Any:
    """The tensors of a rank's slice of a full batch, token by token."""
    num_rows, row_tokens = batch["tokens"].shape
    frame = row_tokens * (num_rows if flat else 1)
    at = slots(layout, num_ranks, rank, batch["cu_seqlens"].tolist(), frame)
    return {
        key: batch[key].flatten()[torch.tensor(at)].view(num_rows, row_tokens // num_ranks)
        for key in PER_TOKEN
    }
