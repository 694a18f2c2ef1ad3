"""Packing speed and fill on made-up web lengths: one JSON line per packer.

::

    python benchmarks/bench_pack.py --max-seq-len 8192 --num-samples 1000000

Every run packs the same samples with an empty packer; the kernels are compiled before the first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from typing import get_args

import numba
import numpy as np

from streampack.config import Method, Packing
from streampack.pack import fit_samples, make_packer
from streampack.types import Int64Array, Packs

SIGMA = (2 * np.log(900 / 400)) ** 0.5  # lognormal with median 400 and mean 900


def web_samples(num_samples: int) -> Int64Array:
    """Return samples of one stream, shape (n, 4)."""
    normal = np.random.Generator(np.random.Philox(key=0)).standard_normal(num_samples)
    samples = np.zeros((num_samples, 4), np.int64)
    samples[:, 2] = np.arange(num_samples)
    samples[:, 3] = np.maximum(np.exp(np.log(400) + SIGMA * normal), 1)
    return samples


def run(samples: Int64Array, packing: Packing, chunk: int) -> tuple[float, Packs]:
    """Pack all samples; return the seconds it took, and the packs that closed without a flush."""
    packer = make_packer(packing)
    begin = time.perf_counter()
    packs = []
    for first in range(0, len(samples), chunk):
        rows = fit_samples(
            samples[first : first + chunk], packing.max_seq_len, packing.overflow, ["web"]
        )
        packs.append(packer.add(rows))
    return time.perf_counter() - begin, Packs.join(packs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-seq-len", type=int, default=8192)
    parser.add_argument("--num-samples", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    samples = web_samples(args.num_samples)
    for method in get_args(Method):
        short = args.max_seq_len // 8 if method == "two_tiers" else None
        packing = Packing(max_seq_len=args.max_seq_len, method=method, short_seq_len=short)
        run(samples[: args.chunk], packing, args.chunk)
        runs = [run(samples, packing, args.chunk) for _ in range(args.runs)]
        seconds, packs = [s for s, _ in runs], runs[0][1]
        num_tokens = int(packs.segments[:, 4].sum())
        record = {
            "bench": f"pack/{method}",
            "unit": "samples/s",
            "median": round(len(samples) / statistics.median(seconds)),
            "runs_s": [round(s, 4) for s in seconds],
            "fill": round(num_tokens / (len(packs) * packing.max_seq_len), 6),
            "params": {**vars(args), "lengths": "lognormal, median 400, mean 900, Philox key 0"},
            "machine": f"{platform.machine()}, {os.cpu_count()} cpus",
            "versions": {
                "python": platform.python_version(),
                "numpy": np.__version__,
                "numba": numba.__version__,
            },
        }
        print(json.dumps(record))


if __name__ == "__main__":
    main()
