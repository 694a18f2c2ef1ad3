"""Which node fetches what: counted at the server, each simulated node with a cache of its own.

::

    lanes     0   1   2   3      2 nodes: node 0 has lanes 0 and 2, runs 0 and 1 of each stream
    runs      0   2   1   3               node 1 has lanes 1 and 3, runs 2 and 3
    shards    [    |   |x  |    ]         only the shard that the cut x fell into goes to both
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from streampack import (
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from streampack.report import simulate
from streampack.runtime.resumable import engine_of
from tests.helpers import conformance
from tests.helpers.faults.faultserver import FaultServer
from tests.helpers.faults.servers import s3_environment
from tests.helpers.planning import count_packs

NUM_LANES = 4
NUM_SAMPLES = {"s0": 900, "s1": 500, "s2": 60}
BIG = ("s0", "s1")  # s2 has fewer than 100 samples a lane: all lanes share one order of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What one node did in an epoch."""

    fetched: Counter[str]
    read: dict[str, int]
    """The shards that its batches hold tokens of, and the first step at which they do."""
    first_dry: int
    """The steps before the first lane has run dry."""


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[tuple[Path, FaultServer]]:
    root = tmp_path_factory.mktemp("store")
    rng = np.random.default_rng(5)
    lengths = [rng.integers(1, 80, number).tolist() for number in NUM_SAMPLES.values()]
    conformance.write_streams(root / "worlds", lengths, compression="zstd", hashes=("xxh64",))
    with FaultServer(folder=root) as server, s3_environment(server.url):
        yield root / "worlds", server


def make(caches: Path, epoch_end: str, world: World) -> PackedStreamingDataset:
    return PackedStreamingDataset(
        streams=[
            Stream(remote=f"s3://worlds/{name}", local=str(caches / str(world.node) / name))
            for name in NUM_SAMPLES
        ],
        packing=Packing(max_seq_len=128),
        mixing=Mixing(global_batch_size=32, epoch_end=epoch_end),
        order=Order(seed=3, num_lanes=NUM_LANES),
        batch_size=2,
        world=world,
    )


