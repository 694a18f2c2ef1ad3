"""Whole loader: native batches a second from MDS shards in the page cache, all in one run.

    python benchmarks/bench_loader.py --num-samples 60000 --max-seq-len 8192 --batch-size 8

Prints one JSON line for each way to read: in this process without a thread, with one thread ahead,
with two worker processes, and under torch's own DataLoader; the ratio is to the first.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

from streampack import Order, PackedDataLoader, PackedStreamingDataset, Packing, Stream
from streampack.write import write_stream


def write(folder: Path, num_samples: int) -> Path:
    """Write a stream of web-like lengths: lognormal, median 400, mean about 900."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(rng.lognormal(np.log(400), 1.27, num_samples).astype(np.int64), 1)
    tokens = rng.integers(0, 50_000, int(lengths.sum()), dtype=np.int32)
    ends = np.cumsum(lengths)
    samples = (tokens[end - length : end] for end, length in zip(ends, lengths, strict=True))
    write_stream(samples, folder / "web", dtype="int32", compression=None)
    return folder / "web"


def plain(dataset: PackedStreamingDataset) -> Iterator[dict]:
    """Iterate the dataset itself, with no loader around it."""
    return iter(dataset)


WAYS = {
    "dataset, no thread": plain,
    "PackedDataLoader(num_workers=0)": lambda d: iter(PackedDataLoader(d)),
    "PackedDataLoader(num_workers=2)": lambda d: iter(
        PackedDataLoader(d, num_workers=2, persistent_workers=False)
    ),
    "DataLoader(num_workers=2)": lambda d: iter(DataLoader(d, batch_size=None, num_workers=2)),
}


def run(path: Path, args: argparse.Namespace, way: str) -> tuple[float, float]:
    """Return tokens a second after the first batch, and seconds to the first batch."""
    dataset = PackedStreamingDataset(
        [Stream(local=str(path))],
        packing=Packing(max_seq_len=args.max_seq_len),
        order=Order(seed=17),
        batch_size=args.batch_size,
    )
    begin = time.perf_counter()
    batches = WAYS[way](dataset)
    next(batches)
    first = time.perf_counter()
    slots = sum(batch["tokens"].numel() for batch in batches)
    return slots / (time.perf_counter() - first), first - begin


def main() -> None:
    """Print one JSON line a way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-samples", type=int, default=60_000)
    parser.add_argument("--max-seq-len", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), args.num_samples)
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        firsts: dict[str, list[float]] = {way: [] for way in WAYS}
        for repeat in range(args.repeats + 1):
            for way in WAYS:  # interleaved, so that a noisy moment hits all ways alike
                rate, first = run(path, args, way)
                if repeat:
                    rates[way].append(rate)
                    firsts[way].append(first)
    base = statistics.median(next(iter(rates.values())))
    for way, runs in rates.items():
        record = {
            "bench": "loader",
            "way": way,
            "unit": "tokens/s",
            "median": round(statistics.median(runs)),
            "ratio": round(statistics.median(runs) / base, 3),
            "runs": [round(rate) for rate in runs],
            "first_batch_s": round(statistics.median(firsts[way]), 3),
            "params": vars(args) | {"lengths": "lognormal(ln 400, 1.27)"},
            "python": platform.python_version(),
        }
        print(json.dumps(record))


if __name__ == "__main__":
    main()
