"""Ranks, nodes, replicas and context-parallel ranks, and how they are read from the environment."""

from __future__ import annotations

import logging
import pickle
import re
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from streampack import ConfigError, World


@st.composite
def worlds(draw):
    """All ranks of one job: nodes, ranks on each, and a replication that fits."""
    num_nodes, ranks_per_node = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    num_ranks = num_nodes * ranks_per_node
    fits = [
        r
        for r in range(1, num_ranks + 1)
        if num_ranks % r == 0 and (ranks_per_node % r == 0 or r % ranks_per_node == 0)
    ]
    replication = draw(st.sampled_from(fits))
    return [
        World(
            rank=rank, num_ranks=num_ranks, ranks_per_node=ranks_per_node, replication=replication
        )
        for rank in range(num_ranks)
    ]


@given(ranks=worlds())
def test_every_device_has_one_place_and_neighbouring_replicas_share_it(ranks):
    replication = ranks[0].replication
    groups = [ranks[i : i + replication] for i in range(0, len(ranks), replication)]

    assert all(len({rank.place for rank in group}) == 1 for group in groups)
    assert sorted(group[0].place for group in groups) == list(range(ranks[0].num_devices))


@given(ranks=worlds())
def test_places_of_neighbouring_replicas_count_local_ranks_across_nodes(ranks):
    for rank in ranks:
        device = rank.rank // rank.replication
        per_node = max(rank.num_local_ranks // rank.replication, 1)
        groups = rank.num_devices // per_node
        assert rank.place == device % per_node * groups + device // per_node


@given(ranks=worlds())
def test_nodes_have_neighbouring_ranks_and_places_alike_modulo_the_nodes(ranks):
    nodes = [rank.node for rank in ranks]

    assert nodes == sorted(nodes)
    assert set(nodes) == set(range(ranks[0].num_nodes))
    for rank in ranks:
        assert rank.replication > 1 or rank.place % rank.num_nodes == rank.node
        assert nodes.count(rank.node) == rank.num_local_ranks
        assert rank.num_local_ranks * rank.num_nodes == rank.num_ranks


@given(ranks=worlds(), data=st.data())
def test_each_slice_of_a_row_has_as_many_ranks_and_neighbours_share_it(ranks, data):
    replication = ranks[0].replication
    fits = [n for n in range(1, replication + 1) if replication % n == 0]
    size = data.draw(st.sampled_from(fits))
    cut = [replace(rank, context_parallel=size) for rank in ranks]

    for first in range(0, len(cut), replication):
        own = [rank.context_rank for rank in cut[first : first + replication]]
        assert own == sorted(own)
        assert [own.count(slice_) for slice_ in range(size)] == [replication // size] * size
    assert [rank.place for rank in cut] == [rank.place for rank in ranks]


def test_context_parallelism_is_added_to_torchruns_variables():
    world = World.from_env(
        {"RANK": "6", "WORLD_SIZE": "8"},
        replication=4,
        context_parallel=2,
        context_layout="contiguous",
    )
    assert (world.context_rank, world.context_layout, world.num_devices) == (1, "contiguous", 2)


def test_torchruns_variables_are_read():
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}

    world = World.from_env(env, replication=2)

    assert world == World(rank=5, num_ranks=8, ranks_per_node=4, replication=2)
    assert (world.node, world.num_nodes, world.num_devices) == (1, 2, 4)


def test_a_local_rank_without_the_size_of_a_node_contradicts_nothing():
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}

    assert World.from_env(env) == World(rank=5, num_ranks=8)


