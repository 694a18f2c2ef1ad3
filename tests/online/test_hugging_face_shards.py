"""Hugging Face iterables reassign their shards on every pass; a shard may give no samples."""

from __future__ import annotations

import json
import logging

import datasets
import pytest

from streampack import (
    DataError,
    IterableStream,
    Mixing,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
    World,
)
from streampack.online.source_slice import MOST_EMPTY_PASSES, SourceSlice, WorkerSlice
from tests.helpers.examples import crossed
from tests.helpers.iterables import assert_continues, pieces, with_states


def generated(shards, num_rows):
    for shard in shards:
        for row in range(num_rows):
            yield {"input_ids": [shard * 100 + row + 1] * 9, "is_kept": shard < 3}


def source(num_shards=8, num_rows=3):
    arguments = {"shards": list(range(num_shards)), "num_rows": num_rows}
    return datasets.IterableDataset.from_generator(generated, gen_kwargs=arguments)


def sparse():
    """3 of 8 shards give samples."""
    return source().filter(lambda row: row["is_kept"])


def loader(stream, num_workers=0, **options) -> PackedDataLoader:
    dataset = PackedIterableDataset([stream], packing=Packing(max_seq_len=45), **options)
    return PackedDataLoader(dataset, num_workers=num_workers, check_ranks=False)


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 4])
def test_an_epoch_of_a_size_has_it_whichever_shards_are_empty(num_workers):
    stream = IterableStream(sparse(), proportion=1)
    batches = list(loader(stream, num_workers, mixing=Mixing(epoch_size=400)))

    assert len(pieces(batches)) == 400


@pytest.mark.parametrize("rank", range(4))
def test_loops_of_a_number_of_steps_have_it_whichever_shards_are_empty(rank):
    world = World(rank=rank, num_ranks=4)
    even = loader(IterableStream(sparse()), world=world, steps=40)
    batches, states = with_states(even)

    assert len(batches) == 40
    for at in (7, 23):
        resumed = loader(IterableStream(sparse()), world=world, steps=40)
        assert_continues(resumed, states[at - 1], batches[at:])


def test_a_rank_that_gets_no_sample_in_any_pass_is_told(caplog):
    stream = IterableStream(
        source().filter(lambda row: row["input_ids"] is None), name="web", proportion=1
    )
    with caplog.at_level(logging.WARNING), pytest.raises(DataError, match="no batch in a whole"):
        list(loader(stream, steps=10))

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert list(loader(stream, mixing=Mixing(epoch_size=40))) == []
    assert f"stream 'web': worker 0 of rank 0 got no sample in {MOST_EMPTY_PASSES}" in caplog.text


@pytest.mark.parametrize("sharded", [False, True])
def test_workers_are_in_passes_of_their_own(sharded):
    # The epoch of a source is in memory that its forked copies share.
    shared = source()
    slices = [
        SourceSlice(shared, "a", WorkerSlice(worker=worker, num_workers=2), sharded=sharded)
        for worker in range(2)
    ]
    for number, slice_ in enumerate(slices):
        slice_.begin(number)
    read = [[items.values[0]["input_ids"] for items in iter(s.read, None)] for s in slices]

    for number, rows in enumerate(read):
        alone = source()
        alone.set_epoch(number)
        assert rows == [row["input_ids"] for row in alone]
    assert read[0] != read[1]


def concatenated(num_shards, size=300, **options):
    parts = [source(num_shards, size), source(num_shards, size)]
    return IterableStream(datasets.concatenate_datasets(parts), **options)


@pytest.mark.processes
@pytest.mark.parametrize(("replays", "at"), crossed([False, True], [15, 5]))
def test_a_concatenation_resumes_in_each_of_its_parts(replays, at):
    batches, states = with_states(loader(concatenated(2), num_workers=2))
    first = at * len(states) // 20
    resumed = loader(concatenated(2, replay=replays), num_workers=2)

    assert first < len(batches)
    assert_continues(resumed, states[first - 1], batches[first:])


@pytest.mark.processes
def test_a_state_that_a_source_cannot_load_is_resumed_from_with_replay():
    make = lambda **options: loader(  # noqa: E731
        concatenated(3, 900, **options), 2, world=World(rank=1, num_ranks=2)
    )
    batches, states = with_states(make())
    at = len(states) * 3 // 4
    refused = make()
    refused.load_state_dict(json.loads(states[at - 1]))
    with pytest.raises(DataError, match="set replay=True to resume without its own state"):
        list(refused)

    assert at < len(batches)
    assert_continues(make(replay=True), states[at - 1], batches[at:])
