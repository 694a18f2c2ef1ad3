"""Which ranks share batches, and which devices share nodes, of any order of ranks.

::

    rank      0 1 2 3   4 5 6 7      2 pipeline stages of 2 data- and 2 tensor-parallel ranks
    device    0 0 1 1   0 0 1 1      the dp_rank

torch.distributed and Megatron-LM are not imported: where they are initialised, they are loaded.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from streampack.errors import ConfigError

DP_DIMENSIONS = ("dp_replicate", "dp_shard")
SHARING = ("pp", "cp", "tp")  # dimensions of torch's meshes along which ranks share batches


@lru_cache(maxsize=32)
def device_places(
    devices: tuple[int, ...], per_node: int
) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """Return the place of each device, and the devices that share nodes with it, itself included.

    `devices` has that of each rank. Places are numbered across nodes first.

    >>> device_places((0, 1, 2, 3), 2)
    ((0, 2, 1, 3), {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)})
    """
    near: dict[int, set[int]] = {}
    for first in range(0, len(devices), per_node):
        own = set(devices[first : first + per_node])
        joined = own.union(*(near[device] for device in own if device in near))
        near |= dict.fromkeys(joined, joined)
    groups = {device: tuple(sorted(near[device])) for device in sorted(near)}
    order = sorted(groups, key=lambda device: (groups[device].index(device), groups[device]))
    return tuple(sorted(range(len(order)), key=order.__getitem__)), groups


def evenly_spaced(row: Sequence[int], num_ranks: int) -> tuple[int, ...] | None:
    """Return the dp_rank of each rank, if `row`, which has one rank of each in order, repeats.

    >>> evenly_spaced([1, 3], 8), evenly_spaced([0, 1, 4, 5], 8)
    ((0, 0, 1, 1, 0, 0, 1, 1), None)
    """
    step = max(row[1] - row[0], 1) if len(row) > 1 else num_ranks
    found = tuple(rank // step % len(row) for rank in range(num_ranks))
    return found if [found[rank] for rank in row] == list(range(len(row))) else None


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the ranks of a process group, or of a list of ranks."""
    is_list = isinstance(group, Sequence)
    ranks = group if is_list else sys.modules["torch.distributed"].get_process_group_ranks(group)
    return tuple(map(int, ranks))


def process_group() -> tuple[int, int] | None:
    """Return rank and world size from torch.distributed; None if it is not initialised."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def read_mesh(mesh: Any, dp: str | Sequence[str], cp: str | None) -> dict[str, Any]:
    """Return the fields of a `World` that a mesh tells; see `World.from_mesh`."""
    names, wanted = mesh.mesh_dim_names or (), (dp,) if isinstance(dp, str) else tuple(dp)
    unfit = {*wanted, cp or "cp"} - {*names, "cp"}
    if wanted == DP_DIMENSIONS and set(wanted) & set(names):
        unfit = set(names) - {*DP_DIMENSIONS, *SHARING, cp}  # others may be data-parallel
    if unfit or not wanted or cp in wanted:
        raise ConfigError(
            f"dp={dp!r} and cp={cp!r} do not fit a mesh of {names}; name the dimensions "
            "along which ranks get distinct batches, as in World.from_mesh(mesh, dp=('dp',))"
        )
    own = [names.index(name) for name in wanted if name in names]
    dp_size = math.prod(mesh.shape[number] for number in own)
    rows = mesh.mesh.movedim(own, list(range(len(own)))).reshape(dp_size, -1).tolist()
    dp_ranks = {rank: number for number, row in enumerate(rows) for rank in row}
    fields = _position()
    if sorted(dp_ranks) != list(range(fields["num_ranks"])):
        raise ConfigError(
            f"the mesh has {len(dp_ranks)} of {fields['num_ranks']} ranks; pass the mesh of all "
            "ranks, not a part of it"
        )
    fields["dp_ranks"] = [dp_ranks[rank] for rank in sorted(dp_ranks)]
    if cp not in names:
        return fields
    sizes = {"context_parallel": mesh.size(names.index(cp)), "cp_rank": mesh.get_local_rank(cp)}
    return fields | sizes


def read_megatron(*, cp: bool) -> dict[str, Any]:
    """Return the fields of a `World` that Megatron-LM's `parallel_state` tells."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        raise ConfigError(
            "megatron.core.parallel_state is not initialised; call initialize_model_parallel "
            "before World.from_megatron()"
        )
    fields, row = _position(), ranks_of(state.get_data_parallel_group())
    fields["dp_rank"], fields["dp_size"] = state.get_data_parallel_rank(), len(row)
    fields["dp_ranks"] = evenly_spaced(row, fields["num_ranks"])
    if cp:
        fields["context_parallel"] = state.get_context_parallel_world_size()
        fields["cp_rank"] = state.get_context_parallel_rank()
    return fields


def _position() -> dict[str, Any]:
    rank, num_ranks = process_group() or (0, 1)
    stated = os.environ.get("LOCAL_WORLD_SIZE", "")
    per_node = int(stated) if stated.isdigit() else stated or None
    return {"rank": rank, "num_ranks": num_ranks, "ranks_per_node": per_node}
