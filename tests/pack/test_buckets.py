"""Length-bucketed batches: every sample once, under the budget, none left to wait."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.errors import ConfigError, DataError
from streampack.pack.buckets import LengthBuckets


def batches_of(lengths, max_tokens, **options):
    buckets = LengthBuckets(max_tokens, **options)
    batches = [batch for length in lengths for batch in buckets.add(length)]
    return batches + list(buckets.flush())


@settings(deadline=None, max_examples=300)
@given(
    lengths=st.lists(st.integers(1, 20), max_size=150),
    max_tokens=st.integers(20, 60),
    include_padding=st.booleans(),
    buffer_samples=st.integers(1, 20),
    max_samples=st.none() | st.integers(1, 4),
)
def test_every_sample_is_in_one_batch_and_no_batch_is_over_a_limit(
    lengths, max_tokens, include_padding, buffer_samples, max_samples
):
    batches = batches_of(
        lengths,
        max_tokens,
        include_padding=include_padding,
        buffer_samples=buffer_samples,
        max_samples=max_samples,
    )

    assert sorted(n for batch in batches for n in batch) == list(range(len(lengths)))
    for batch in batches:
        sizes = [lengths[number] for number in batch]
        cost = len(sizes) * max(sizes) if include_padding else sum(sizes)
        assert cost <= max_tokens
        assert max_samples is None or len(batch) <= max_samples


@settings(deadline=None, max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 20), max_size=200),
    buffer_samples=st.integers(1, 20),
)
def test_no_sample_waits_for_more_batches_than_the_buffer_has_samples(lengths, buffer_samples):
    buckets = LengthBuckets(40, buffer_samples=buffer_samples)
    arrived_at, left_at, num_batches = {}, {}, 0
    for number, length in enumerate(lengths):
        arrived_at[number] = num_batches
        for batch in buckets.add(length):
            num_batches += 1
            left_at |= dict.fromkeys(batch, num_batches)
        assert len(buckets) < max(buffer_samples, 2)
    for batch in buckets.flush():
        num_batches += 1
        left_at |= dict.fromkeys(batch, num_batches)

    assert all(left_at[n] - arrived_at[n] <= buffer_samples for n in left_at)


def test_every_batch_holds_the_oldest_sample_that_waits():
    rng = np.random.default_rng(3)
    batches = batches_of(rng.integers(1, 500, 3000).tolist(), 2000, buffer_samples=100)

    waiting = set(range(3000))
    for batch in batches:
        assert min(waiting) in batch
        waiting -= set(batch)


def test_padding_is_little_and_lengths_do_not_drift_from_short_to_long():
    rng = np.random.default_rng(7)
    lengths = np.clip(rng.lognormal(np.log(400), 1.2, 20_000), 1, 8192).astype(int).tolist()

    batches = batches_of(lengths, 8192)

    slots = sum(len(batch) * max(lengths[n] for n in batch) for batch in batches)
    assert sum(lengths) / slots > 0.95
    # torchdata's heap: the last eighth's samples are six times as long as the first's.
    order = [lengths[n] for batch in batches for n in batch]
    eighths = [np.mean(part) for part in np.array_split(order, 8)]
    assert max(eighths) / min(eighths) < 1.3


@pytest.mark.parametrize("length", [0, 21, -1])
def test_a_sample_that_fits_no_batch_is_refused_by_its_number(length):
    buckets = LengthBuckets(20)
    buckets.add(5)

    with pytest.raises(DataError, match=f"sample 1: {length} tokens, where a batch takes 1 to"):
        buckets.add(length)


def test_limits_are_whole_numbers_and_kept_as_ints():
    buckets = LengthBuckets(12.0, buffer_samples=4.0, max_samples=2.0)
    assert [buckets.add(length) for length in (2, 2, 2)] == [[]] * 3
    assert buckets.add(2) == [[0, 1]]
    with pytest.raises(DataError, match="to max_tokens=12; cut it"):
        buckets.add(13)
    for name in ("max_tokens", "buffer_samples"):
        with pytest.raises(ConfigError, match=f"{name}=None is no integer; write a whole number"):
            LengthBuckets(**{"max_tokens": 12, name: None})


def test_limits_below_one_are_refused():
    with pytest.raises(ConfigError, match="max_tokens=0 must be at least 1"):
        LengthBuckets(0)
    with pytest.raises(ConfigError, match="buffer_samples=0 must be at least 1"):
        LengthBuckets(20, buffer_samples=0)
