"""Texts are tokenized shard by shard, and the laws of planned streams hold for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from streampack import PackedDataLoader, PackedStreamingDataset, Shards, World
from streampack.testing import assert_exactly_once, assert_resumes, assert_same_in_every_world
from streampack.texts import units
from streampack.texts.rows import RowFormat
from streampack.write.files import write_texts
from streampack.write.options import WriteOptions
from tests.helpers.texts import (
    PACKING,
    dataset_of,
    ids_of,
    source_of,
    texts,
    tokens_of,
    write_files,
)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(units, "SHARD_BYTES", 1000)


@pytest.fixture(params=["eager", "lazy"])
def lengths(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_files(tmp_path_factory.mktemp("texts"))


FILES = ("rows.jsonl", "rows.parquet", "chats.jsonl")
# Of windows of packs, those of texts are smaller, so that the first batch waits for few shards.
IN_ORDER = {"order": {"shuffle": False}, "packing": replace(PACKING, method="next_fit")}
LANES = {"order": {"num_lanes": 2}, "mixing": {"epoch_end": "carry"}}


@pytest.mark.parametrize("name", FILES)
def test_texts_in_order_are_those_that_were_written(folder, name, lengths, tmp_path):
    option = {"chat": "messages"} if name.startswith("chats") else {"text": "text"}
    rows = RowFormat(tokenizer=folder / "tokenizer", **option)
    write_texts([folder / name], tmp_path / "mds", WriteOptions(rows=rows, num_workers=1))
    mask = {"loss_mask": "loss_mask"} if name.startswith("chats") else {}
    written = list(dataset_of(Shards(local=tmp_path / "mds", **mask), **IN_ORDER))
    found = list(
        dataset_of(source_of(folder, name, tmp_path / "cache", lengths=lengths), **IN_ORDER)
    )
    assert len(found) == len(written)
    for batch, wanted in zip(found, written, strict=True):
        for key in ("tokens", "labels", "position_ids", "segment_ids"):
            if key in wanted:
                assert batch[key].equal(wanted[key]), key


@pytest.mark.parametrize("name", FILES)
def test_every_world_delivers_each_text_once_in_the_same_packs(folder, name, lengths, tmp_path):
    def make(world: World | None = None) -> PackedStreamingDataset:
        return dataset_of(source_of(folder, name, tmp_path, lengths=lengths), world)

    batches = list(PackedDataLoader(make()))
    if not name.startswith("chats"):
        wanted = [ids for ids in ids_of(texts()) if ids]
        lengths_of = [len(ids) for ids in ids_of(texts())]
        assert_exactly_once(batches, [lengths_of], [len(wanted)])
        assert sorted(tokens_of(batches)) == sorted(wanted)
    assert_same_in_every_world(make)
    assert_same_in_every_world(
        lambda world: dataset_of(source_of(folder, name, tmp_path, lengths=lengths), world, **LANES)
    )


@pytest.mark.parametrize("name", FILES[:2])
def test_texts_resume_after_every_batch(folder, name, lengths, tmp_path):
    def make() -> PackedDataLoader:
        return PackedDataLoader(
            dataset_of(source_of(folder, name, tmp_path, lengths=lengths), **LANES)
        )

    assert_resumes(make)
