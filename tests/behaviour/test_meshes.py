"""Ranks of torch's meshes: who shares a batch, what they add up, and what is refused.

::

    pp 2, dp 2, tp 2     rank  0 1 2 3   4 5 6 7      real gloo ranks, in one job
                         row   a a b b   a a b b
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from streampack import (
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
    merge_slices,
)
from streampack.errors import ConfigError
from streampack.formats import global_units
from streampack.write import write_stream
from tests.helpers.ranks import on_ranks

NUM_RANKS = 8
PIPELINES = [[rank, rank + 4] for rank in range(4)]  # first and last stage


def dataset_of(folder, world, **options):
    return PackedStreamingDataset(
        [Stream(local=folder / "text")],
        packing=Packing(max_seq_len=64, pad_to_multiple=4),
        mixing=Mixing(global_batch_size=8),
        order=Order(seed=5, num_lanes=2),
        batch_size=2,
        world=world,
        **options,
    )


def first_rows(loader) -> tuple[Any, Any]:
    batch = next(iter(loader))
    return batch, np.asarray(batch["segments"]).tolist()


def refusal(call) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def of_mesh(folder, mesh) -> dict[str, Any]:
    """What a rank sees in the world of its mesh."""
    world = World.from_mesh(mesh)
    loader = PackedDataLoader(dataset_of(folder, world))
    batch, segments = first_rows(loader)
    stats = loader.stats(all_ranks=True)
    return {
        "segments": segments,
        "place": world.place,
        "packs": [stats["packs"], stats["tokens"], loader.stats()["packs"]],
        "units": global_units([batch], world=world),
        "own units": global_units([batch], group=mesh["dp_shard"].get_group()),
        "state": loader.gather_state()["position"],
    }


def refused(folder, world) -> dict[str, Any]:
    """How a rank's first batch is refused, and where its loader stands then."""
    loader = PackedDataLoader(dataset_of(folder, world))
    message = refusal(lambda: next(iter(loader)))
    return {"message": message, "position": loader.state_dict()["position"]}


def of_stages(folder, mesh, rank) -> dict[str, Any] | None:
    """What the ranks that load see, if these are one of each tensor-parallel pair."""
    loading = [0, 2, 4, 6]
    if rank not in loading:
        return None
    loader = PackedDataLoader(dataset_of(folder, World.from_mesh(mesh, group=loading)))
    other = PackedDataLoader(
        dataset_of(folder, replace(World.from_mesh(mesh, group=loading), dp_ranks=range(8)))
    )
    _, segments = first_rows(loader)
    return {
        "segments": segments,
        "packs": loader.stats(all_ranks=True)["packs"],
        "refused": refusal(lambda: next(iter(other))),
    }


def of_slices(folder) -> dict[str, Any]:
    """What a rank of a mesh with context parallelism sees."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "cp"))
    world = World.from_mesh(mesh)
    batch, segments = first_rows(PackedDataLoader(dataset_of(folder, world)))
    slices: list[Any] = [None, None]
    distributed.all_gather_object(slices, batch, group=mesh["cp"].get_group())
    shared = World.from_mesh(mesh, cp=None)
    whole, _ = first_rows(PackedDataLoader(dataset_of(folder, shared)))
    return {
        "segments": segments,
        "slice": [world.context_rank, batch["tokens"].shape[1]],
        "merged": bool((merge_slices(slices)["tokens"] == whole["tokens"]).all()),
        "units": [global_units([batch], world=world), global_units([whole], world=shared)],
    }


def see(rank, folder) -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    before = World(rank=rank, num_ranks=NUM_RANKS, ranks_per_node=4, replication=4)
    seen: dict[str, Any] = {"no mesh": refused(folder, before)}
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
    seen["mesh"] = of_mesh(folder, mesh)
    seen["replication"] = refused(folder, before)
    seen["part"] = refusal(lambda: World.from_mesh(mesh["dp_shard", "tp"]))
    seen["stages"] = of_stages(folder, mesh, rank)
    seen["slices"] = of_slices(folder)
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mesh")
    write_stream([[i % 500 + 1] * (i % 37 + 4) for i in range(400)], folder / "text")
    return on_ranks(folder, see, NUM_RANKS)


def test_the_stages_of_a_pipeline_get_the_same_rows_and_data_parallel_ranks_others(seen):
    for name in ("mesh", "slices"):
        rows = [rank[name]["segments"] for rank in seen]
        assert all(rows[first] == rows[last] for first, last in PIPELINES)
        assert rows[0] == rows[1] != rows[2] == rows[3]
    assert [rank["mesh"]["place"] for rank in seen] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_statistics_and_targets_count_ranks_that_share_a_batch_once(seen):
    for rank in (each["mesh"] for each in seen):
        assert rank["packs"][0] == 2 * rank["packs"][2] == 4
        assert rank["packs"] == seen[0]["mesh"]["packs"]
        assert rank["units"] == rank["own units"] == seen[0]["mesh"]["units"]
        assert rank["state"] == 4


def test_replication_is_refused_on_every_rank_where_a_mesh_has_a_pipeline(seen):
    for rank in seen:
        assert rank["no mesh"] == {"message": "", "position": 4}
        message = rank["replication"]["message"]
        assert "ranks 0 and 4 work on one model, but get different batches" in message
        assert "replication=4, dp_size=2" in message
        assert "World.from_mesh(mesh) or World.from_megatron()" in message
        assert rank["replication"]["position"] == 0  # the loop has no batch


def test_a_part_of_a_mesh_is_refused(seen):
    assert all("the mesh holds 4 of 8 ranks; pass the mesh of all" in rank["part"] for rank in seen)


def test_only_ranks_of_the_group_load_and_compare(seen):
    loading = [rank["stages"] for rank in seen if rank["stages"]]
    assert len(loading) == 4
    assert [each["segments"] for each in loading] == [
        seen[r]["mesh"]["segments"] for r in (0, 2) * 2
    ]
    assert [each["packs"] for each in loading] == [4] * 4
    assert all("ranks 0 and 4 work on one model" in each["refused"] for each in loading)


def test_slices_of_a_mesh_merge_into_the_rows_and_count_their_targets_once(seen):
    for number, rank in enumerate(each["slices"] for each in seen):
        assert rank["slice"] == [number % 2, 32]
        assert rank["merged"]
        assert rank["units"] == [seen[0]["mesh"]["units"]] * 2
