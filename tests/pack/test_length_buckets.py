"""Length-bucketed batches: within the budget, and no sample waits too long."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Bucketing
from streampack.pack.length_buckets import LengthBucketPacker
from streampack.types import SAMPLE, Packs
from tests.helpers.examples import examples


def row(number, length):
    """Return the segment row of a sample, shape (1, 6)."""
    return np.array([[0, 0, number, 0, length, length]])


def numbers_of(packs: Packs) -> list[list[int]]:
    """Return the samples' numbers in each batch."""
    return [packs[pack][:, SAMPLE].tolist() for pack in range(len(packs))]


def batches_of(lengths, max_tokens, **options):
    packer = LengthBucketPacker(Bucketing(max_tokens=max_tokens, **options))
    rows = np.array([row(number, length)[0] for number, length in enumerate(lengths)], np.int64)
    return numbers_of(packer.add(rows.reshape(-1, 6))) + numbers_of(packer.flush())


@examples(80, many=200)
@given(
    lengths=st.lists(st.integers(1, 20), max_size=200),
    buffer_samples=st.integers(1, 20),
)
def test_no_sample_waits_for_more_batches_than_the_buffer_has_samples(lengths, buffer_samples):
    packer = LengthBucketPacker(Bucketing(max_tokens=40, buffer_samples=buffer_samples))
    arrived_at, left_at, num_batches = {}, {}, 0
    for number, length in enumerate(lengths):
        arrived_at[number] = num_batches
        for batch in numbers_of(packer.add(row(number, length))):
            num_batches += 1
            left_at |= dict.fromkeys(batch, num_batches)
        assert len(packer.buffered) < max(buffer_samples, 2)
    for batch in numbers_of(packer.flush()):
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
