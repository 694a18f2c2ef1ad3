"""torchdata's bucketizer in strict mode: documented examples, limits, and a reimplemented heap."""

from __future__ import annotations

import heapq
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from streampack.compat.torchdata import MaxTokenBucketizer
from tests.helpers.examples import crossed, examples
from tests.helpers.iterables import Again

WORDS = ["1", "11", "1", "1111", "111", "1", "11", "11", "111"]


def bucketize(lengths, max_token_count, min_len, max_len, buffer_size, include_padding):
    """The rules in plain Python: a heap ordered only by length, one sample at a time."""

    class Entry:
        def __init__(self, number):
            self.number = number

        def __lt__(self, other):
            return lengths[self.number] < lengths[other.number]

    def cost(numbers):
        sizes = [lengths[number] for number in numbers]
        return len(sizes) * max(sizes) if include_padding else sum(sizes)

    batches, heap = [[]], []

    def offer():
        number = heapq.heappop(heap).number
        if batches[-1] and cost([*batches[-1], number]) > max_token_count:
            batches.append([])
        batches[-1].append(number)

    for number, length in enumerate(lengths):
        if min_len <= length <= max_len:
            heapq.heappush(heap, Entry(number))
            if len(heap) == buffer_size:
                offer()
    while heap:
        offer()
    return [batch for batch in batches if batch]


def test_the_documented_examples_come_out_as_documented():
    assert list(MaxTokenBucketizer(WORDS, max_token_count=5)) == [
        ["1", "1", "1", "11"],
        ["11", "11"],
        ["111"],
        ["111"],
        ["1111"],
    ]
    assert list(MaxTokenBucketizer(WORDS, max_token_count=4, buffer_size=4)) == [
        ["1", "1", "1"],
        ["11", "11"],
        ["11"],
        ["111"],
        ["111"],
        ["1111"],
    ]


@examples(100, many=300)
@given(
    lengths=st.lists(st.integers(0, 12), max_size=40),
    max_token_count=st.integers(1, 20),
    min_len=st.integers(0, 3),
    max_len=st.integers(3, 20),
    buffer_size=st.integers(1, 9),
    include_padding=st.booleans(),
)
def test_batches_are_those_of_the_rules(
    lengths, max_token_count, min_len, max_len, buffer_size, include_padding
):
    max_len = min(max_len, max_token_count)
    min_len = min(min_len, max_len)
    source = list(enumerate(lengths))

    batches = MaxTokenBucketizer(
        source,
        max_token_count,
        lambda sample: sample[1],
        min_len,
        max_len,
        buffer_size,
        include_padding,
    )

    expected = bucketize(lengths, max_token_count, min_len, max_len, buffer_size, include_padding)
    assert [[number for number, _ in batch] for batch in batches] == expected
    # Waiting samples belong to one iteration, so a second iteration is the same.
    assert [[number for number, _ in batch] for batch in batches] == expected


class Strided(IterableDataset):
    """Splits itself across workers, as an IterableDataset should."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(1, 41)[info.id :: info.num_workers] if info else range(1, 41))


def as_is(number):
    return number


SOURCES = {
    "list": list(range(1, 41)),
    "iterable": Again(list(range(1, 41))),
    "IterableDataset": Strided(),
    "IterDataPipe": IterableWrapper(range(1, 41)).sharding_filter(),
}


@pytest.mark.parametrize(("kind", "num_workers"), crossed(list(SOURCES), [0, 1, 2]))
def test_a_data_loader_gives_every_sample_once(kind, num_workers):
    source = SOURCES[kind]
    batches = MaxTokenBucketizer(datapipe=source, max_token_count=50, len_fn=as_is, buffer_size=5)
    loader = DataLoader(batches, batch_size=None, num_workers=num_workers)
    for _ in range(2):
        found = list(loader)
        assert sorted(itertools.chain(*found)) == list(range(1, 41))
        assert all(sum(batch) <= 50 for batch in found)
    if num_workers == 0:
        assert found == list(batches)