def run_node(
    store: tuple[Path, FaultServer], caches: Path, worlds: list[World], epoch_end: str
) -> Node:
    """Let all ranks of a node go through an epoch, one after the other; count what they ask for."""
    root, server = store
    before = len(server.requests())
    read: dict[str, int] = {}
    for world in worlds:
        dataset = make(caches, epoch_end, world)
        for step, batch in enumerate(PackedDataLoader(dataset)):
            for _, stream, _, sample, _, _ in batch["segments"].tolist():
                shard = shard_of(root, f"s{stream}", sample)
                read[shard] = min(step, read.get(shard, step))
    asked = server.requests()[before:]
    assert {request.status for request in asked} <= {200, 206}
    names = [r.path.removeprefix("/worlds/") for r in asked if r.method == "GET"]
    per_lane = [0]
    if epoch_end == "pad":  # else lanes never end
        per_lane = [
            sum(count_packs(engine_of(dataset).recipe, 0, lane)) for lane in range(NUM_LANES)
        ]
    # Until then device batch k comes from lane k mod num_lanes.
    batches = NUM_LANES * (min(per_lane) // 2)
    return Node(fetched=Counter(names), read=read, first_dry=batches // worlds[0].num_devices)


def run_nodes(
    store: tuple[Path, FaultServer], caches: Path, num_nodes: int, epoch_end: str
) -> list[Node]:
    """Let each node of two ranks in turn go through an epoch."""
    worlds = conformance.worlds(2 * num_nodes, num_nodes)
    return [
        run_node(store, caches, [world for world in worlds if world.node == node], epoch_end)
        for node in range(num_nodes)
    ]


@cache
def shard_stops(root: Path, name: str) -> tuple[list[str], np.ndarray]:
    """The names of a stream's shards, and the sample after the last one of each."""
    shards = json.loads((root / name / "index.json").read_text())["shards"]
    names = [f"{name}/{shard['zip_data']['basename']}" for shard in shards]
    return names, np.cumsum([shard["samples"] for shard in shards])


def shard_of(root: Path, name: str, sample: int) -> str:
    names, stops = shard_stops(root, name)
    return names[int(np.searchsorted(stops, sample, side="right"))]


def stored_bytes(root: Path) -> dict[str, int]:
    return {
        f"{name}/{path.name}": path.stat().st_size
        for name in NUM_SAMPLES
        for path in (root / name).glob("shard*")
    }


def in_several(nodes: Iterable[Iterable[str]], name: str) -> int:
    """How often a shard of a stream is in another node's files too."""
    counts = Counter(shard for node in nodes for shard in node if shard.startswith(f"{name}/shard"))
    return sum(counts.values()) - len(counts)


@pytest.mark.parametrize("num_nodes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_shard_is_fetched_by_one_node_but_for_the_cut_ones_and_small_streams(
    store, tmp_path, num_nodes
):
    nodes = run_nodes(store, tmp_path, num_nodes, "carry")

    worlds = conformance.worlds(2 * num_nodes, num_nodes)
    simulated = simulate(make(tmp_path, "carry", worlds[0]))["nodes"]
    for node, expected in zip(nodes, simulated, strict=True):
        assert expected["shards"] == len(node.read)
        assert expected["fetched_bytes"] == sum(map(stored_bytes(store[0]).get, node.read))
        others = {shard for other in nodes if other is not node for shard in other.read}
        assert expected["shared_shards"] == len(others & set(node.read))
    for node in nodes:
        assert set(node.fetched.values()) == {1}, "a node asked for a file twice"
        assert set(node.read) <= set(node.fetched)
    for name in BIG:
        assert len(shard_stops(store[0], name)[0]) > 4 * num_nodes
        assert in_several([node.fetched for node in nodes], name) <= num_nodes - 1


def test_in_a_padded_epoch_nodes_read_each_others_shards_only_once_a_lane_is_dry(store, tmp_path):
    nodes = run_nodes(store, tmp_path, 2, "pad")

    for node in nodes:
        assert set(node.fetched.values()) == {1}, "a node asked for a file twice"
        assert set(node.read) <= set(node.fetched)
    for name in BIG:
        before = [
            [shard for shard, step in node.read.items() if step < node.first_dry] for node in nodes
        ]
        assert min(map(len, before)) > 0
        assert in_several(before, name) <= 1
        everything = {shard for node in nodes for shard in node.read}
        assert set(shard_stops(store[0], name)[0]) <= everything


def test_a_shard_goes_to_one_node_of_each_pipeline_stage(store, tmp_path):
    # Stage 0 on nodes 0 and 1, stage 1 on nodes 2 and 3; two data-parallel ranks on each.
    shared = {"num_ranks": 8, "ranks_per_node": 2, "dp_ranks": [0, 1, 2, 3] * 2}
    worlds = [World(rank=rank, **shared) for rank in range(8)]
    nodes = [run_node(store, tmp_path, worlds[n : n + 2], "carry") for n in range(0, 8, 2)]

    simulated = simulate(make(tmp_path, "carry", worlds[0]))["nodes"]
    assert [each["shards"] for each in simulated] == [len(node.read) for node in nodes]
    for first, last in ((0, 2), (1, 3)):
        assert nodes[first].read == nodes[last].read
    for name in BIG:
        names = set(shard_stops(store[0], name)[0])
        for stage in (nodes[:2], nodes[2:]):
            assert in_several([node.fetched for node in stage], name) <= 1
            assert names <= {*stage[0].fetched, *stage[1].fetched}

    # Only the ranks of a group load.
    only = World(rank=4, group=range(4, 8), **shared)
    assert [each["shards"] for each in simulate(make(tmp_path, "carry", only))["nodes"]] == [
        *(0, 0),
        *(len(node.read) for node in nodes[2:]),
    ]
