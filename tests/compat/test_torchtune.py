"""torchtune's packing in strict mode: published vectors, and its rules applied token by token."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.compat.torchtune import PackedDataset, padded_collate_packed
from tests.helpers.examples import examples


def samples_of(lengths):
    """Samples in which every token is different, with labels equal to the tokens plus 1000."""
    starts = np.cumsum([0, *lengths])
    return [
        {
            "tokens": list(range(start, start + length)),
            "labels": list(range(start + 1000, start + 1000 + length)),
        }
        for start, length in zip(starts.tolist(), lengths, strict=False)
    ]


def pack_token_by_token(samples, max_seq_len, padding_idx, max_packs, split):
    """torchtune's packing reimplemented with one buffer of (token, label, position) triples."""
    packs, buffer, counts = [], [], []

    def is_full():
        return max_packs is not None and len(packs) == max_packs

    def deliver(triples, seq_lens):
        missing = max_seq_len - len(triples)
        last = triples[-1][2]
        padding = [(padding_idx, -100, min(last + 1 + i, max_seq_len - 1)) for i in range(missing)]
        tokens, labels, positions = zip(*triples, *padding, strict=True)
        packs.append(
            {
                "tokens": list(tokens),
                "labels": list(labels),
                "input_pos": list(positions),
                "seq_lens": seq_lens + [missing] * (missing > 0),
            }
        )

    for sample in samples:
        boundary = len(buffer)
        size = len(sample["tokens"])
        positions = [i % max_seq_len for i in range(size)]
        buffer += zip(sample["tokens"], sample["labels"], positions, strict=True)
        counts.append(size)
        while len(buffer) > max_seq_len and not is_full():
            if split:
                rest = max_seq_len - sum(counts[:-1])
                deliver(buffer[:max_seq_len], counts[:-1] + [rest] * (rest > 0))
                buffer = buffer[max_seq_len:]
                counts = [len(buffer)]
            else:
                deliver(buffer[:boundary], counts[:-1])
                buffer, counts = buffer[boundary:], counts[-1:]
        if is_full():
            break
    if buffer and not is_full():
        deliver(buffer, counts)
    return packs


def as_lists(items):
    return [{name: value.tolist() for name, value in item.items()} for item in items]


# Published examples: ten samples of one size, packed at 1000 with and without cuts.
@pytest.mark.parametrize("max_packs", [5, 10])
@pytest.mark.parametrize("sample_size", [100, 500])
@pytest.mark.parametrize("split", [True, False])
def test_equal_samples_fill_the_packs_that_torchtunes_own_test_expects(
    max_packs, sample_size, split
):
    max_seq_len = 1000
    source = ({"tokens": [i] * sample_size, "labels": [i] * sample_size} for i in itertools.count())

    dataset = PackedDataset(
        source, max_seq_len=max_seq_len, max_packs=max_packs, split_across_pack=split
    )

    per_pack = max_seq_len // sample_size
    assert len(dataset) == max_packs
    expected = np.repeat(np.arange(per_pack), sample_size)
    assert dataset[0]["tokens"].tolist() == expected.tolist()
    assert dataset[0]["labels"].tolist() == expected.tolist()
    assert dataset[0]["input_pos"].tolist() == list(range(sample_size)) * per_pack
    last = dataset[-1]["tokens"]
    assert last.tolist() == (expected + (max_packs - 1) * per_pack).tolist()


def test_an_endless_source_is_read_no_further_than_max_packs():
    read = []

    def source():
        for number in itertools.count():
            read.append(number)
            yield {"tokens": [1, 2], "labels": [2, 3]}

    PackedDataset(source(), max_seq_len=4, max_packs=2)

    assert len(read) == 5


@examples(100, many=300)
@given(
    lengths=st.lists(st.integers(0, 23), max_size=14),
    max_seq_len=st.integers(1, 9),
    max_packs=st.none() | st.integers(0, 6),
    split=st.booleans(),
)
def test_packs_are_those_of_the_rules_applied_token_by_token(
    lengths, max_seq_len, max_packs, split
):
    if not split:
        lengths = [min(length, max_seq_len) for length in lengths]
    samples = samples_of(lengths)
    options = {"max_seq_len": max_seq_len, "padding_idx": 7, "max_packs": max_packs}

    dataset = PackedDataset(samples, **options, split_across_pack=split)

    expected = pack_token_by_token(samples, max_seq_len, 7, max_packs, split)
    assert as_lists(dataset[:]) == expected
    assert len(dataset) == len(expected)


@examples(40, many=100)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=9), split=st.booleans())
def test_a_token_attends_to_its_own_piece_and_padding_to_padding(lengths, split):
    size = 9
    dataset = PackedDataset(samples_of(lengths), max_seq_len=size, split_across_pack=split)
    if not len(dataset):
        return
    packs = dataset[:]

    made = padded_collate_packed(packs)

    assert set(made) == {"tokens", "labels", "input_pos", "mask"}
    for row, pack in enumerate(packs):
        ids = np.repeat(np.arange(len(pack["seq_lens"])), pack["seq_lens"])
        allowed = (ids[:, None] == ids[None, :]) & np.tri(size, dtype=bool)
        assert (made["mask"][row].numpy() == allowed).all()
