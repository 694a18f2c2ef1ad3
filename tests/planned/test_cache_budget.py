"""Prefetching under a loader: the same batches, each shard once, and workable limits."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from streampack.config import Buffers, Mixing, Order, Packing
from streampack.errors import ConfigError
from streampack.loader.loader import PackedDataLoader
from streampack.planned.cache_budget import CacheWorkingSet, cache_needs, fetch_limits, lane_cycle
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.engine import PlanEngine
from streampack.runtime.resumable import engine_of
from streampack.streams import Stream
from streampack.world import World
from tests.helpers import conformance
from tests.helpers.conformance import Written, show, worlds
from tests.helpers.examples import crossed


def write(folder: Path, **options: Any) -> Written:
    rng = np.random.default_rng(6)
    lengths = [rng.integers(20, 60, 400).tolist(), rng.integers(20, 100, 150).tolist()]
    return conformance.write_streams(folder, lengths, **options)


@pytest.fixture(scope="module", params=[True, False])
def written(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("remote")
    return write(folder, compression="zstd", hashes=["xxh64"], lengths_file=request.param)


def remote(written: Written, local: Path, **options: Any) -> PackedStreamingDataset:
    return PackedStreamingDataset(
        [Stream(remote=str(path), local=str(local / path.name)) for path in written.paths],
        packing=Packing(max_seq_len=64),
        order=Order(**{"seed": 3, "shuffle_block_size": 60, **options.pop("order", {})}),
        **{"batch_size": 2, "world": World(), **options},
    )


def fetch_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("streampack-fetch")]


LOADERS = {
    "threads": lambda dataset: PackedDataLoader(dataset),
    "workers": lambda dataset: PackedDataLoader(dataset, num_workers=1),
    "plain": lambda dataset: dataset,
    "torch": lambda dataset: DataLoader(dataset, batch_size=None, num_workers=2),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("written", "loader"), crossed([True, False], list(LOADERS)), indirect=["written"]
)
def test_fetching_ahead_gives_the_batches_of_the_streams_at_rest(written, tmp_path, loader):
    wanted = [show(batch) for batch in conformance.make(written, order={"shuffle_block_size": 60})]
    dataset = remote(written, tmp_path)
    assert [show(batch) for batch in LOADERS[loader](dataset)] == wanted
    assert not fetch_threads()


def test_each_shard_is_fetched_once_and_counted(written, tmp_path):
    loader = PackedDataLoader(remote(written, tmp_path))
    for _ in range(2):
        for _ in loader:
            pass
    packed = [path for own in written.paths for path in own.glob("*.mds.zstd")]
    shards = loader.stats()["shards"]
    assert shards["fetched"] == len(packed)
    assert shards["fetched_bytes"] == sum(path.stat().st_size for path in packed)
    files = [path for own in written.paths for path in own.iterdir() if path.is_file()]
    assert shards["index_bytes"] == sum(path.stat().st_size for path in {*files} - {*packed})
    assert 0 <= shards["waited_for"] <= len(packed)
    assert shards["ahead_bytes"] >= 0
    loader.load_state_dict(loader.state_dict())
    next(iter(loader))
    assert loader.stats()["shards"]["fetched"] == 0


def test_no_thread_starts_where_nothing_is_to_be_fetched(tmp_path):
    written = write(tmp_path)
    loader = PackedDataLoader(conformance.make(written))
    for _ in loader:
        assert not fetch_threads()
    assert loader.stats()["shards"] == dict.fromkeys(loader.stats()["shards"], 0)


def cached_bytes(local: Path) -> int:
    sizes = []
    for path in local.glob("*/shard.*"):
        with suppress(FileNotFoundError):  # evicted meanwhile
            sizes.append(path.stat().st_size)
    return sum(sizes)


@pytest.mark.processes
def test_a_limit_below_the_working_set_is_refused_and_the_least_that_works_works(tmp_path):
    lengths = np.random.default_rng(5).integers(1, 30, 5000).tolist()
    written = conformance.write_streams(
        tmp_path / "remote", [lengths], compression="zstd", size_limit=2**13
    )
    with pytest.raises(ConfigError, match=r"cache_limit=1\).*at least \d+") as caught:
        remote(written, tmp_path, buffers=Buffers(cache_limit=1))
    least = int(re.search(r"at least (\d+)", str(caught.value))[1])
    with pytest.raises(ConfigError, match=rf"at least {least}"):
        remote(written, tmp_path, buffers=Buffers(cache_limit=least - 1))
    wanted = [show(batch) for batch in conformance.make(written, order={"shuffle_block_size": 60})]
    dataset = remote(written, tmp_path, buffers=Buffers(cache_limit=least))
    shown = []
    for batch in PackedDataLoader(dataset):
        shown.append(show(batch))
        assert cached_bytes(tmp_path / "s0") <= least
    assert shown == wanted
    assert least < sum(path.stat().st_size for path in written.paths[0].glob("*.zstd")) * 2
    # Workers have their own shards in flight, and the same message states how much they need.
    with pytest.raises(ConfigError, match=r"cache_limit"):
        PackedDataLoader(dataset, num_workers=1)
    each = int(re.search(r"and (\d+) more for each of num_workers", str(caught.value))[1])
    dataset = remote(written, tmp_path, buffers=Buffers(cache_limit=least + 2 * each))
    loader = PackedDataLoader(dataset, num_workers=2)
    assert [show(batch) for batch in loader] == wanted


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_that_plan_for_themselves_have_a_shard_in_flight_each(num_workers):
    needs = CacheWorkingSet(node_bytes=1000, own_bytes=1000, shard_bytes=100)
    least = 1000 + 100 * num_workers
    options = {"num_workers": num_workers, "planner": num_workers - 1}
    with pytest.raises(ConfigError, match=f"at least {least}"):
        fetch_limits(least - 1, needs, World(), **options)
    assert fetch_limits(least, needs, World(), **options).num_threads == 1


def test_streams_that_lie_here_need_no_cache(tmp_path):
    written = write(tmp_path)
    dataset = conformance.make(written, buffers=Buffers(cache_limit="1kb"))
    num_batches = len(dataset)
    assert sum(1 for _ in dataset) == num_batches


def test_the_limit_is_the_nodes_whatever_its_ranks_read(tmp_path):
    written = write(tmp_path / "remote", compression="zstd")
    least = []
    for num_ranks, num_lanes in [(1, 1), (2, 1), (2, 2)]:
        options = {"order": {"num_lanes": num_lanes}, "world": worlds(num_ranks)[0]}
        with pytest.raises(ConfigError) as caught:
            remote(written, tmp_path, buffers=Buffers(cache_limit=1), **options)
        least.append(int(re.search(r"at least (\d+)", str(caught.value))[1]))
    # Ranks that share a lane also share its shards, so only those in flight add to them.
    assert least[0] < least[1] < least[2]


def test_room_for_a_shard_in_flight_is_that_of_the_largest_of_all_streams(tmp_path):
    lengths = np.random.default_rng(6).integers(20, 60, 900).tolist()
    paths = [
        conformance.write_streams(tmp_path / name, [lengths], size_limit=size_limit).paths[0]
        for name, size_limit in [("large", 2**15), ("small", 2**12)]
    ]
    largest = [max(file.stat().st_size for file in path.glob("shard.*")) for path in paths]
    assert largest[0] > 4 * largest[1]
    for number, order in enumerate((paths, paths[::-1])):
        folder = tmp_path / f"local{number}"
        streams = [Stream(remote=str(path), local=str(folder / path.parent.name)) for path in order]
        engine = engine_of(
            PackedStreamingDataset(streams, packing=Packing(max_seq_len=64), batch_size=2)
        )
        assert cache_needs(engine.spec, engine.recipe).shard_bytes == largest[0]


def test_lanes_that_move_between_nodes_with_carry_count_in_every_epoch(tmp_path):
    lengths = [40] * 200 + [1] * 200 + [20] * 200
    written = conformance.write_streams(tmp_path / "remote", [lengths], compression="zstd")

    def engine(rank: int) -> PlanEngine:
        # A step of all ranks takes 6 packs, but epochs consist of whole global batches of 8.
        return engine_of(
            remote(
                written,
                tmp_path,
                world=worlds(3, num_nodes=3)[rank],
                order={"num_lanes": 3, "shuffle_block_size": 10},
                mixing=Mixing(epoch_end="carry", global_batch_size=8, epoch_size=520),
                buffers=Buffers(cache_limit="1gb"),
            )
        )

    by_rank = []
    for rank in range(3):
        of_rank = engine(rank)
        cycle = lane_cycle(of_rank.spec, of_rank.recipe)
        assert cycle == 3
        by_rank.append([cache_needs(of_rank.spec, of_rank.recipe, n) for n in range(cycle)])
    for needs in by_rank:
        own = [need.own_bytes for need in needs]
        assert len(set(own)) > 1  # lanes of different sizes, one after another
        assert {need.node_bytes for need in needs} == {max(own)}
    for epoch in range(3):  # each lane is read by one node
        assert sorted(needs[epoch].own_bytes for needs in by_rank) == sorted(
            need.own_bytes for need in by_rank[0]
        )
