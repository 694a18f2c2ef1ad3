"""Ranks of torch's meshes: who shares a batch, what they add up, and what is refused.

::

    pp 2, dp 2, tp 2     rank  0 1 2 3   4 5 6 7      real gloo ranks, in one job
                         row   a a b b   a a b b
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streampack import (
    Balance,
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
    merge_slices,
)
from streampack.errors import ConfigError
from streampack.formats import global_units
from streampack.lookback import at
from streampack.write import write_stream
from tests.helpers.ranks import on_ranks

NUM_RANKS = 8
PIPELINES = [[rank, rank + 4] for rank in range(4)]  # first and last stage


def dataset_of(folder, world, *, batch_size=2, **options):
    return PackedStreamingDataset(
        [Stream(local=folder / "text")],
        packing=Packing(max_seq_len=64, pad_to_multiple=4),
        mixing=Mixing(global_batch_size=8),
        order=Order(seed=5, num_lanes=2),
        batch_size=batch_size,
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


def refused(folder, world, **options) -> dict[str, Any]:
    """How a rank's first batch is refused, and where its loader stands then."""
    loader = PackedDataLoader(dataset_of(folder, world, **options))
    message = refusal(lambda: next(iter(loader)))
    return {"message": message, "position": loader.state_dict()["position"]}


def of_stages(folder, mesh, rank) -> dict[str, Any] | None:
    """What the ranks that load see, if these are one of each tensor-parallel pair."""
    loading = distributed.new_group([0, 2, 4, 6], backend="gloo")
    if rank % 2:
        return None
    world = World.from_mesh(mesh, group=loading)
    loader = PackedDataLoader(dataset_of(folder, world))
    other = PackedDataLoader(dataset_of(folder, replace(world, dp_ranks=range(8))))
    none = PackedDataLoader(dataset_of(folder, World.from_mesh(mesh, group=sorted({0, rank, 6}))))
    _, segments = first_rows(loader)
    return {
        "segments": segments,
        "packs": loader.stats(all_ranks=True)["packs"],
        "refused": refusal(lambda: next(iter(other))),
        "no group": refusal(lambda: next(iter(none))),
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
    DeviceMesh("cpu", [4, 5], mesh_dim_names=("tp",))  # the other ranks have no part in it
    alone = World(rank=rank, num_ranks=NUM_RANKS)
    seen["part of the ranks"] = refused(folder, alone, batch_size=1)
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


def test_ranks_outside_of_a_mesh_do_not_leave_those_in_it_waiting(seen):
    for rank in seen:
        message = rank["part of the ranks"]["message"]
        assert "ranks 4 and 5 work on one model, but get different batches" in message


def test_a_part_of_a_mesh_is_refused(seen):
    assert all("the mesh has 4 of 8 ranks; pass the mesh of all" in rank["part"] for rank in seen)


def test_only_ranks_of_the_group_load_and_compare(seen):
    loading = [rank["stages"] for rank in seen if rank["stages"]]
    assert len(loading) == 4
    assert [each["segments"] for each in loading] == [
        seen[r]["mesh"]["segments"] for r in (0, 2) * 2
    ]
    assert [each["packs"] for each in loading] == [4] * 4
    assert all("ranks 0 and 4 work on one model" in each["refused"] for each in loading)
    assert "group=(0, 6) is not a process group on the CPU; make one" in loading[0]["no group"]


def test_slices_of_a_mesh_merge_into_the_rows_and_count_their_targets_once(seen):
    for number, rank in enumerate(each["slices"] for each in seen):
        assert rank["slice"] == [number % 2, 32]
        assert rank["merged"]
        assert rank["units"] == [seen[0]["mesh"]["units"]] * 2


DP_RANKS = [0, 0, 1, 1, 2, 2, 3, 3] * 2  # 2 stages of dp 4, tp 2, on 4 nodes


def mesh_world(rank: int) -> World:
    return World(rank=rank, num_ranks=16, ranks_per_node=4, dp_ranks=DP_RANKS)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    write_stream([[i % 500 + 1] * (i % 37 + 4) for i in range(400)], folder / "text")
    return folder


def rows_of(batches) -> list[list[list[int]]]:
    """The segments of each row of batches, without the row's number."""
    return [
        [segment[1:] for segment in batch["segments"].tolist() if segment[0] == row]
        for batch in batches
        for row in range(len(batch["tokens"]))
    ]


@pytest.mark.parametrize("within", ["rank", "node", "batch"])
def test_a_balanced_global_batch_is_dealt_once_to_each_stage(text, within):
    balance = Balance(within=within)
    ranks = [list(islice(dataset_of(text, mesh_world(r), balance=balance), 4)) for r in range(16)]
    alone = list(islice(dataset_of(text, World()), 16))

    by_dp = [rows_of(batches) for batches in ranks]
    assert all(by_dp[rank] == by_dp[rank + 8] for rank in range(8))
    dealt = [row for rank in range(0, 8, 2) for row in by_dp[rank]]
    assert sorted(dealt) == sorted(rows_of(alone))


def test_a_look_back_names_all_ranks_of_a_mesh_and_a_state_resumes_in_another(text):
    dataset = dataset_of(text, mesh_world(6))
    loader = PackedDataLoader(dataset)
    first, second = islice(loader, 2)
    state = json.loads(json.dumps(loader.state_dict()))
    assert json.loads(state["worlds"]) == [[0, 0, 16, 4, DP_RANKS, 2, None, None]]

    found = at(dataset, 1, rank=14)
    assert {row.ranks for row in found.rows} == {(6, 7, 14, 15)}
    assert [row.segments[:, :5].tolist() for row in found.rows] == rows_of([second])

    other = dataset_of(text, World(num_ranks=2))
    other.load_state_dict(state)
    whole = list(islice(dataset_of(text, World()), 12))
    assert rows_of(islice(other, 1)) == rows_of(whole[8:9])
    rows = {row.ranks: row.segments[:, :5].tolist() for row in at(other, 0).rows if row.row == 0}
    assert rows[6, 7, 14, 15] == rows_of([first])[0]

    # Without the ranks of others, a look back counts data-parallel ranks.
    only = replace(mesh_world(6), dp_ranks=None)
    assert {row.ranks for row in at(dataset_of(text, only), 0).rows} == {(0,), (1,), (2,), (3,)}


def test_ranks_of_a_mesh_share_the_parts_of_an_iterable():
    def batches_of(world):
        return PackedIterableDataset(
            [IterableStream(source=[{"tokens": [i + 1] * 9} for i in range(200)])],
            packing=Packing(max_seq_len=36),
            batch_size=1,
            world=world,
        )

    first = [next(iter(batches_of(mesh_world(rank))))["tokens"].tolist() for rank in range(16)]
    assert first[:8] == first[8:]
    assert first[::2] == first[1::2]
    assert len({str(rows) for rows in first}) == 4
