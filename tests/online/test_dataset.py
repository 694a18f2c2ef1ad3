"""`PackedIterableDataset`: batches, mixing, labels and epochs of iterables."""

from __future__ import annotations

import ctypes
import itertools
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from streampack import (
    Buffers,
    ConfigError,
    DataError,
    IterableStream,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
    World,
)
from tests.helpers.examples import examples
from tests.helpers.iterables import pieces, rows_of


def dataset(*lengths: list[int], **kwargs) -> PackedIterableDataset:
    """A dataset over lists of samples of these lengths."""
    streams = [IterableStream(rows_of(n, each), name=f"s{n}") for n, each in enumerate(lengths)]
    packing = kwargs.pop("packing", Packing(max_seq_len=32))
    return PackedIterableDataset(streams, packing=packing, **kwargs)


@examples(40)
@given(
    lengths=st.lists(
        st.lists(st.integers(1, 100), min_size=1, max_size=30), min_size=1, max_size=3
    ),
    batch_size=st.integers(1, 3),
)
def test_every_token_comes_exactly_once_and_splits_concatenate_back(lengths, batch_size):
    batches = list(dataset(*lengths, batch_size=batch_size))

    assert pieces(batches) == {
        (number, 0, index): tokens
        for number, each in enumerate(lengths)
        for index, tokens in enumerate(rows_of(number, each))
    }


def test_labels_are_next_tokens_within_a_sample_and_at_a_cut_the_first_of_the_rest():
    for batch in dataset([5, 40, 9, 33, 70]):
        tokens, labels = batch["tokens"][0].tolist(), batch["labels"][0].tolist()
        filled = 0
        for _, _, _, sample, start, length in batch["segments"].tolist():
            total = [5, 40, 9, 33, 70][sample]
            for i in range(length):
                last = start + i == total - 1
                assert labels[filled + i] == (-100 if last else tokens[filled + i] + 1)
            filled += length
        assert labels[filled:] == [-100] * (32 - filled)


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_and_ranks_take_every_sample_once(num_workers):
    lengths = [[7, 12, 30, 2, 9, 11, 40, 3, 5, 21], [4] * 15]
    batches = []
    for rank in range(2):
        part = dataset(*lengths, world=World(rank=rank, num_ranks=2))
        batches += list(DataLoader(part, batch_size=None, num_workers=num_workers))

    found = pieces(batches)

    assert sorted(found) == [(0, 0, i) for i in range(10)] + [(1, 0, i) for i in range(15)]


def test_a_process_group_that_came_after_the_dataset_is_refused_not_ignored():
    early, own = dataset([9] * 20, world=None), dataset([9] * 20, world=World())
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        late = dataset([9] * 20, world=None)
        for use in (iter, pickle.dumps):
            with pytest.raises(
                ConfigError, match=r"rank 0 of 1, but now .* says rank 1 of 2; make"
            ):
                use(early)
        assert [late.world, next(iter(late))["epoch"]] == [World(rank=1, num_ranks=2), 0]
        assert next(iter(own))["epoch"] == 0
    finally:
        distributed.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_advance_under_torchs_loader(num_workers):
    loader = DataLoader(dataset([9] * 20), batch_size=None, num_workers=num_workers)

    assert [next(iter(loader))["epoch"] for _ in range(3)] == [0, 1, 2]


def test_mixing_is_off_by_at_most_one_sample_a_source():
    lengths = [10] * 400
    streams = [
        IterableStream(rows_of(n, lengths), proportion=p) for n, p in enumerate([0.5, 0.3, 0.2])
    ]
    mixed = PackedIterableDataset(
        streams, packing=Packing(max_seq_len=10, method="next_fit"), batch_size=1
    )
    counts = np.zeros(3)

    for number, batch in enumerate(itertools.islice(mixed, 600), start=1):
        counts[int(batch["segments"][0, 1])] += 1
        assert np.abs(counts - number * np.array([0.5, 0.3, 0.2])).max() <= 1


@pytest.mark.thorough
def test_an_endless_source_with_huge_samples_in_between_stays_under_the_bound():
    rng = np.random.default_rng(0)
    seen = {"given": 0}

    def source():
        while True:
            length = 50_000 if rng.random() < 0.01 else int(rng.integers(1, 60))
            seen["given"] += length
            yield np.arange(length)

    made = PackedIterableDataset(
        [IterableStream(source())],
        packing=Packing(max_seq_len=64, buffer_tokens=640),
        batch_size=2,
        buffers=Buffers(worker_tokens=640 + 2 * 64 + 2 * 16_384),
    )
    taken = 0
    for batch in itertools.islice(made, 3000):
        taken += int(batch["segments"][:, 5].sum())
        # What waits for the next window, the batch being put together, the items that were read
        # together, and the window that was drawn from them; the last of each may be a long one.
        assert seen["given"] - taken <= 640 + 2 * 64 + (65_536 + 50_000) + (16_384 + 50_000)


