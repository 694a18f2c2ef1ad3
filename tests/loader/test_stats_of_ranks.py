"""`loader.stats(all_ranks=True)` on real gloo ranks equals the counts of a single rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from streampack import (
    Chapter,
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from tests.helpers import builders
from tests.helpers.ranks import on_ranks

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("one_thread")]

LENGTHS = {"web": [1 + i * 7 % 50 for i in range(120)], "code": [1 + i * 5 % 90 for i in range(40)]}
SAME = ("streams", "packs", "tokens", "fill", "padding_packs", "substituted", "skipped", "digest")
RUNS: dict[str, dict[str, Any]] = {
    "pad": {},
    "drop": {"mixing": Mixing(global_batch_size=4, epoch_end="drop")},
    "slots": {"mixing": Mixing(global_batch_size=4, batching_method="stratified")},
    "skips": {"chapters": [Chapter(weights={"web": 1, "code": 2}, steps=12)], "skip": [(2, 3)]},
}


def deliver(rank: int, folder: Path, name: str = "pad", replication: int = 1) -> Any:
    world = World(rank=rank, num_ranks=2, replication=replication) if rank >= 0 else World()
    dataset = PackedStreamingDataset(
        [Stream(local=folder / each) for each in LENGTHS],
        **{
            "packing": Packing(max_seq_len=64, overflow="split"),
            "mixing": Mixing(global_batch_size=4),
            "order": Order(seed=1, num_lanes=2),
            "world": world,
            **RUNS[name],
        },
    )
    loader = PackedDataLoader(dataset)
    for _ in loader:
        pass
    return loader.stats(all_ranks=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    for number, (name, lengths) in enumerate(LENGTHS.items()):
        builders.write_stream_files(folder / name, lengths, seed=number)
    return folder


@pytest.mark.parametrize(
    ("name", "replication"), [*((name, 1) for name in RUNS), ("pad", 2), ("skips", 2)]
)
def test_ranks_together_count_what_a_single_rank_counts(folder, name, replication):
    alone = deliver(-1, folder, name)
    if name == "slots":
        assert alone["substituted"]
    seen = on_ranks(folder, partial(deliver, name=name, replication=replication), 2)
    assert seen[0] == seen[1]
    for key in SAME:
        if key == "streams":
            for stream, counts in alone[key].items():
                assert seen[0][key][stream] == pytest.approx(counts)
        else:
            assert seen[0][key] == pytest.approx(alone[key]), key


def iterate(rank: int, _: Path) -> Any:
    streams = [IterableStream([[1] * n for n in each], name=k) for k, each in LENGTHS.items()]
    dataset = PackedIterableDataset(
        streams,
        packing=Packing(max_seq_len=64, overflow="split"),
        world=World(rank=rank, num_ranks=2),
    )
    loader = PackedDataLoader(dataset)
    for _batch in loader:
        pass
    return [loader.stats(), loader.stats(all_ranks=True)]


def test_counts_of_iterables_are_summed_and_high_water_marks_are_not(tmp_path):
    (one, total), (other, same) = on_ranks(tmp_path, iterate, 2)
    assert total == same
    assert total["tokens"] == sum(map(sum, LENGTHS.values()))
    for name, lengths in LENGTHS.items():
        assert total["streams"][name]["samples"] == len(lengths)
    assert total["packs"] == one["packs"] + other["packs"]
    assert total["buffers"]["rank_tokens"] == max(
        stats["buffers"]["rank_tokens"] for stats in (one, other)
    )
