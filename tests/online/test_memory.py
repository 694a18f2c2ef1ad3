"""The memory of a worker does not grow with the samples that it processed."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from streampack import IterableStream, PackedIterableDataset, Packing


def resident_bytes() -> int:
    """Return the memory that this process has in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.thorough
def test_samples_of_a_million_tokens_are_sliced_and_their_rests_do_not_keep_them_alive():
    def source():
        for number in itertools.count():
            yield np.zeros(1_000_003 if number % 200 == 0 else 50, np.int64)

    packing = Packing(max_seq_len=4096, buffer_tokens=32_768)
    batches = iter(PackedIterableDataset([IterableStream(source())], packing=packing))
    for _ in range(300):
        next(batches)
    before = resident_bytes()
    for _ in range(800):
        next(batches)

    # One of them is 8 MB of tokens and 8 MB of labels.
    assert resident_bytes() - before < 40e6


@pytest.mark.slow
def test_memory_does_not_grow_over_ten_million_samples():
    rows = [[1] * length for length in (1, 2, 3, 5, 8)]
    stream = IterableStream(itertools.cycle(rows))
    packing = Packing(max_seq_len=2048)
    batches = iter(PackedIterableDataset([stream], packing=packing, batch_size=8))
    num_tokens = 0
    while num_tokens < 3_800_000:  # a million samples
        num_tokens += int(next(batches)["segments"][:, 5].sum())
    before = resident_bytes()
    while num_tokens < 38_000_000:
        num_tokens += int(next(batches)["segments"][:, 5].sum())

    assert resident_bytes() - before < 20e6
