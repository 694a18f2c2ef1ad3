"""Each source is opened once for a dataset, and not again for its copies."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from streampack import (
    Buffers,
    Chats,
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Shards,
    Stream,
    Texts,
    TokenFiles,
    World,
)
from streampack.write import write_stream
from tests.helpers.chats import chat_tokenizer, chats, words
from tests.helpers.flat import make_documents, write


class Counted:
    """A source that counts how often it is opened."""

    def __init__(self, source: Any) -> None:
        self.source, self.openings = source, 0

    def open(self, opening: Any) -> Any:
        self.openings += 1
        return self.source.open(opening)


@pytest.fixture
def sources(tmp_path) -> list[Counted]:
    write_stream([[5] * 5] * 20, tmp_path / "mds")
    write("megatron", tmp_path / "files", make_documents(20))
    texts = [{"text": row["messages"][0]["content"]} for row in chats(20)]
    return [
        Counted(Shards(local=tmp_path / "mds")),
        Counted(TokenFiles(tmp_path / "files")),
        Counted(Texts(texts, words(), local=tmp_path / "cache")),
        Counted(Chats(chats(20), chat_tokenizer(), local=tmp_path / "cache")),
    ]


def test_a_dataset_opens_each_source_once_and_its_copies_none(sources):
    streams = [Stream(source, name=f"s{n}") for n, source in enumerate(sources)]
    dataset = PackedStreamingDataset(
        streams, packing=Packing(max_seq_len=64), mixing=Mixing(global_batch_size=2)
    )
    copies = [
        dataset.with_batches(batch_size=2),
        dataset.with_batches(world=World(rank=0, num_ranks=2)),
        dataset.with_arguments(order=Order(shuffle=False)),
        pickle.loads(pickle.dumps(dataset)),
    ]
    for each in (dataset, *copies):
        assert len(list(PackedDataLoader(each, num_workers=0))) > 0
    assert [source.openings for source in sources] == [1] * 4


def test_only_what_changes_the_opening_opens_again(sources):
    streams = [Stream(sources[0])]
    dataset = PackedStreamingDataset(streams, packing=Packing(max_seq_len=64))
    dataset.with_arguments(buffers=Buffers(cache_limit="1gb"))
    assert sources[0].openings == 2


def test_a_source_opens_nothing_when_it_is_made(tmp_path):
    missing = tmp_path / "missing"
    Stream(Shards(local=missing))
    Stream(TokenFiles(missing / "*.bin"))
    Stream(Texts(missing / "*.parquet", missing / "tokenizer.json"))
    Stream(Chats(missing / "chats.jsonl", missing))
    assert not missing.exists()
