"""Packing only: speed, fill, cut samples and waiting times of every packer.

::

    python benchmarks/bench_pack.py --workload web --max-seq-len 8192

    lengths --in chunks----> packs that close       samples/s, fill, samples cut
            --one by one---> packs as they leave    how many leave while a sample waits

The lengths `uniform` and `chat` are hard, because samples are nearly as long as packs; they are
only packed at 2,048. Packers of windows get windows of 1,024 samples, as iterables make them, and
best-fit decreasing also gets all samples in one window, as planned streams nearly do.

No tokens are touched. Every run packs the same samples with an empty packer, kernels are compiled
before the first run, and the packers take turns. Rates are in processor time.

Cost: about a minute for all workloads and lengths.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import record
import workloads

from streampack.config import Packing
from streampack.pack import fit_samples, make_packer
from streampack.types import LENGTH, SAMPLE, Int64Array, Packs

CHUNK = 4096  # samples that a planner hands to its packer in one call
NUM_WATCHED = 20_000  # samples to measure the waiting time of
WINDOW = 1024  # samples of a window of iterables
SEQ_LENS = [2048, 4096, 8192, 32_768]
HARD = ("uniform", "chat")


def cases(max_seq_len: int) -> dict[str, tuple[Packing, int]]:
    """Return packings by name, and the samples that each gets together."""
    short = max(min(4096, max_seq_len // 8), 1)
    options: dict[str, tuple[dict[str, Any], int]] = {
        "best_fit_decreasing, one window": ({}, 1 << 62),
        "best_fit_decreasing": ({}, WINDOW),
        f"two_tiers, short_seq_len={short}": (
            {"method": "two_tiers", "short_seq_len": short},
            WINDOW,
        ),
        "knapsack": ({"method": "knapsack"}, WINDOW),
        "next_fit": ({"method": "next_fit"}, CHUNK),
        "concat": ({"method": "concat"}, CHUNK),
    }
    return {
        name: (Packing(max_seq_len=max_seq_len, **values), size)
        for name, (values, size) in options.items()
    }


def waiting(segments: Int64Array, packing: Packing, size: int) -> tuple[float, float, float]:
    """Return how many packs leave while a sample waits: mean, 99th percentile, maximum.

    The segments come one by one, or in windows of `size`.
    """
    packer = make_packer(packing)
    size = min(size, len(segments)) if packing.packs_windows else 1
    arrived = np.zeros(len(segments), np.int64)  # packs that had left when each sample arrived
    waits: list[Int64Array] = []
    number = segments.copy()
    number[:, SAMPLE] = np.arange(len(segments))
    num_packs = 0
    for row in range(0, len(segments), size):
        arrived[row : row + size] = num_packs
        packs = packer.add(number[row : row + size])
        sizes = np.diff(packs.ends, prepend=0)
        left = num_packs + np.repeat(np.arange(len(packs)), sizes)
        waits.append(left - arrived[packs.segments[:, SAMPLE]])
        num_packs += len(packs)
    waited = np.sort(np.concatenate(waits)) if num_packs else np.zeros(1, np.int64)
    p99 = waited[int(np.ceil(0.99 * len(waited))) - 1]
    return float(waited.mean()), float(p99), float(waited[-1])


def pack(samples: Int64Array, packing: Packing, size: int) -> tuple[float, Packs]:
    """Pack all samples; return the seconds it took, and the packs that closed without a flush."""
    packer = make_packer(packing)
    begin = time.process_time()
    segments = fit_samples(samples, packing.max_seq_len, packing.overflow, ["samples"])
    size = min(size, max(len(segments), 1))
    packs = [packer.add(segments[at : at + size]) for at in range(0, len(segments), size)]
    return time.process_time() - begin, Packs.join(packs)


def share_cut(packs: Packs) -> float:
    """Return the share of samples that are in more than one piece."""
    pieces = np.bincount(packs.segments[:, SAMPLE])
    return float((pieces > 1).sum() / max((pieces > 0).sum(), 1))


def measure(lengths: Int64Array, packing: Packing, size: int, num_runs: int) -> dict[str, object]:
    """Return the rates and properties of one packer."""
    samples = np.zeros((len(lengths), 4), np.int64)
    samples[:, 2] = np.arange(len(lengths))
    samples[:, 3] = lengths
    pack(samples[:CHUNK], packing, size)
    runs = [pack(samples, packing, size) for _ in range(num_runs)]
    packs = runs[0][1]
    watched = fit_samples(samples[:NUM_WATCHED], packing.max_seq_len, packing.overflow, ["samples"])
    wait = waiting(watched, packing, size)
    seconds = [max(spent, 1e-9) for spent, _ in runs]
    num_tokens = int(packs.segments[:, LENGTH].sum())
    return {
        "packed_samples": len(samples),
        "runs": [len(samples) / spent for spent in seconds],
        "ns_per_sample": round(1e9 * statistics.median(seconds) / len(samples), 1),
        "tokens_per_s": round(num_tokens / statistics.median(seconds)),
        "fill": round(num_tokens / max(len(packs) * packing.max_seq_len, 1), 6),
        "samples_cut": round(share_cut(packs), 5),
        "wait_packs": dict(zip(("mean", "p99", "most"), (round(w, 2) for w in wait), strict=True)),
    }


def main() -> None:
    """Print one line for each workload, length and packer."""
    parser = record.options(__doc__, runs=3)
    parser.add_argument("--workload", nargs="+", default=list(workloads.NUM_SAMPLES))
    parser.add_argument("--max-seq-len", nargs="+", type=int, default=SEQ_LENS)
    args = parser.parse_args()
    for workload in args.workload:
        lengths = workloads.lengths(workload, args.num_samples)
        for max_seq_len in args.max_seq_len if workload not in HARD else [2048]:
            params = {
                "workload": workload,
                "num_samples": len(lengths),
                "max_seq_len": max_seq_len,
            }
            for name, (packing, size) in cases(max_seq_len).items():
                fields = measure(lengths, packing, size, args.runs)
                rates = fields.pop("runs")
                result = record.line(f"pack/{name}", "samples/s", rates, params, **fields)
                record.emit(result, args.out)


if __name__ == "__main__":
    main()
