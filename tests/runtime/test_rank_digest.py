"""Ranks that plan from different data are named before the first batch, in real process groups."""

from __future__ import annotations

import logging
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from streampack import (
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    ResumeError,
    Stream,
    World,
)
from streampack.index import write_lengths
from streampack.report import simulate
from streampack.write import write_stream
from tests.helpers.conformance import worlds
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.processes

NUM_RANKS = 2
SIZES = {"text": (400, 500), "code": (90, 90)}  # samples of the older version, and of the newer


def write(folder: Path, number: int) -> None:
    rows = ([i + 1] * (i % 13 + 1) for i in range(number))
    write_stream(rows, folder, compression=None, size_limit=2048)


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> Path:
    """An older and a newer version of an origin."""
    folder = tmp_path_factory.mktemp("versions")
    for name, (older, newer) in SIZES.items():
        write(folder / "older" / name, older)
        write(folder / "newer" / name, newer)
    return folder


@pytest.fixture
def nodes(versions, tmp_path) -> Path:
    """The caches of two nodes; the one of rank 1 has an older version of "text"."""
    shutil.copytree(versions / "newer", tmp_path / "newer")
    shutil.copytree(versions / "newer", tmp_path / "node0")
    shutil.copytree(versions / "older", tmp_path / "node1")
    return tmp_path


def dataset(rank: int, folder: Path, **options: Any) -> PackedStreamingDataset:
    order = Order(seed=options.pop("seed", 3))
    return PackedStreamingDataset(
        [Stream(local=str(folder / f"node{rank}" / name)) for name in ("code", "text")],
        packing=Packing(max_seq_len=64),
        mixing=Mixing(global_batch_size=8),
        order=order,
        batch_size=2,
        **options,
    )


def epoch(loader: PackedDataLoader) -> list[int]:
    """The number of samples of each stream that begin in an epoch."""
    for _ in loader:
        pass
    return [each["samples"] for each in loader.stats()["streams"].values()]


def load_all(rank: int, folder: Path) -> Any:
    return epoch(PackedDataLoader(dataset(rank, folder)))


def load_in_workers(rank: int, folder: Path) -> Any:
    return epoch(PackedDataLoader(dataset(rank, folder), num_workers=1))


@pytest.mark.parametrize("load", [load_all, load_in_workers])
def test_a_node_with_an_older_copy_is_named_and_once_it_is_deleted_all_samples_come(nodes, load):
    for seen in on_ranks(nodes, load, NUM_RANKS):
        assert seen.startswith("DataError: rank 1 has another index.json, or other columns of")
        assert "stream 'text' (streams[1])" in seen
        assert f"{nodes}/node1/text there, and in {nodes}/node0/text on rank 0" in seen
        assert "check_ranks=False" in seen
    # The way out.
    shutil.rmtree(nodes / "node1" / "text")
    shutil.copytree(nodes / "newer" / "text", nodes / "node1" / "text")
    first, second = on_ranks(nodes, load, NUM_RANKS)
    assert [sum(pair) for pair in zip(first, second, strict=True)] == [90, 500]


def load_with_other_seeds(rank: int, folder: Path) -> Any:
    return epoch(PackedDataLoader(dataset(0, folder, seed=3 + rank)))


def load_other_world(rank: int, folder: Path) -> Any:
    """Rank 0 evaluates alone, on other data."""
    return epoch(PackedDataLoader(dataset(0, folder, world=World()))) if rank == 0 else []


def load_on_one_rank(rank: int, folder: Path) -> Any:
    """Only rank 0 reads a batch."""
    distributed.barrier()  # if a rank ended early, the other one could not connect
    loader = PackedDataLoader(dataset(rank, folder), check_ranks=False)
    return next(iter(loader))["epoch"] if rank == 0 else 0


def load_twice(rank: int, folder: Path) -> Any:
    """A second iteration does not compare anything, since rank 1 does not begin one."""
    loader = PackedDataLoader(dataset(0, folder))
    list(loader)
    return next(iter(loader))["epoch"] if rank == 0 else 1


# The second has no backend for the CPU, as "nccl".
@pytest.mark.parametrize("backend", ["gloo", "cuda:gloo"])
def test_another_recipe_is_named(nodes, backend):
    for seen in on_ranks(nodes, load_with_other_seeds, NUM_RANKS, backend=backend):
        assert seen.startswith("ConfigError: ranks have different seed: rank 0 has 3, rank 1 has 4")


