"""Sample lengths of a stream: quantiles, and a histogram by powers of two.

::

    tokens        samples
      16 -   31       412  ███████▏
      32 -   63     1,204  ████████████████████▉
      64 -  127       988  █████████████████▏
"""

from __future__ import annotations

import numpy as np
from rich import box
from rich.bar import Bar as HorizontalBar
from rich.table import Column, Table

from streampack.types import Int64Array

QUANTILES = {"least": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "most": 1.0}
BAR_WIDTH = 40


def length_quantiles(lengths: Int64Array) -> dict[str, float]:
    """Return the mean and quantiles of lengths in tokens; quantiles are not interpolated.

    >>> length_quantiles(np.array([5, 1, 9]))["median"]
    5.0
    """
    found = np.quantile(lengths, list(QUANTILES.values()), method="inverted_cdf").tolist()
    quantiles = dict(zip(QUANTILES, map(float, found), strict=True))
    return {**quantiles, "mean": float(lengths.mean())}


def histogram_table(lengths: Int64Array) -> Table:
    """Return a histogram of lengths in tokens, with one row per power of two."""
    # A length of n bits is in [2 ** (n - 1), 2 ** n); frexp counts the bits exactly.
    bits = np.frexp(lengths.astype(np.float64))[1]
    counts = np.bincount(bits)
    numbers = [Column(name, justify="right") for name in ("tokens", "samples")]
    table = Table(*numbers, "", box=box.SIMPLE_HEAD)
    for num_bits in range(int(bits.min()), int(bits.max()) + 1):
        count = int(counts[num_bits])
        table.add_row(
            f"{2**num_bits // 2:,} - {2**num_bits - 1:,}",
            f"{count:,}",
            HorizontalBar(size=int(counts.max()), begin=0, end=count, width=BAR_WIDTH),
        )
    return table
