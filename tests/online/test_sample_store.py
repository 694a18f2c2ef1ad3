"""The sample store of an online worker: lookup, removal, and reading in chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    DataError,
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
    Payloads,
)
from tests.helpers.batches import same
from tests.helpers.examples import examples
from tests.helpers.iterables import pieces, rows_of


def test_lists_and_arrays_of_every_integer_type_give_the_same_batches():
    rows = [[1, 0, 1], [0, 1], [1] * 5] * 9

    def batches(make):
        stream = IterableStream([make(row) for row in rows])
        return list(PackedIterableDataset([stream], packing=Packing(max_seq_len=8, eos_id=1)))

    expected = batches(list)
    makers = [tuple, np.array, lambda row: np.array(row)[None]]
    makers += [lambda row, t=t: np.array(row, t) for t in ("?", "u1", "i2", "u4", "u8", ">i4")]
    for make in makers:
        assert all(map(same, batches(make), expected))


@pytest.mark.parametrize("options", [{}, {"overflow": "truncate", "max_seq_len": 2}])
@pytest.mark.parametrize("token", [2**31, 2**40])
@pytest.mark.parametrize("make", [list, np.array, tuple])
def test_a_token_beyond_int32_is_refused_in_every_format(make, token, options):
    rows = [make([1, 2, 3]), make([4, 5, token]), make([2**31 - 1])]
    packing = Packing(**{"max_seq_len": 8, **options})
    message = rf"stream 'mine', sample 1: token {token} is not a token id; .* 0 to 2147483647"
    with pytest.raises(DataError, match=message):
        list(PackedIterableDataset([IterableStream(rows, name="mine")], packing=packing))
    stream = IterableStream(rows, on_bad_row="skip")
    assert len(pieces(PackedIterableDataset([stream], packing=packing))) == 2


@pytest.mark.parametrize("options", [{}, {"overflow": "truncate", "max_seq_len": 2}])
@pytest.mark.parametrize("label", [2**31, -(2**31), 2**40])
@pytest.mark.parametrize("make", [list, np.array, tuple])
@pytest.mark.parametrize("mask", [None, "mask"])
def test_a_label_beyond_int32_is_refused_in_every_format(make, label, options, mask):
    rows = [
        {"tokens": make([1, 2, 3]), "said": make(said), "mask": make([1, 1, 1])}
        for said in ([1, 2, -100], [1, label, 3], [2**31 - 1, -(2**31) + 1, 0])
    ]
    packing = Packing(**{"max_seq_len": 8, **options})
    stream = {"labels": "said", "labels_shifted": True, "loss_mask": mask}
    message = rf"stream 'mine', sample 1: 'said' has the value {label}, outside int32, .* -100"
    with pytest.raises(DataError, match=message):
        list(PackedIterableDataset([IterableStream(rows, name="mine", **stream)], packing=packing))
    skipping = IterableStream(rows, on_bad_row="skip", **stream)
    assert len(pieces(PackedIterableDataset([skipping], packing=packing))) == 2


@pytest.mark.parametrize("field", ["tokens", "labels", "mask"])
def test_rows_of_several_samples_are_not_taken_for_one(field):
    row = {"tokens": [1, 2, 3, 4], "labels": [1, 2, 3, 4], "mask": [1, 1, 1, 1]}
    row[field] = np.array(row[field]).reshape(2, 2)
    stream = IterableStream([row], labels="labels", labels_shifted=False, loss_mask="mask")
    message = rf"sample 0: field '{field}' has 2 x 2 values, but a sample is one row; give"
    with pytest.raises(DataError, match=message):
        list(PackedIterableDataset([stream], packing=Packing(max_seq_len=8)))


class OneByOne:
    """A dataset with an index; since it is not a list, its items are read one at a time."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


