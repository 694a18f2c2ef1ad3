"""Ranks, nodes, replicas and context-parallel ranks, and how they are read from the environment."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
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
