"""Length-bucketed batches of iterables: every sample once, under the budget, resumed exactly."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    BucketedIterableDataset,
    Bucketing,
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    Payloads,
    World,
)
from tests.helpers.examples import crossed, examples
from tests.helpers.iterables import Again, WithState, assert_continues, rows_of, with_states

LENGTHS = np.random.Generator(np.random.Philox(key=1)).integers(1, 60, 150).tolist()


def dataset(kind: type = list, **kwargs) -> BucketedIterableDataset:
    """Two sources of 150 and 50 samples."""
    return BucketedIterableDataset(
        [
            IterableStream(kind(rows_of(0, LENGTHS)), proportion=3, name="a"),
            IterableStream(kind(rows_of(1, LENGTHS[:50])), proportion=1, name="b"),
        ],
        bucketing=kwargs.pop("bucketing", Bucketing(max_tokens=128, buffer_samples=20)),
        mixing=Mixing(batching_method=kwargs.pop("method", "random")),
        **kwargs,
    )


def samples_of(batches: list[dict]) -> dict[tuple[int, int, int], list[int]]:
    """(stream, sample, first token) -> tokens of the row; each row is checked for its padding."""
    found = {}
    for batch in batches:
        for row, stream, _, sample, start, length in batch["segments"].tolist():
            tokens = batch["tokens"][row].tolist()
            assert (stream, sample, start) not in found, "it came twice"
            assert tokens[length:] == [0] * (len(tokens) - length)
            found[stream, sample, start] = tokens[:length]
    return found


def expected() -> dict[tuple[int, int, int], list[int]]:
    """All samples of both sources."""
    return {
        (stream, index, 0): tokens
        for stream, lengths in enumerate((LENGTHS, LENGTHS[:50]))
        for index, tokens in enumerate(rows_of(stream, lengths))
    }


@examples(25, many=60)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=80),
    max_tokens=st.integers(20, 100),
    include_padding=st.booleans(),
    max_samples=st.none() | st.integers(1, 4),
    buffer_samples=st.integers(1, 20),
)
def test_every_token_comes_once_and_no_batch_is_over_its_limits(
    lengths, max_tokens, include_padding, max_samples, buffer_samples
):
    bucketing = Bucketing(
        max_tokens=max_tokens,
        include_padding=include_padding,
        max_samples=max_samples,
        buffer_samples=buffer_samples,
        max_seq_len=20,
    )
    rows = rows_of(0, lengths)

    batches = list(BucketedIterableDataset([IterableStream(rows)], bucketing=bucketing))

    pieces: dict[int, list[int]] = {}
    for (_, sample, _), tokens in sorted(samples_of(batches).items()):
        pieces.setdefault(sample, []).extend(tokens)
    assert [pieces[index] for index in range(len(rows))] == rows
    for batch in batches:
        num_rows, longest = batch["tokens"].shape
        assert longest == int(batch["seq_lens"].max()) <= 20
        cost = num_rows * longest if include_padding else int(batch["seq_lens"].sum())
        assert cost <= max_tokens
        assert num_rows <= min(max_samples or buffer_samples, buffer_samples)
        assert batch["tokens"].numel() <= bucketing.most_slots


def test_a_batch_says_where_its_tokens_labels_and_documents_are():
    rows = [[5, 6, 7, 8], [1, 2]]
    bucketing = Bucketing(max_tokens=16, eos_id=9, padding_id=3)

    (batch,) = BucketedIterableDataset([IterableStream(rows)], bucketing=bucketing)

    assert batch["tokens"].tolist() == [[5, 6, 7, 8, 9], [1, 2, 9, 3, 3]]
    assert batch["labels"].tolist() == [[6, 7, 8, 9, -100], [2, 9, -100, -100, -100]]
    assert batch["input_pos"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1]]
    assert batch["document_ids"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["seq_lens"].tolist() == [5, 3]
    assert batch["cu_seqlens"].tolist() == [0, 5, 8, 10]
    assert batch["segments"].tolist() == [[0, 0, 0, 0, 0, 5], [1, 0, 0, 1, 0, 3]]
    assert (batch["epoch"], batch["position"]) == (0, 1)
    assert batch["tokens"].dtype == batch["seq_lens"].dtype == torch.int64


def test_extra_fields_and_objects_stay_with_their_rows():
    rows = [
        {"tokens": [4, 5, 6], "weight": [1, 2, 3], "image": "x"},
        {"tokens": [7], "weight": [4], "image": "y"},
    ]
    stream = IterableStream(
        rows, token_fields={"weight": "float32"}, payloads=Payloads({"image": None})
    )

    (batch,) = BucketedIterableDataset([stream], bucketing=Bucketing(max_tokens=6))

    assert batch["weight"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch["image"] == ["x", "y"]
    assert batch["image_at"].tolist() == [[0, 0, 3], [1, 0, 1]]


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_and_workers_take_every_sample_once(num_workers):
    batches = []
    for rank in range(2):
        part = dataset(world=World(rank=rank, num_ranks=2))
        batches += list(PackedDataLoader(part, num_workers=num_workers))

    assert samples_of(batches) == expected()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "kind"),
    crossed(["random", "stratified", "per_stream", "device_per_stream"], [WithState, Again, list]),
)
def test_a_state_of_any_batch_goes_on_bit_for_bit(kind, method):
    original = dataset(kind, method=method, order=Order(seed=3))
    first = json.dumps(original.state_dict())
    batches, states = with_states(original)
    assert samples_of(batches) == expected()

    for at in [0, 1, 2, *range(3, len(batches), 9), len(batches) - 1]:
        resumed = dataset(kind, method=method, order=Order(seed=3))
        assert_continues(resumed, states[at - 1] if at else first, batches[at:])


def test_stats_count_samples_tokens_and_padding():
    whole = list(PackedDataLoader(dataset()))
    loader = PackedDataLoader(dataset())
    batches = iter(loader)
    for _ in whole:
        next(batches)

    stats = loader.stats()

    assert stats["streams"]["a"]["samples"] == 150
    assert stats["tokens"] == sum(LENGTHS) + sum(LENGTHS[:50])
    assert stats["packs"] == len(whole)
    assert stats["fill"] == stats["tokens"] / sum(batch["tokens"].numel() for batch in whole)
    assert stats["buffers"]["worker_tokens"] <= 20 * 128 + 2 * 128
