"""Gather and assemble without planning, compared with a memory copy in the same run.

::

    python benchmarks/bench_batch.py --workload web --max-seq-len 8192

    batch/gather    tokens of planned packs, from mapped shards in the page cache
    batch/masked    tokens and labels of planned packs, with a loss mask
    batch/make      the rest of a native batch, from rows that are already gathered
    batch/copy      the same number of int32 tokens, copied from one warm array to another

Samples are in random order over all shards. Everything runs on one core and, as in a thread of the
loader, makes several device batches per call in reused memory. `ratio` is relative to the copy. The
parts take turns; the first round maps the shards and does not count.

Cost: about 20 s.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import record
import workloads

from streampack.batch.batch import make_batches
from streampack.batch.buffer_pool import BufferPool
from streampack.config import Packing
from streampack.gather.gather import Gatherer
from streampack.pack import fit_samples, make_packer
from streampack.planned.batch_groups import most_together
from streampack.runtime.batch_reader import BatchReader
from streampack.streams import open_streams
from streampack.streams.stream import Stream
from streampack.types import LENGTH, Int64Array, Packs

PARTS = ("gather", "masked", "make", "copy")
GRID = {"web": 8192, "sft": 4096, "long": 32_768}


def plan(lengths: Int64Array, packing: Packing) -> Packs:
    """Pack all samples of one stream in random order."""
    order = np.random.Generator(np.random.Philox(key=1)).permutation(len(lengths))
    zeros = np.zeros_like(order)
    samples = np.stack([zeros, zeros, order, lengths[order]], axis=1)
    packer = make_packer(packing)
    rows = fit_samples(samples, packing.max_seq_len, packing.overflow, ["samples"])
    return Packs.join([packer.add(rows), packer.flush()])


def run_masked(gatherer: Gatherer, batches: list[Packs], out: Any, labels_out: Any) -> float:
    """Return the seconds that gathering rows and labels takes."""
    begin = time.perf_counter()
    for packs in batches:
        gatherer.gather(packs, len(packs), out=out, labels_out=labels_out)
    return time.perf_counter() - begin


def run(gatherer: Gatherer, batches: list[Packs], positions: str, out: Any) -> dict[str, float]:
    """Make all batches of rows in `out`; return the seconds spent in each part."""
    spent = dict.fromkeys(PARTS, 0.0)
    blocks = BufferPool()
    for packs in batches:
        begin = time.perf_counter()
        rows = gatherer.gather(packs, len(packs), out=out)
        middle = time.perf_counter()
        make_batches(rows, packs, steps=[(0, 0)], positions=positions, blocks=blocks)
        spent["make"] += time.perf_counter() - middle
        spent["gather"] += middle - begin
    return spent


def copy_seconds(source: Int64Array, target: Int64Array) -> float:
    """Return the seconds that copying a whole array takes."""
    begin = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - begin


def measure(
    paths: tuple[Path, Path], lengths: Int64Array, params: dict[str, Any], runs: int
) -> dict[str, Any]:
    """Return the runs of each part, in tokens per second, and the number of tokens in a run."""
    packing, size = Packing(max_seq_len=params["max_seq_len"]), params["batch_size"]
    plain, masked = (str(path) for path in paths)
    gatherer = Gatherer(open_streams([Stream(local=plain)]), packing)
    reader = BatchReader(gatherer=gatherer, packing=packing)
    together = most_together(reader, size * packing.max_seq_len)
    size *= together
    packs = plan(lengths, packing)
    batches = [packs.slice(first, first + size) for first in range(0, len(packs) - size + 1, size)]
    num_tokens = sum(int(batch.segments[:, LENGTH].sum()) for batch in batches)
    labelling = Gatherer(open_streams([Stream(local=masked, loss_mask="loss_mask")]), packing)
    out = np.empty((size, packing.max_seq_len), gatherer.dtype)
    labels_out = np.empty(out.shape, np.int32)
    source, target = np.ones(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
    rates: dict[str, list[float]] = {part: [] for part in PARTS}
    for turn in range(runs + 1):
        spent = run(gatherer, batches, packing.positions, out)
        spent["masked"] = run_masked(labelling, batches, out, labels_out)
        spent["copy"] = copy_seconds(source, target)
        if turn:
            for part, seconds in spent.items():
                rates[part].append(num_tokens / seconds)
    return rates | {"num_batches": len(batches) * together, "num_tokens": num_tokens}


def main() -> None:
    """Print one line for each workload and part."""
    parser = record.options(__doc__, runs=5)
    parser.add_argument("--workload", nargs="+", default=list(GRID), choices=list(GRID))
    parser.add_argument("--max-seq-len", type=int, help="by default one for each workload")
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    for workload in args.workload:
        plain = workloads.write(workload, args.data, None, args.num_samples)
        masked = workloads.write(workload, args.data, None, args.num_samples, is_masked=True)
        params = {
            "workload": workload,
            "max_seq_len": args.max_seq_len or GRID[workload],
            "batch_size": args.batch_size,
        }
        lengths = workloads.lengths(workload, args.num_samples)
        measured = measure((plain, masked), lengths, params, args.runs)
        copied = statistics.median(measured["copy"])
        for part in PARTS:
            rate = statistics.median(measured[part])
            fields = {
                "ratio": round(rate / copied, 4),
                "us_per_batch": round(
                    1e6 * measured["num_tokens"] / rate / measured["num_batches"], 1
                ),
            }
            bench = f"batch/{part}"
            record.emit(record.line(bench, "tokens/s", measured[part], params, **fields), args.out)


if __name__ == "__main__":
    main()
