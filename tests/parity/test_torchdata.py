"""Our strict MaxTokenBucketizer against torchdata's own, if that is installed (up to 0.9)."""

from __future__ import annotations

import numpy as np
import pytest

from streampack.compat.torchdata import MaxTokenBucketizer

pipes = pytest.importorskip(
    "torchdata.datapipes.iter",
    reason="torchdata 0.10 and later have no datapipes; install torchdata<=0.9",
    exc_type=ImportError,
)


@pytest.mark.parametrize("seed", range(300))
def test_batches_are_torchdatas_own(seed):
    rng = np.random.default_rng(seed)
    samples = [[number] * n for number, n in enumerate(rng.integers(0, 12, rng.integers(0, 60)))]
    max_token_count = int(rng.integers(3, 20))
    options = {
        "max_token_count": max_token_count,
        "min_len": int(rng.integers(0, 3)),
        "max_len": None if rng.integers(2) else int(rng.integers(3, max_token_count + 1)),
        "buffer_size": int(rng.integers(1, 12)),
        "include_padding": bool(rng.integers(2)),
    }

    theirs = pipes.MaxTokenBucketizer(pipes.IterableWrapper(samples), **options)

    assert list(MaxTokenBucketizer(samples, **options)) == [list(batch) for batch in theirs]
