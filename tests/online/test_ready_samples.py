"""Samples that were read and not taken: the columns, and windows of samples chosen together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
)
from streampack.online.item_decoder import are_integer_rows
from streampack.online.ready_samples import ComplexSample, ReadySamples
from streampack.online.source_slice import Items
from tests.helpers.examples import examples
from tests.helpers.iterables import rows_of, same


class OneByOne:
    """A dataset with an index, whose items are read one at a time because it is no list."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["one", "many", "complex", "remove"]), st.integers(1, 9)),
        max_size=30,
    ),
    has_labels=st.booleans(),
)
def test_columns_are_a_queue_of_samples(steps, has_labels):
    ready, expected, number = ReadySamples(has_labels=has_labels), [], 0
    for kind, num in steps:
        if kind == "remove":
            num = min(num, len(expected))
            if num:
                last = expected[num - 1]
                assert ready.remove(0, num) == (last[0], last[2] + 1)
                del expected[:num]
        elif kind == "many":
            rows = [np.arange(n + 1) for n in range(num)]
            numbers = range(number, number + 3 * num, 3)
            lengths = np.array([0 if n == 4 else n + 1 for n in range(num)])
            ready.extend(Items(2, number, numbers, list(rows)), lengths)
            expected += [
                (2, numbers[n], number + n, int(lengths[n]), rows[n].tolist()) for n in range(num)
            ]
        else:
            place, tokens = (1, 5 * number, number), np.arange(num)
            if kind == "one":
                ready.append((*place, num + 2), (tokens, None, tokens))
            else:
                ready.append((*place, 0), (ComplexSample(tokens), None, None))
            expected.append((*place, num + 2 if kind == "one" else 0, tokens.tolist()))
        number += 10

    assert len(ready) == len(expected)
    lines, columns = ready.first(len(expected))
    assert [len(column) for column in columns] == [len(expected)] * (3 if has_labels else 1)
    for index, (pass_, at, taken, length, tokens) in enumerate(expected):
        assert ready.origin(index) == (pass_, at, taken)
        assert ready.length(index) == length
        assert lines[index].tolist() == [pass_, at, taken, length]
        sample = columns[0][index]
        assert isinstance(sample, ComplexSample) == (length == 0)
        assert (sample.item if length == 0 else sample).tolist() == tokens
    assert ready.lengths(0).tolist() == [each[3] for each in expected]
    ready.clear()
    assert len(ready) == 0 == len(ready.lengths(0))


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", ">i4"])
def test_arrays_of_integers_are_plain(dtype):
    assert are_integer_rows([np.zeros(3, dtype), np.zeros(1, np.int32)])


@pytest.mark.parametrize(
    "other",
    [[1], (1,), np.zeros(2), np.zeros((1, 2), int), np.zeros(2, np.uint64), np.array(7), None, "a"],
)
def test_other_items_are_not(other):
    assert not are_integer_rows([np.zeros(3, int), other])


MIXINGS = [
    Mixing(),
    Mixing(weight_unit="tokens"),
    Mixing(stop="repeat", epoch_size=150),
    Mixing(stop="first_exhausted"),
    Mixing(batching_method="stratified", epoch_size=60),
    Mixing(weight_unit="tokens", epoch_size=900),
]


@examples(40)
@given(
    lengths=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=90), min_size=1, max_size=3),
    shares=st.tuples(*[st.integers(1, 9)] * 3),
    mixing=st.sampled_from(MIXINGS),
    ids=st.sampled_from([{}, {"bos_id": 1, "eos_id": 2}]),
    size=st.integers(1, 4),
)
def test_a_list_and_what_gives_its_items_one_by_one_make_the_same_batches(
    lengths, shares, mixing, ids, size
):
    """Lists go through the columns in groups, and other sources sample by sample."""
    rows = [rows_of(number, each) for number, each in enumerate(lengths)]

    def loader(make):
        streams = [
            IterableStream(make(each), proportion=share)
            for each, share in zip(rows, shares, strict=False)
        ]
        packing = Packing(max_seq_len=16, **ids)
        dataset = PackedIterableDataset(streams, packing=packing, mixing=mixing, batch_size=size)
        return PackedDataLoader(dataset, prefetch_threads=0)

    def as_arrays(each):
        return [np.array(row, np.int32) for row in each]

    together, alone = loader(as_arrays), loader(lambda each: OneByOne(as_arrays(each)))
    for _ in range(2):
        batches, expected = list(together), list(alone)
        assert len(batches) == len(expected)
        assert all(map(same, batches, expected))
        assert together.stats()["streams"] == alone.stats()["streams"]


def test_a_shuffled_list_of_arrays_gives_the_samples_of_lists():
    rows = rows_of(0, [5, 9, 2, 20, 31] * 120)

    def batches(make):
        dataset = PackedIterableDataset(
            [IterableStream([make(row) for row in rows])],
            packing=Packing(max_seq_len=16),
            order=Order(seed=3, shuffle_block_size=64),
            batch_size=2,
        )
        return list(dataset)

    expected = batches(list)
    assert all(map(same, batches(np.array), expected))
