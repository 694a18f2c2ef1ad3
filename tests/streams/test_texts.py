"""Texts are tokenized shard by shard, and the laws of planned streams hold for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streampack import (
    Chats,
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Shards,
    Stream,
    Texts,
    World,
)
from streampack.testing import assert_exactly_once, assert_resumes, assert_same_in_every_world
from streampack.texts import units
from streampack.texts.rows import RowFormat
from streampack.write.files import write_texts
from streampack.write.options import WriteOptions
from tests.helpers.chats import LETTERS, chat_tokenizer, chats, words

NUM_ROWS = 210


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(units, "SHARD_BYTES", 1000)


@pytest.fixture(params=["eager", "lazy"])
def lengths(request):
    return request.param


def texts(num: int = NUM_ROWS, seed: int = 0) -> list[str]:
    """Return texts of known words; each seventh is empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, num) * (np.arange(num) % 7 != 3)
    return [" ".join(rng.choice(list(LETTERS), int(n))) for n in lengths]


def ids_of(rows: list[str]) -> list[list[int]]:
    tokenizer = words()
    return [tokenizer.encode(row).ids for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"text": text} for text in texts()]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=20)
    rows = chats(NUM_ROWS)
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    chat_tokenizer().save_pretrained(folder / "tokenizer")
    return folder


def source_of(folder: Path, name: str, local: Path, **options: Any) -> Any:
    kind = Chats if name.startswith("chats") else Texts
    return kind(folder / name, folder / "tokenizer", local=local, **options)


def dataset_of(source: Any, world: World | None = None, **options: Any) -> PackedStreamingDataset:
    mixing = {"global_batch_size": 8, **options.pop("mixing", {})}
    defaults = {"packing": Packing(max_seq_len=64, overflow="split"), "batch_size": 2}
    return PackedStreamingDataset(
        [Stream(source)],
        mixing=Mixing(**mixing),
        order=Order(seed=3, **{"num_lanes": 1, **options.pop("order", {})}),
        world=world or World(),
        **{**defaults, **options},
    )


def tokens_of(batches: Any) -> list[list[int]]:
    """Return the tokens of each segment, in order of delivery."""
    found = []
    for batch in batches:
        place: dict[int, int] = {}
        for row, *_, count in batch["segments"].tolist():
            first = place.get(row, 0)
            found.append(batch["tokens"][row, first : first + count].tolist())
            place[row] = first + count
    return found


FILES = ("rows.jsonl", "rows.parquet", "chats.jsonl")
IN_ORDER = {"order": {"shuffle": False}}
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
