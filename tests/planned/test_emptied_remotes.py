"""A remote whose stream a run of chapters no longer uses needs no shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from streampack import (
    Chapter,
    DataError,
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from streampack.index import write_lengths
from tests.helpers.datasets import state_after, write_chapter_streams

CHAPTERS = [
    Chapter(weights={"web": 3, "code": 1}, steps=6),
    Chapter(weights={"web": 1}, steps=8),
    Chapter(weights={"web": 1, "math": 1}, steps=4),
]
# With `random`, packs already planned from a former stream are delivered unless packing changes.
SHORTER = [CHAPTERS[0], *(replace(c, packing=Packing(max_seq_len=32)) for c in CHAPTERS[1:])]
LATE = 8 * 6 + 40  # batches of the run: in the second chapter, after the last pack with code


@pytest.fixture
def folders(tmp_path):
    folders = write_chapter_streams(tmp_path)
    for folder in folders.values():
        write_lengths(folder)
    return folders


def loader_of(folders, method: str, remote: str = "") -> PackedDataLoader:
    streams = [
        Stream(name=name, remote=folder, local=f"{folder}-cache")
        if name == remote
        else Stream(name=name, local=folder)
        for name, folder in folders.items()
    ]
    dataset = PackedStreamingDataset(
        streams,
        chapters=SHORTER if method == "random" else CHAPTERS,
        packing=Packing(max_seq_len=64),
        mixing=Mixing(global_batch_size=16, batching_method=method),
        order=Order(seed=17, pack_shuffle=16, num_lanes=2),
        batch_size=2,
        world=World(),
    )
    return PackedDataLoader(dataset)


def tokens_of(batches) -> list[bytes]:
    return [batch["tokens"].numpy().tobytes() for batch in batches]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method",
    [
        "random",
        "device_per_stream",
        pytest.param("stratified", marks=pytest.mark.slow),
        pytest.param("per_stream", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_without_the_shards_of_a_stream_that_it_no_longer_uses(folders, method):
    whole = tokens_of(loader_of(folders, method))
    state = state_after(loader_of(folders, method), LATE + 1)
    shards = sorted(Path(folders["code"]).glob("shard.*"))
    for shard in shards:
        shard.unlink()
    with pytest.raises(DataError, match=rf"{shards[0].name}: does not exist.*set remote="):
        loader_of(folders, method)
    for saved in (state, state | {"snapshots": "[]"}):
        loader = loader_of(folders, method, remote="code")
        loader.load_state_dict(saved)
        assert tokens_of(loader) == whole[LATE + 1 :]
