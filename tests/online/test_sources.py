"""Every kind of source, and how bad samples of each are reported."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext

import datasets
import pytest
from streaming import StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader, Dataset, IterableDataset, _utils, get_worker_info

from streampack import (
    ConfigError,
    DataError,
    IterableStream,
    Mixing,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
    World,
)
from streampack.online.source_slice import SourceSlice, WorkerSlice
from tests.helpers.batches import same
from tests.helpers.builders import write_stream_files
from tests.helpers.iterables import Again, assert_continues, pieces, rows_of, with_states
from tests.helpers.words import words

PACKING = Packing(max_seq_len=16)


def dataset(*streams, **kwargs) -> PackedIterableDataset:
    return PackedIterableDataset(streams, packing=kwargs.pop("packing", PACKING), **kwargs)


def tokens_of(batches) -> list[list[int]]:
    return sorted(pieces(batches).values())


class MapStyle(Dataset):
    """Has a length and an index, and cannot be iterated."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if self.rows[index] is None:
            raise OSError("unreadable")
        return self.rows[index]


class ShardsItself(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from rows_of(0, [5] * 20)[first::step]


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_source_that_shards_itself_is_not_sharded_twice(num_workers):
    own = dataset(IterableStream(ShardsItself(), sharded=True))
    batches = list(DataLoader(own, batch_size=None, num_workers=num_workers))

    assert tokens_of(batches) == rows_of(0, [5] * 20)


def hugging_face(rows, num_shards=4):
    table = datasets.Dataset.from_dict({"input_ids": rows})
    return table.to_iterable_dataset(num_shards=num_shards)


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_hugging_face_iterable_splits_itself_over_ranks_and_workers(num_workers):
    rows = rows_of(0, [5, 9, 20] * 8)
    batches = []
    for rank in range(2):
        part = dataset(IterableStream(hugging_face(rows)), world=World(rank=rank, num_ranks=2))
        batches += list(DataLoader(part, batch_size=None, num_workers=num_workers))

    assert tokens_of(batches) == rows


@pytest.mark.processes
@pytest.mark.parametrize("together", [None, datasets.concatenate_datasets])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_hugging_face_iterable_resumes_exactly_also_with_a_shuffle_buffer(shuffled, together):
    def make():
        source = hugging_face(rows_of(0, [5, 9, 20] * 70))
        if shuffled:
            source = source.shuffle(seed=3, buffer_size=16)
        if together is not None:
            source = together([source, hugging_face(rows_of(1, [7] * 20))])
        return dataset(IterableStream(source))

    batches, states = with_states(make())
    for at in (1, 40, 90):
        assert_continues(make(), states[at - 1], batches[at:])
    [[own]] = json.loads(states[110])["sources"]
    assert (own is not None) != shuffled


@pytest.mark.processes
@pytest.mark.parametrize("weight", [{"repeat": 0.5}, {"choose": 350}])
def test_a_hugging_face_iterable_that_was_put_somewhere_begins_its_next_pass_at_the_start(weight):
    make = lambda: dataset(IterableStream(hugging_face(rows_of(0, [8] * 200), 1), **weight))  # noqa: E731
    original, resumed = make(), make()
    (epoch, states), (following, _) = with_states(original), with_states(original)

    for at in (len(epoch) - 2, 5):  # the second one is before a state of the source's own
        assert_continues(resumed, states[at], epoch[at + 1 :])
        again = list(resumed)
        assert same(again, following)


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_mosaicmls_streaming_dataset_splits_itself_and_resumes_exactly(tmp_path, num_workers):
    folder, samples = write_stream_files(tmp_path / "mds", [5, 9, 20] * 10)

    def make():
        source = StreamingDataset(local=str(folder), shuffle=False, batch_size=1)
        return PackedDataLoader(dataset(IterableStream(source)), num_workers=num_workers)

    clean_stale_shared_memory()
    batches, states = with_states(make())
    assert tokens_of(batches) == sorted(tokens.tolist() for tokens in samples)
    clean_stale_shared_memory()
    assert_continues(make(), states[6], batches[7:])


def test_texts_are_tokenized_in_batches_and_resume_exactly():
    texts = [{"text": "a text more " * (1 + n % 5)} for n in range(300)]

    def make():
        return dataset(IterableStream(Again(texts), tokenizer=words()))

    batches, states = with_states(make())
    assert tokens_of(batches) == sorted([1, 2, 3] * (1 + n % 5) for n in range(300))
    for at in (1, 13, 70):
        assert_continues(make(), states[at - 1], batches[at:])


# Bad input.


class Refuses:
    """Cannot encode texts with an x."""

    def encode(self, texts):
        if any("x" in text for text in texts):
            raise ValueError("an x")
        return [[1] * len(text) for text in texts]


BAD = [
    ({}, [[1, 2], []], "sample 1: 0 tokens, but a sample needs 1 or more"),
    ({}, [[1, 2], [3, -4]], "sample 1: token -4 is negative"),
    ({}, [[1, 2], {"y": 1}], "sample 1: no field 'tokens'"),
    ({}, [[1, 2], {"tokens": "abc"}], "field 'tokens' is text, .*set tokenizer="),
    ({}, [[1, 2], [[1], [2, 3]]], "is not a row of integers"),
    ({}, [[1, 2], [0.5]], "must have integers"),
    (
        {"labels": "y", "labels_shifted": False},
        [{"tokens": [1, 2], "y": [1]}],
        "2 tokens, but 1 values in 'y'",
    ),
    (
        {"loss_mask": "m"},
        [{"tokens": [1, 2], "m": [0, 2]}],
        "'m' has the value 2, but a loss mask is",
    ),
    ({"tokenizer": Refuses()}, ["abc", "x"], "sample 1: cannot be tokenized .ValueError: an x"),
    (
        {"tokenizer": Refuses()},
        ["abc", {"text": 5}],
        "sample 1: has 'text', and no text in 'text', but .*; give texts",
    ),
    ({"tokenizer": Refuses()}, ["abc", ""], "sample 1: 0 tokens"),
    ({}, MapStyle([[1, 2], None]), r"\(MapStyle\) raised OSError: unreadable, .* sample 1"),
]


@pytest.mark.parametrize(("stream", "source", "message"), BAD)
def test_a_bad_sample_is_named(stream, source, message):
    with pytest.raises(DataError, match=message):
        list(dataset(IterableStream(source, name="mine", **stream)))


@pytest.mark.parametrize(("stream", "source"), [case[:2] for case in BAD])
def test_a_bad_sample_is_skipped_named_in_the_log_and_counted(stream, source, caplog):
    good = "good" if "tokenizer" in stream else {"tokens": [7] * 4, "y": [7] * 4, "m": [1] * 4}
    rows = MapStyle([*source.rows, good]) if isinstance(source, MapStyle) else [*source, good]
    loader = PackedDataLoader(
        dataset(IterableStream(rows, name="mine", on_bad_row="skip", **stream))
    )
    batches = iter(loader)
    with caplog.at_level(logging.WARNING):
        [batch] = [next(batches)]

    assert [7] * 4 in tokens_of([batch]) or [1] * 4 in tokens_of([batch])
    assert "skipped bad sample 1" in caplog.text
    assert loader.stats()["streams"]["mine"]["skipped"] == 1


def test_an_iterator_that_raises_is_named_with_its_sample_and_never_skipped():
    def source():
        yield [1, 2]
        raise KeyError("gone")

    broken = IterableStream(source(), name="mine", on_bad_row="skip")
    with pytest.raises(
        DataError, match=r"'mine': its source \(generator\) raised KeyError: 'gone', .* sample 1"
    ):
        list(dataset(broken))


def test_samples_before_one_that_is_too_long_are_delivered_first():
    packing = Packing(max_seq_len=16, overflow="error")
    source = IterableStream(rows_of(0, [16, 16, 17, 16]), name="mine")
    batches = iter(dataset(source, packing=packing))

    assert len(pieces([next(batches), next(batches)])) == 2
    with pytest.raises(DataError, match=r"'mine', sample 2 .* 17 tokens"):
        next(batches)


@pytest.mark.processes
def test_a_worker_without_samples_is_no_error():
    loader = DataLoader(dataset(IterableStream([[1, 2]])), batch_size=None, num_workers=2)

    assert tokens_of(loader) == [[1, 2]]


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [None, 0, 2])
def test_an_epoch_that_drops_all_it_has_is_refused(num_workers):
    drops = dataset(
        IterableStream(rows_of(0, [9] * 3)), batch_size=4, mixing=Mixing(epoch_end="drop")
    )
    loader = drops if num_workers is None else PackedDataLoader(drops, num_workers=num_workers)
    for _ in range(2):
        with pytest.raises(DataError, match=r"epoch \d has no batch on rank 0.*epoch_end='pad'"):
            list(loader)