MIXINGS = [
    Mixing(),
    Mixing(weight_unit="tokens"),
    Mixing(stop="repeat", epoch_size=150),
    Mixing(stop="first_exhausted"),
    Mixing(batching_method="stratified", epoch_size=60),
    Mixing(weight_unit="tokens", epoch_size=900),
]


@examples(20, many=40)
@given(
    lengths=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=90), min_size=1, max_size=3),
    shares=st.tuples(*[st.integers(1, 9)] * 3),
    mixing=st.sampled_from(MIXINGS),
    ids=st.sampled_from([{}, {"bos_id": 1, "eos_id": 2}]),
    size=st.integers(1, 4),
    order=st.sampled_from([None, Order(seed=3, shuffle_block_size=64)]),
)
def test_a_list_and_what_gives_its_items_one_by_one_make_the_same_batches(
    lengths, shares, mixing, ids, size, order
):
    """Lists go through the columns in groups, and other sources sample by sample."""
    rows = [rows_of(number, each) for number, each in enumerate(lengths)]

    def loader(make):
        streams = [
            IterableStream(make(each), proportion=share)
            for each, share in zip(rows, shares, strict=False)
        ]
        packing = Packing(max_seq_len=16, **ids)
        dataset = PackedIterableDataset(
            streams, packing=packing, mixing=mixing, order=order, batch_size=size
        )
        return PackedDataLoader(dataset, prefetch_threads=0)

    def as_arrays(each):
        return [np.array(row, np.int32) for row in each]

    together, alone = loader(as_arrays), loader(lambda each: OneByOne(as_arrays(each)))
    for _ in range(2):
        batches, expected = list(together), list(alone)
        assert same(batches, expected)
        assert together.stats()["streams"] == alone.stats()["streams"]


@pytest.mark.parametrize("method", ["best_fit_decreasing", "concat", "next_fit"])
@pytest.mark.parametrize("labels", [{}, {"labels": "tokens", "labels_shifted": False}])
@pytest.mark.parametrize("overflow", ["split", "truncate"])
def test_each_target_is_the_next_token_of_its_sample_also_where_it_is_cut(method, labels, overflow):
    """A rest waits for another window than the token before it, whose target it has."""
    rows = [np.arange(1000 * n, 1000 * n + 1 + n * 37 % 150) for n in range(600)]
    wanted = [row[:32] if overflow == "truncate" else row for row in rows]
    stream = IterableStream([{"tokens": row} for row in rows], **labels)
    packing = Packing(max_seq_len=32, method=method, overflow=overflow)
    num_tokens = 0
    for batch in PackedIterableDataset([stream], packing=packing, batch_size=3):
        filled = [0] * 3
        for row, _, _, number, start, length in batch["segments"].tolist():
            part = slice(filled[row], filled[row] + length)
            own = np.append(wanted[number], -100)
            assert batch["tokens"][row, part].tolist() == own[start : start + length].tolist()
            assert batch["labels"][row, part].tolist() == own[start + 1 :][:length].tolist()
            filled[row] += length
            num_tokens += length
    assert num_tokens == sum(map(len, wanted))


def test_payloads_that_left_before_a_state_do_not_count_again():
    """A piece of a sample may leave with its window, and the rest with the next."""
    rows = [
        {"tokens": [1] * 20, "images": [bytes(9000), bytes(3000)], "at": [(0, 8), (13, 15 + n % 5)]}
        for n in range(300)
    ]

    def loader() -> PackedDataLoader:
        stream = IterableStream(rows, payloads=Payloads({"images": "at"}, split=True))
        dataset = PackedIterableDataset([stream], packing=Packing(max_seq_len=13), batch_size=8)
        return PackedDataLoader(dataset, prefetch_threads=0)

    whole = loader()
    num_batches = len(list(whole))
    for at in range(5, num_batches, 11):
        made, again = loader(), loader()
        batches = iter(made)
        for _ in range(at):
            next(batches)
        again.load_state_dict(made.state_dict())
        list(again)
        assert again.stats()["buffers"] == whole.stats()["buffers"]
