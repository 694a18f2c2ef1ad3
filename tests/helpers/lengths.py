"""Synthetic lengths of samples, as data of several kinds has them."""

from __future__ import annotations

import numpy as np

from streampack.types import Int64Array


def synthetic_lengths(kind: str, num_samples: int, seed: int = 0) -> Int64Array:
    """Return synthetic lengths in tokens, shape (num_samples,).

    Args:
        kind: web (lognormal, median 400, mean 900), sft (median 90, mean 130), code (70 % of
            median 250, 30 % of median 3,000), long (web, and a tenth from 8k to 64k), uniform (1 to
            2,048) or chat (lognormal, median 1,200, at most 2,048).
        num_samples: Number of lengths.
        seed: Random seed.

    >>> synthetic_lengths("sft", 3).tolist() == synthetic_lengths("sft", 3).tolist()
    True
    """
    bits = np.random.Generator(np.random.Philox(key=seed))
    normal, uniform = bits.standard_normal(num_samples), bits.random(num_samples)
    web = np.exp(np.log(400) + (2 * np.log(900 / 400)) ** 0.5 * normal)
    by_kind = {
        "web": web,
        "sft": np.exp(np.log(90) + (2 * np.log(130 / 90)) ** 0.5 * normal),
        "code": np.where(
            uniform < 0.7,
            np.exp(np.log(250) + 0.8 * normal),
            np.exp(np.log(3000) + 0.9 * normal),
        ),
        "long": np.where(uniform < 0.9, web, 8192 * 8 ** (10 * (uniform - 0.9))),
        "uniform": 1 + np.floor(2048 * uniform),
        "chat": np.minimum(np.exp(np.log(1200) + 0.6 * normal), 2048),
    }
    lengths: Int64Array = np.maximum(by_kind[kind], 1).astype(np.int64)
    return lengths