class Wrapped:
    """A class over a streamed Hugging Face dataset, which divides its shards by torch's workers."""

    def __iter__(self):
        for row in hugging_face(rows_of(0, [5] * 20)):
            yield row["input_ids"]


DIVIDED = [ShardsItself, Wrapped, lambda: hugging_face(rows_of(0, [5] * 20))["input_ids"]]


@pytest.mark.parametrize("sharded", [None, True, False])
@pytest.mark.parametrize("make", DIVIDED, ids=["torch", "class", "column"])
def test_of_a_source_that_asks_for_its_worker_no_sample_is_lost_unsaid(make, sharded, monkeypatch):
    found = []
    for worker in range(2):
        info = _utils.worker.WorkerInfo(id=worker, num_workers=2, seed=0, dataset=None)
        monkeypatch.setattr(_utils.worker, "_worker_info", info)
        own = SourceSlice(make(), "a", WorkerSlice(worker=worker, num_workers=2), sharded=sharded)
        with pytest.raises(ConfigError, match="sharded=True") if sharded is None else nullcontext():
            own.begin(0)
            found += [row for items in iter(own.read, None) for row in items.values]
        assert get_worker_info() is info

    assert sorted(found) == ([] if sharded is None else rows_of(0, [5] * 20))


@pytest.mark.processes
@pytest.mark.parametrize("loader", [DataLoader, PackedDataLoader])
def test_a_source_that_divides_itself_is_refused_in_the_workers_of_each_loader(loader):
    options = {"batch_size": None} if loader is DataLoader else {}
    with pytest.raises(ConfigError, match=r"asks which of 2 workers it is in.*set sharded=True"):
        list(loader(dataset(IterableStream(ShardsItself())), num_workers=2, **options))