def test_an_added_eos_is_a_target_only_where_the_last_own_token_is_one():
    rows = [
        {"tokens": [5, 6, 7, 8], "mask": [0, 0, 1, 1]},
        {"tokens": [1, 2, 3], "mask": [1, 1, 0]},
    ]
    stream = IterableStream(rows, loss_mask="mask")
    [batch] = PackedIterableDataset([stream], packing=Packing(max_seq_len=9, eos_id=9))

    assert batch["tokens"][0].tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 9]
    assert batch["labels"][0].tolist() == [-100, 7, 8, 9, -100, 2, -100, -100, -100]


@pytest.mark.parametrize(
    ("labels", "shifted", "expected"),
    [
        ([-100, -100, 7, 8], None, [-100, 7, 8, -100]),
        ([-100, 7, 8, -100], None, [-100, 7, 8, -100]),
        ([-100, 6, 7, 8], False, [6, 7, 8, -100]),
    ],
)
def test_labels_may_be_shifted_or_not(labels, shifted, expected):
    stream = IterableStream(
        [{"tokens": [5, 6, 7, 8], "labels": labels}], labels="labels", labels_shifted=shifted
    )
    [batch] = PackedIterableDataset([stream], packing=Packing(max_seq_len=6))

    assert batch["labels"][0].tolist() == [*expected, -100, -100]


@pytest.mark.parametrize(
    ("fields", "options", "told"),
    [
        ({"labels": [-100, 6, 7]}, {}, ["labels"]),
        ({"assistant_masks": [0, 1, 1]}, {}, ["assistant_masks"]),
        ({"loss_mask": np.array([0, 1, 1])}, {}, ["loss_mask"]),
        ({"loss_mask": [0, 1, 1]}, {"loss_mask": "loss_mask"}, []),
        ({"labels": [-100, 6, 7], "loss_mask": [0, 1, 1]}, {"loss_mask": "loss_mask"}, []),
        ({"loss_mask": [0, 1, 1]}, {"token_fields": {"loss_mask": "int8"}}, []),
        ({"labels": 3}, {}, []),
        ({"labels": "yes"}, {}, []),
    ],
)
def test_a_field_of_targets_that_nobody_asked_for_is_told_of_once(fields, options, told, caplog):
    stream = IterableStream([{"input_ids": [5, 6, 7], **fields}] * 9, name="chat", **options)
    part = PackedIterableDataset([stream], packing=Packing(max_seq_len=8))
    with caplog.at_level("WARNING", logger="streampack"):
        assert [len(list(part)) for _ in range(2)] == [5, 5]
    assert len(caplog.messages) == len(told)
    for name in told:
        assert f"stream 'chat': its '{name}' is not read, so every token is a" in caplog.text
        assert f"={name!r}) to read it, or, if it is omitted on purpose, silence" in caplog.text


def test_a_loss_mask_decides_the_label_before_its_token():
    stream = IterableStream([{"tokens": [5, 6, 7, 8], "mask": [1, 0, 1, 1]}], loss_mask="mask")
    [batch] = PackedIterableDataset([stream], packing=Packing(max_seq_len=6, bos_id=1, eos_id=2))

    assert batch["tokens"][0].tolist() == [1, 5, 6, 7, 8, 2]
    assert batch["labels"][0].tolist() == [5, -100, 7, 8, 2, -100]


class Switch:
    """A tokenizer that encodes a variable's value, as seen by a C library and by Python."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        in_c = getenv(b"TOKENIZERS_PARALLELISM")
        in_python = os.environ.get("TOKENIZERS_PARALLELISM")
        return [[1 + (in_c == b"false"), 1 + (in_python is not None)] for _ in texts]


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
def test_workers_have_one_tokenizer_thread_and_no_environment_is_changed(num_workers, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    stream = IterableStream(["a text"] * 4, tokenizer=Switch())
    packed = PackedIterableDataset([stream], packing=Packing(max_seq_len=8))
    [batch] = PackedDataLoader(packed, num_workers=num_workers)
    assert batch["tokens"][0, :2].tolist() == [1 + num_workers, 1]
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_samples_with_unclear_labels_are_never_delivered_after_those_of_another_stream():
    clear = IterableStream([[5, 6, 7, 8]] * 40, name="clear")
    rows = [{"tokens": [9, 9, 9, 9], "labels": [9, 9, 9, 9]}] * 200
    unclear = IterableStream(rows, name="unclear", labels="labels")
    dataset = PackedIterableDataset([clear, unclear], packing=Packing(max_seq_len=4))

    delivered = []
    with pytest.raises(DataError, match="labels_shifted=True"):
        delivered.extend(stream for batch in dataset for stream in batch["segments"][:, 1])
    assert set(map(int, delivered)) <= {0}
