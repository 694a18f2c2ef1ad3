"""`PackedStreamingDataset`: what it accepts and what it refuses at construction."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streaming
from torch import distributed, multiprocessing
from torch.utils.data import IterableDataset

from streampack.config import Order, Packing
from streampack.errors import ConfigError, DataError
from streampack.loader.loader import PackedDataLoader
from streampack.planned.dataset import PackedStreamingDataset
from streampack.runtime.resumable import engine_of
from streampack.streams import Stream
from streampack.world import World
from tests.helpers import conformance
from tests.helpers.conformance import all_rows, show, worlds


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    rng = np.random.default_rng(7)
    lengths = [rng.integers(1, 50, 60).tolist(), rng.integers(1, 80, 40).tolist()]
    return conformance.write_streams(tmp_path_factory.mktemp("streams"), lengths)


def dataset_of(streams: Any = None, **options: Any) -> PackedStreamingDataset:
    return PackedStreamingDataset(streams, packing=Packing(max_seq_len=64), **options)


def test_a_single_stream_can_be_named_by_its_place_alone(written, tmp_path):
    wanted = [show(batch) for batch in dataset_of([Stream(local=str(written.paths[0]))])]
    local = dataset_of(local=str(written.paths[0]))
    assert isinstance(local, IterableDataset)
    assert [show(batch) for batch in local] == wanted
    remote = dataset_of(remote=str(written.paths[0]), local=str(tmp_path / "cache"))
    assert [show(batch) for batch in remote] == wanted
    split = dataset_of(local=str(written.paths[0].parent), split="s0")
    assert [show(batch) for batch in split] == wanted
    by_path = dataset_of(
        remote=written.paths[0], local=tmp_path / "cache", stream_name="streampack"
    )
    assert [show(batch) for batch in by_path] == wanted


def test_mosaicmls_own_streams_are_taken_with_their_weights(written):
    weights = [{"repeat": 2}, {"choose": 10}]
    streams = [
        streaming.Stream(local=str(path), **weight)
        for path, weight in zip(written.paths, weights, strict=True)
    ]
    dataset = conformance.make(written, weights=weights)
    theirs = PackedStreamingDataset(
        streams, packing=Packing(max_seq_len=64), order=Order(seed=3), batch_size=2, world=World()
    )
    rows = all_rows([theirs])
    assert rows == all_rows([dataset])
    conformance.check_exactly_once(rows, written, (120, 10))


def test_streams_with_the_same_name_are_numbered(written):
    dataset = dataset_of([Stream(local=str(written.paths[0])), Stream(local=str(written.paths[0]))])
    assert dataset.stream_names == ["s0-0", "s0-1"]
    named = dataset_of([Stream(local=str(written.paths[0]), name="code")])
    assert named.stream_names == ["code"]


def test_the_constructor_touches_no_shard(tmp_path):
    written = conformance.write_streams(tmp_path, [[5, 6, 7]])
    for shard in written.paths[0].glob("shard.*"):
        shard.write_bytes(bytes(shard.stat().st_size))  # only its size is checked
    dataset = conformance.make(written)
    assert len(dataset) == 1  # the length file is enough
    with pytest.raises(DataError, match=r"shard\.00000"):
        next(iter(dataset))


def _packs_of_rank(rank, folder, written):
    """Iterate as in PyTorch's tutorial: no environment variables, the rank is an argument."""
    early = conformance.make(written, world=None)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    packs = [show(batch) for batch in conformance.make(written, world=None)]
    refused = []
    # A spawned worker gets a copy, and cannot see the process group.
    for use in (iter, lambda dataset: next(iter(PackedDataLoader(dataset))), pickle.dumps):
        try:
            use(early)
        except ConfigError as error:
            refused.append(str(error))
    Path(folder, str(rank)).write_bytes(pickle.dumps([packs, refused]))
    distributed.destroy_process_group()


@pytest.mark.processes
def test_ranks_that_know_each_other_by_torch_distributed_alone_share_the_data(
    written, tmp_path, monkeypatch
):
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    # Forked, since importing the libraries in each rank would take longer than the test.
    multiprocessing.start_processes(
        _packs_of_rank, (str(tmp_path), written), nprocs=2, start_method="fork"
    )
    for rank in (0, 1):
        packs, refused = pickle.loads((tmp_path / str(rank)).read_bytes())
        own = conformance.make(written, world=worlds(2)[rank])
        assert packs == [show(batch) for batch in own]
        assert len(refused) == 3
        for message in refused:
            assert "the dataset was made as rank 0 of 1, but now torch.distributed says" in message
            assert f"rank {rank} of 2; make the dataset after init_process_group" in message


def test_lanes_follow_the_nodes_only_where_they_are_long_enough(written):
    def lanes(max_seq_len: int, num_nodes: int) -> int:
        world = worlds(num_nodes, num_nodes)[0]
        weights = [{"repeat": 100}, {}]
        dataset = conformance.make(written, weights=weights, max_seq_len=max_seq_len, world=world)
        return engine_of(dataset).recipe.num_lanes

    tokens = 100 * sum(written.lengths[0]) + sum(written.lengths[1])
    assert lanes(1, 4) == 4
    assert lanes(tokens // 4096 // 2 + 1, 2) == 1


def test_a_shallow_copy_of_a_dataset_has_its_own_position(written):
    dataset = conformance.make(written)
    batches = iter(dataset)
    next(batches)
    state = dataset.state_dict()
    other = copy.copy(dataset)
    other.set_epoch(3)
    next(batches)
    assert dataset.state_dict()["position"] == 2 * state["position"]
    assert other.state_dict()["epoch"] == 3


def test_arguments_that_were_left_open_are_set_later(written):
    left_open = conformance.make(written, batch_size=None, world=None)
    assert {left_open.arguments[name] for name in ("batch_size", "batch_format")} == {None}
    dataset = left_open.with_batches(
        batch_size=2, global_batch_size=4, batch_format="hf", world=World(rank=1, num_ranks=2)
    )
    wanted = conformance.make(
        written,
        mixing={"global_batch_size": 4},
        batch_size=2,
        batch_format="hf",
        world=World(rank=1, num_ranks=2),
    )
    assert dataset.digest == wanted.digest
    batches, others = list(dataset), list(wanted)
    assert len(batches) == len(others) == len(dataset)
    for batch, other in zip(batches, others, strict=True):
        assert batch["input_ids"].equal(other["input_ids"])
    again = dataset.with_batches(batch_size=2, batch_format="hf")
    assert (again.batch_size, again.world) == (2, dataset.world)
    in_order = left_open.with_arguments(order=Order(shuffle=False, seed=3))
    wanted = conformance.make(written, batch_size=None, order={"shuffle": False})
    assert in_order.digest == wanted.digest


@pytest.mark.parametrize("size", [3.0, np.int64(3), np.float32(3)])
def test_a_batch_size_of_any_kind_is_kept_as_an_int(written, size):
    dataset = conformance.make(written, batch_size=size)
    assert type(dataset.batch_size) is int
    assert next(iter(dataset))["tokens"].shape[0] == dataset.batch_size == 3


@pytest.mark.parametrize("index", [0, -1, slice(2)])
def test_a_dataset_has_no_index_and_the_way_out_gives_a_batch(written, index):
    dataset = dataset_of(local=str(written.paths[0]))
    with pytest.raises(ConfigError, match=r"dataset\[.*no index.* take next\(iter\(dataset\)\)"):
        dataset[index]
    assert next(iter(dataset))["tokens"].shape == (1, 64)
