"""The shards of streams that a run of chapters no longer uses may be deleted, but no others."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from streampack import Chapter, DataError, PackedDataLoader, Packing
from streampack.write import write_lengths
from tests.helpers.datasets import chapter_dataset, state_after, write_chapter_streams

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


def loader_of(folders, method="stratified") -> PackedDataLoader:
    order = {"pack_shuffle": 16}
    chapters = SHORTER if method == "random" else CHAPTERS
    return PackedDataLoader(chapter_dataset(folders, chapters, method=method, order=order))


def shards_of(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("shard.*"))


def tokens_of(batches) -> list[bytes]:
    return [batch["tokens"].numpy().tobytes() for batch in batches]


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["random", "stratified", "device_per_stream", "per_stream"])
def test_a_run_resumes_without_the_shards_of_a_stream_that_it_no_longer_uses(folders, method):
    whole = tokens_of(loader_of(folders, method))
    state = state_after(loader_of(folders, method), LATE + 1)
    for shard in shards_of(folders["code"]):
        shard.unlink()
    for saved in (state, state | {"snapshots": "[]"}):
        loader = loader_of(folders, method)
        loader.load_state_dict(saved)
        assert tokens_of(loader) == whole[LATE + 1 :]


def test_shards_of_a_stream_in_use_are_missed_before_the_first_batch(folders):
    early, late = state_after(loader_of(folders), 9), state_after(loader_of(folders), LATE + 1)
    kept = Path(folders["code"]).with_name("kept")
    shutil.copytree(folders["code"], kept)
    for shard in shards_of(folders["code"]):
        shard.unlink()
    first = str(shards_of(str(kept))[0].name)
    with pytest.raises(DataError, match=rf"{first}: does not exist.*copy the shard there"):
        next(iter(loader_of(folders)))
    with pytest.raises(DataError, match=rf"{first}: does not exist.*copy the shard there"):
        loader_of(folders).load_state_dict(early)
    loader_of(folders).load_state_dict(late)
    for shard in shards_of(str(kept)):
        shutil.copy(shard, folders["code"])
    loader_of(folders).load_state_dict(early)


def test_shards_that_no_state_can_do_without_are_missed_when_the_dataset_is_made(folders):
    for shard in shards_of(folders["math"]):
        shard.unlink()
    with pytest.raises(DataError, match="does not exist"):
        loader_of(folders)


def test_a_stream_that_lacks_only_some_shards_is_refused_when_the_dataset_is_made(folders):
    shards = shards_of(folders["code"])
    assert len(shards) > 1
    shards[0].unlink()
    with pytest.raises(DataError, match=rf"{shards[0].name}: does not exist"):
        loader_of(folders)
