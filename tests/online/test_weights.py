"""Weights, epochs and batching methods of iterables."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from streampack import (
    ConfigError,
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
    World,
)
from streampack.online.dataset import flow_plan
from streampack.online.epoch_quota import epoch_amounts
from streampack.online.source_slice import SourceSlice, WorkerSlice
from streampack.online.stream_sampler import StreamSampler
from streampack.types import SAMPLE
from tests.helpers.examples import examples
from tests.helpers.iterables import Again, pieces, rows_of

PACKING = Packing(max_seq_len=16, buffer_tokens=256)


def counts(batches) -> Counter:
    """(stream, sample) -> how often it came."""
    return Counter((stream, sample) for stream, _, sample in pieces(batches))


def dataset(*streams, **kwargs) -> PackedIterableDataset:
    return PackedIterableDataset(streams, packing=kwargs.pop("packing", PACKING), **kwargs)


@pytest.mark.processes
@pytest.mark.parametrize("kind", [list, Again])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_repeat_takes_every_sample_as_often_as_it_says_over_all_workers(kind, num_workers):
    streams = [
        IterableStream(kind(rows_of(0, [5] * 11)), repeat=3),
        IterableStream(kind(rows_of(1, [4] * 7))),
    ]
    batches = list(DataLoader(dataset(*streams), batch_size=None, num_workers=num_workers))

    expected = {(0, i): 3 for i in range(11)} | {(1, i): 1 for i in range(7)}
    assert counts(batches) == expected


def test_a_source_is_gone_through_once_to_count_it_however_many_epochs_follow():
    class Counting(Again):
        num_iterations = 0

        def __iter__(self):
            self.num_iterations += 1
            return super().__iter__()

    source = Counting(rows_of(0, [5] * 9))
    counted = dataset(IterableStream(source, repeat=1))
    for _ in range(3):
        assert len(pieces(list(counted))) == 9
    assert source.num_iterations == 1 + 3


def test_choose_takes_so_many_and_the_next_epoch_goes_on_there():
    chosen = dataset(IterableStream(rows_of(0, [5] * 10), choose=7))

    epochs = [counts(list(chosen)) for _ in range(3)]

    assert [sum(epoch.values()) for epoch in epochs] == [7, 7, 7]
    total = sum(epochs, Counter())
    assert {total[0, i] for i in range(10)} == {2, 3}


def test_fixed_epochs_choose_the_same_samples():
    stream = IterableStream(rows_of(0, [5] * 10), choose=7)
    chosen = dataset(stream, mixing=Mixing(sampling_method="fixed"))

    assert counts(list(chosen)) == counts(list(chosen)) == {(0, i): 1 for i in range(7)}


def test_choose_counts_tokens_if_weights_do():
    stream = IterableStream(rows_of(0, [5] * 10), choose=103)
    batches = list(dataset(stream, mixing=Mixing(weight_unit="tokens")))

    assert sum(int(batch["segments"][:, 5].sum()) for batch in batches) == 105


def test_an_epoch_size_is_shared_out_by_proportions():
    streams = [IterableStream(rows_of(n, [5] * 20), proportion=p) for n, p in ((0, 3), (1, 1))]
    batches = list(dataset(*streams, mixing=Mixing(epoch_size=40)))

    assert Counter(stream for stream, _, _ in pieces(batches)) == {0: 30, 1: 10}


def test_an_epoch_ends_with_all_sources_with_the_first_or_never():
    def streams():
        return [IterableStream(rows_of(n, [16] * size)) for n, size in ((0, 40), (1, 10))]

    def num_packs(stop):
        batches = dataset(*streams(), mixing=Mixing(stop=stop))
        return len(list(itertools.islice(batches, 500)))

    assert num_packs("all_exhausted") == 50
    assert num_packs("first_exhausted") in (20, 21)
    assert num_packs("repeat") == 500


# Batching methods.

SHARES = (0.5, 0.3, 0.2)


def endless(method: str, **kwargs) -> PackedIterableDataset:
    streams = [
        IterableStream(Again(rows_of(n, [9, 16, 4, 30])), proportion=share)
        for n, share in enumerate(SHARES)
    ]
    return dataset(*streams, mixing=Mixing(batching_method=method, stop="repeat"), **kwargs)


def streams_of(batch) -> list[set[int]]:
    """The streams of each pack."""
    segments = batch["segments"].numpy()
    return [
        set(segments[segments[:, 0] == row, 1].tolist()) for row in range(batch["tokens"].shape[0])
    ]


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_stratified_packs_hold_one_stream_within_one_pack_of_its_share_after_every_batch(
    num_workers,
):
    loader = PackedDataLoader(endless("stratified", batch_size=4), num_workers=num_workers)
    served = np.zeros(3)
    for number, batch in enumerate(itertools.islice(loader, 60), start=1):
        for streams in streams_of(batch):
            assert len(streams) == 1
            served[streams.pop()] += 1
        assert np.abs(served - 4 * number * np.array(SHARES)).max() < 1 + 1e-6


@pytest.mark.parametrize("method", ["per_stream", "device_per_stream"])
def test_a_batch_holds_one_stream_and_batches_keep_the_shares(method):
    served = np.zeros(3)
    for number, batch in enumerate(itertools.islice(endless(method, batch_size=3), 100), start=1):
        [stream] = set.union(*streams_of(batch))
        served[stream] += 1
        assert np.abs(served - number * np.array(SHARES)).max() < 1 + 1e-6


def test_per_stream_gives_all_ranks_the_same_stream_at_each_step_device_per_stream_does_not():
    def streams(method, rank):
        part = endless(method, batch_size=2, world=World(rank=rank, num_ranks=2))
        return [min(set.union(*streams_of(b))) for b in itertools.islice(part, 40)]

    assert streams("per_stream", 0) == streams("per_stream", 1)
    assert streams("device_per_stream", 0) != streams("device_per_stream", 1)


def test_a_seed_shuffles_sources_with_an_index_each_pass_anew():
    rows = rows_of(0, [16] * 50)
    shuffled = dataset(IterableStream(rows), order=Order(seed=1, shuffle_block_size=8))

    epochs = [[key[2] for key in pieces(list(shuffled))] for _ in range(2)]

    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert epochs[0] != list(range(50))


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
def test_stats_of_an_epoch_stay_until_the_next_one_begins(num_workers):
    dataset = PackedIterableDataset(
        [IterableStream([[5, 6, 7]] * 10, name="mine")],
        packing=Packing(max_seq_len=6),
        world=World(),
    )
    loader = PackedDataLoader(dataset, num_workers=num_workers)
    for _ in loader:
        pass
    assert loader.stats()["streams"]["mine"]["samples"] == 10
    assert loader.stats()["packs"] == 5
    next(iter(loader))
    assert loader.stats()["streams"]["mine"]["samples"] == 2


@examples(25, many=60)
@given(
    num=st.integers(0, 40),
    repeat=st.fractions(0, 3, max_denominator=8),
    num_slices=st.sampled_from((1, 2, 3, 8, 64)),
    method=st.sampled_from(("balanced", "fixed")),
)
def test_all_parts_of_an_unsized_source_take_what_those_of_a_list_take(
    num, repeat, num_slices, method
):
    items = [[n + 1] for n in range(num)]

    def taken(source: Any, **more: Any) -> list[Counter[int]]:
        streams = [IterableStream(source, repeat=repeat, **more), IterableStream([[7]], choose=1)]
        mixing = Mixing(sampling_method=method)
        amounts = epoch_amounts(streams, mixing, 0)
        epochs = [Counter[int]() for _ in range(3)]
        for device in range(num_slices):
            worker_slice = WorkerSlice(device=device, num_devices=num_slices)
            slice_ = SourceSlice(source, "a", worker_slice)
            for epoch, counter in enumerate(epochs):
                plan = flow_plan("", streams, Packing(max_seq_len=10), mixing)
                quota = amounts.quota(0, epoch, slice_)
                sampler = StreamSampler(plan, 0, slice_, quota)
                sampler.begin(epoch)
                while sampler.read():
                    rows, _ = sampler.take(len(sampler.waiting))
                    counter.update(rows[:, SAMPLE].tolist())
        return epochs

    wanted = taken(items)
    assert [counter.total() for counter in wanted] == [int(repeat * num)] * 3
    assert taken(Again(items)) == wanted


@examples(40, many=100)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=64),
    repeat=st.fractions(0, 3, max_denominator=8),
)
def test_parts_that_split_themselves_take_their_fractions_over_epochs(sizes, repeat):
    stream = IterableStream(Again([]), repeat=repeat, sharded=True)
    amounts = epoch_amounts([stream, IterableStream([[7]], choose=1)], Mixing(), 0)
    totals = np.zeros((8, len(sizes)), np.int64)
    for device, size in enumerate(sizes):
        worker_slice = WorkerSlice(device=device, num_devices=len(sizes))
        slice_ = SourceSlice(Again([[n + 1] for n in range(size)]), "a", worker_slice, sharded=True)
        for epoch in range(8):
            quota = amounts.quota(0, epoch, slice_)
            assert quota.skipped == totals[:, device].sum()
            totals[epoch, device] = quota.amount
    due = np.outer(np.arange(1, 9), [float(repeat * size) for size in sizes])
    assert (abs(totals.cumsum(axis=0) - due) < 1).all()
    if len(set(sizes)) == 1:
        whole = repeat * sum(sizes)
        assert totals.sum(axis=1).tolist() == [
            int((epoch + 1) * whole) - int(epoch * whole) for epoch in range(8)
        ]


TELLS = "streampack.online.stream_sampler"


def uneven(kind: Any = list, **mixing: Any) -> PackedIterableDataset:
    streams = [
        IterableStream(kind(rows_of(0, [4] * 50)), proportion=0.7, name="code"),
        IterableStream(kind(rows_of(1, [4] * 50)), proportion=0.3, name="docs"),
    ]
    return dataset(*streams, mixing=Mixing(**mixing))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == TELLS]


@pytest.mark.parametrize("method", ["random", "stratified", "device_per_stream", "per_stream"])
def test_a_source_that_ends_before_the_others_is_named_once(caplog, method):
    own = uneven(batching_method=method)
    for _ in range(2):
        assert sum(counts(own).values()) == 100
    [warning] = warnings_of(caplog)
    assert warning.startswith("stream 'code' has ended in pass 0 and others continue without it")
    assert "Mixing(stop='repeat' or epoch_size=, or stop='first_exhausted')" in warning


@pytest.mark.parametrize(
    ("kind", "mixing"),
    [
        (list, {"stop": "repeat"}),
        (list, {"epoch_size": 200}),
        (list, {"stop": "first_exhausted"}),
        (iter, {"stop": "first_exhausted"}),
    ],
)
def test_what_the_warning_names_keeps_the_proportions(caplog, kind, mixing):
    batches = itertools.islice(uneven(kind, **mixing), 50)
    streams = [stream for stream, _, _ in pieces(batches)]
    assert len(streams) > 60
    assert abs(streams.count(0) - 0.7 * len(streams)) < 1 + 4  # one, and a pack that is cut off
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("method", ["stratified", "device_per_stream", "per_stream"])
def test_packs_shared_out_by_amounts_need_amounts_that_are_known(method):
    mixing = Mixing(batching_method=method)
    known, unknown = IterableStream([[1]], name="a"), Again([[1]])
    with pytest.raises(ConfigError, match=r"stream 'b' cannot say how many .*give it choose="):
        dataset(known, IterableStream(unknown, name="b", repeat=1), mixing=mixing)
    assert list(dataset(known, IterableStream(unknown, name="b", choose=1), mixing=mixing))