@pytest.mark.parametrize(
    ("load", "wanted"),
    [(load_other_world, [[90, 500], []]), (load_on_one_rank, [0, 0]), (load_twice, [1, 1])],
)
def test_a_rank_that_iterates_alone_is_not_waited_for(nodes, load, wanted):
    assert on_ranks(nodes, load, NUM_RANKS) == wanted


def load_other_lengths(rank: int, folder: Path) -> Any:
    return epoch(PackedDataLoader(dataset(0 if rank == 0 else 2, folder)))


def spoil_lengths(folder: Path) -> None:
    """Move the tokens of the first shard to the second, as in a wrong length file."""
    path = folder / "lengths.bin"
    content = bytearray(path.read_bytes())
    entries = 88 + 8  # the head, and the name "tokens"
    first, second = struct.unpack_from("<QQQQ", content, entries)[1::2]
    struct.pack_into("<Q", content, entries + 8, first - 1)
    struct.pack_into("<Q", content, entries + 24, second + 1)
    path.write_bytes(content)


def test_another_length_file_is_named(nodes):
    shutil.copytree(nodes / "node0", nodes / "node2")
    spoil_lengths(nodes / "node2" / "text")
    for seen in on_ranks(nodes, load_other_lengths, NUM_RANKS):
        assert seen.startswith("DataError: rank 1 has another lengths.bin of stream 'text'")


def load_iterable(rank: int, folder: Path) -> Any:
    del folder
    part = PackedIterableDataset(
        [IterableStream([[1, 2, 3]] * 10)],
        packing=Packing(max_seq_len=8 + rank),
        world=World(rank=rank, num_ranks=NUM_RANKS),
    )
    return len(list(PackedDataLoader(part)))


def test_recipes_of_iterables_are_compared(tmp_path):
    for seen in on_ranks(tmp_path, load_iterable, NUM_RANKS):
        assert seen.startswith("ConfigError: ranks have different max_seq_len: rank 0 has 8")


# One process.


def test_the_digest_is_logged_and_in_the_stats_and_in_the_simulation(nodes, caplog):
    caplog.set_level(logging.INFO, "streampack")
    ours = dataset(0, nodes, world=World())
    loader = PackedDataLoader(ours)
    for _ in range(2):
        next(iter(loader))
    told = [record for record in caplog.records if ours.digest in record.getMessage()]
    assert len(told) == 1
    assert loader.stats()["digest"] == ours.digest == simulate(ours)["digest"]
    assert dataset(1, nodes, world=World()).digest != ours.digest


def test_the_digest_is_of_the_data_and_not_of_the_rank(nodes):
    digests = {dataset(0, nodes, world=world).digest for world in worlds(2)}
    shutil.copytree(nodes / "node0", nodes / "node7")
    digests.add(dataset(7, nodes, world=World()).digest)
    assert len(digests) == 1


def test_a_stream_without_a_length_file_is_not_fetched_for_its_digest(nodes):
    origin, cache = nodes / "newer" / "text", nodes / "cache"
    (origin / "lengths.bin").unlink()
    ours = PackedStreamingDataset(
        [Stream(remote=str(origin), local=str(cache))], packing=Packing(max_seq_len=64)
    )
    assert len(ours.digest) == 32
    assert not list(cache.glob("*.mds"))


def without_lengths(state: dict[str, Any]) -> dict[str, Any]:
    """A state from before digests included lengths."""
    streams = [digest.partition(":")[0] for digest in state["fingerprint"]["streams"]]
    return state | {"fingerprint": state["fingerprint"] | {"streams": streams}}


def test_a_state_fits_its_lengths_and_those_that_it_does_not_know(nodes):
    ours = dataset(0, nodes, world=World())
    loader = PackedDataLoader(ours)
    next(iter(loader))
    state = loader.state_dict()
    assert without_lengths(state) != state
    for saved in (state, without_lengths(state)):
        dataset(0, nodes, world=World()).load_state_dict(saved)
    spoil_lengths(nodes / "node0" / "text")
    dataset(0, nodes, world=World()).load_state_dict(without_lengths(state))
    with pytest.raises(
        ResumeError, match=r"stream 'text' \(streams\[1\]\) has changed .* with other lengths"
    ):
        dataset(0, nodes, world=World()).load_state_dict(state)
    # The way out.
    write_lengths(nodes / "node0" / "text")
    dataset(0, nodes, world=World()).load_state_dict(state)