@contextmanager
def process_group(rank, num_ranks):
    """A process group of torch's "fake" backend, which needs no other ranks."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def test_an_initialised_process_group_says_which_rank_this_is():
    with process_group(3, 4):
        assert World.from_env({}) == World(rank=3, num_ranks=4)
        assert World.from_env({"LOCAL_WORLD_SIZE": "2"}) == World(
            rank=3, num_ranks=4, ranks_per_node=2
        )
        assert World.from_env({}, replication=2).num_devices == 2
    assert World.from_env({}) == World()


def test_variables_that_contradict_each_other_or_the_process_group_are_refused():
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2"}
    with pytest.raises(ConfigError, match=r"LOCAL_RANK=2, but .* is local rank 1"):
        World.from_env(env)
    says = r"says rank 3 of 4, but .* say rank 1 of 4"
    with process_group(3, 4), pytest.raises(ConfigError, match=says):
        World.from_env({"RANK": "1", "WORLD_SIZE": "4"})


def test_a_process_group_that_the_variables_agree_with_is_taken():
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    with process_group(3, 4):
        assert World.from_env(env) == World(rank=3, num_ranks=4, ranks_per_node=2)


@pytest.mark.parametrize(
    ("task", "num_tasks"),
    [
        ("SLURM_PROCID", "SLURM_NTASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ],
)
def test_tasks_of_a_launcher_that_nobody_made_ranks_are_told_of_once(task, num_tasks, caplog):
    env = {task: "1", num_tasks: "23"}
    with caplog.at_level(logging.WARNING, logger="streampack"):
        assert [World.from_env(env), World.from_env(env)] == [World(), World()]
    assert len(caplog.messages) == 1
    assert f"{task}=1, {num_tasks}=23, but RANK is not set" in caplog.text
    assert "call init_process_group before making the dataset, set RANK" in caplog.text


def test_slurm_is_no_matter_for_one_task_torchruns_ranks_or_a_process_group(caplog):
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "29"}
    with caplog.at_level(logging.WARNING, logger="streampack"):
        World.from_env({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "PMI_RANK": "0"})
        World.from_env({"SLURM_NTASKS": "29"})  # as in salloc's own shell
        assert World.from_env({**slurm, "RANK": "1", "WORLD_SIZE": "2"}).rank == 1
        with process_group(1, 2):
            assert World.from_env(slurm).rank == 1
    assert caplog.messages == []


SIZES = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2}


@given(order=st.permutations(list(SIZES)), per_node=st.sampled_from([1, 2, 4, 6, 12, 24, 48]))
@settings(deadline=None)
def test_ranks_of_any_mesh_share_a_place_by_their_data_parallel_coordinates(order, per_node):
    sizes = [SIZES[name] for name in order]
    ranks = np.arange(48).reshape(sizes)
    rows = np.moveaxis(ranks, [order.index("dp_replicate"), order.index("dp_shard")], [0, 1])
    rows = rows.reshape(6, 8).tolist()
    with process_group(5, 48), pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(per_node))
        world = World.from_mesh(init_device_mesh("cpu", sizes, mesh_dim_names=order))
    worlds = [world.at(rank) for rank in range(48)]

    coordinates = np.argwhere(ranks == 5)[0].tolist()
    assert (world.context_parallel, world.context_rank) == (2, coordinates[order.index("cp")])
    assert (world.num_devices, world.node, world.num_nodes) == (6, 5 // per_node, 48 // per_node)
    assert [{worlds[rank].device for rank in row} for row in rows] == [{n} for n in range(6)]
    places = [{worlds[rank].place for rank in row} for row in rows]
    assert sorted(place for [place] in places) == list(range(6))
    for one in worlds:  # nodes with a device in common read the lanes of the same places
        near = {other.device for other in worlds if other.node == one.node}
        assert near <= set(one.places[1][one.device])


@pytest.mark.parametrize(
    ("row", "dp_ranks"),
    [
        ([1, 3], [0, 0, 1, 1, 0, 0, 1, 1]),  # stages of dp 2, tp 2
        ([4, 5, 6, 7], [0, 1, 2, 3, 0, 1, 2, 3]),
        ([0, 4], [0, 0, 0, 0, 1, 1, 1, 1]),  # pipelines of neighbours
        ([0, 1, 4, 5], None),
    ],
)
def test_a_group_of_data_parallel_ranks_tells_those_of_all_if_evenly_spaced(row, dp_ranks):
    shared = {"num_ranks": 8, "dp_rank": 1, "dp_size": len(row)}
    with process_group(row[1], 8):
        group = distributed.new_group(row)
        world = World(rank=row[1], group=group, **shared)
    assert world == World(rank=row[1], group=row, **shared) == pickle.loads(pickle.dumps(world))
    assert (world.group, world.loading) == (tuple(row), tuple(row))
    assert world.dp_ranks == (None if dp_ranks is None else tuple(dp_ranks))
    assert (world.device, world.num_devices) == (1, len(row))


def test_a_data_parallel_rank_alone_is_enough_to_share_a_batch():
    dp_ranks = [0, 0, 1, 1, 0, 0, 1, 1]
    worlds = [World(rank=r, num_ranks=8, dp_rank=dp_ranks[r], dp_size=2) for r in range(8)]
    assert [world.place for world in worlds] == dp_ranks
    assert {world.num_devices for world in worlds} == {2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dp_rank": 1}, "dp_rank=1, dp_size=None"),
        ({"dp_size": 2}, "dp_rank=None, dp_size=2"),
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank=2, dp_size=2"),
        ({"dp_rank": 0, "dp_size": 9}, "do not divide num_ranks=8; pass rank and num_ranks as in"),
        ({"dp_ranks": [0, 1]}, "dp_ranks=[0, 1] do not divide num_ranks=8"),
        ({"dp_ranks": [0, 2] * 4}, "dp_ranks=(0, 2, 0, 2"),
        ({"dp_rank": 0, "dp_size": 2, "replication": 4}, "replication=4, .* omit replication"),
        ({"dp_rank": 0, "dp_size": 2, "context_parallel": 2, "cp_rank": 2}, "cp_rank=2 do not fit"),
        ({"group": [1, 2]}, "group=(1, 2) must have this rank=0"),
        ({"group": [0, 8]}, "only ranks below num_ranks=8"),
    ],
)
def test_data_parallel_ranks_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ConfigError, match=re.escape(message).replace(r"\.\*", ".*")):
        World(num_ranks=8, **given)


@pytest.mark.parametrize(
    ("names", "asked", "message"),
    [
        (("data", "model"), {}, "do not fit a mesh of ('data', 'model')"),
        (("dp_replicate", "fsdp"), {}, "do not fit a mesh of ('dp_replicate', 'fsdp')"),
        (("dp", "tp"), {"dp": ("dp", "dp_shard")}, "dp=('dp', 'dp_shard')"),
        (("dp", "tp"), {"dp": "dp", "cp": "context"}, "cp='context'"),
        (("dp", "cp"), {"dp": ("dp", "cp")}, "World.from_mesh(mesh, dp=('dp',))"),
    ],
)
def test_a_mesh_without_the_names_is_refused_with_those_that_it_has(names, asked, message):
    with process_group(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        with pytest.raises(ConfigError, match=re.escape(message)):
            World.from_mesh(mesh, **asked)
        dp = names[:1]
        world = World.from_mesh(mesh, dp=dp, cp=None)
        assert world == World(num_ranks=4, dp_ranks=[0, 0, 1, 1])


def test_megatrons_ranks_are_read_only_where_it_is_initialised():
    with pytest.raises(ConfigError, match="call initialize_model_parallel before"):
        World.from_megatron()
