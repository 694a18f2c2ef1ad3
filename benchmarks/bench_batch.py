"""Speed of native batches from the page cache, planning excluded: one JSON line.

::

    python benchmarks/bench_batch.py --max-seq-len 8192 --batch-size 8

Writes made-up web text as MDS shards (half int32, half uint16), packs it once in random order, then
gathers and assembles every batch in one process. The first run maps the shards and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numba
import numpy as np
import torch

from streampack.assemble import make_batch
from streampack.config import Packing
from streampack.pack import fit_samples, make_packer
from streampack.read import Gatherer
from streampack.streams.mosaic import MDSWriter
from streampack.streams.opened import OpenStream, open_stream
from streampack.streams.stream import Stream
from streampack.types import Int64Array, Packs

SIGMA = (2 * np.log(900 / 400)) ** 0.5  # lognormal with median 400 and mean 900
DTYPES = ("int32", "uint16")


def web_lengths(num_samples: int) -> Int64Array:
    """Return tokens per sample, shape (num_samples,)."""
    normal = np.random.Generator(np.random.Philox(key=0)).standard_normal(num_samples)
    return np.maximum(np.exp(np.log(400) + SIGMA * normal), 1).astype(np.int64)


def write(folder: Path, lengths: Int64Array, dtype: str) -> None:
    columns = {"tokens": f"ndarray:{dtype}"}
    with MDSWriter(out=str(folder), columns=columns, size_limit="64mb") as writer:
        for length in lengths.tolist():
            writer.write({"tokens": np.arange(length).astype(dtype)})


def plan(lengths: Int64Array, packing: Packing) -> Packs:
    """Pack all samples in random order; stream i % 2, its sample i // 2."""
    order = np.random.Generator(np.random.Philox(key=1)).permutation(len(lengths))
    samples = np.stack([order % 2, np.zeros_like(order), order // 2, lengths[order]], axis=1)
    packer = make_packer(packing)
    rows = fit_samples(samples, packing.max_seq_len, packing.overflow, DTYPES)
    return Packs.join([packer.add(rows), packer.flush()])


def run(streams: list[OpenStream], packing: Packing, batches: list[Packs]) -> dict[str, float]:
    """Make every batch; return the seconds spent in each step."""
    gatherer = Gatherer(streams, packing)
    spent = {"gather": 0.0, "make_batch": 0.0}
    for packs in batches:
        begin = time.perf_counter()
        rows = gatherer.gather(packs, len(packs))
        middle = time.perf_counter()
        make_batch(rows, packs, epoch=0, position=0, positions=packing.positions)
        spent["gather"] += middle - begin
        spent["make_batch"] += time.perf_counter() - middle
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-seq-len", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-samples", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    packing = Packing(max_seq_len=args.max_seq_len)
    lengths = web_lengths(args.num_samples)
    packs = plan(lengths, packing)
    size = args.batch_size
    batches = [packs.slice(first, first + size) for first in range(0, len(packs) - size + 1, size)]
    with tempfile.TemporaryDirectory() as folder:
        streams = []
        for number, dtype in enumerate(DTYPES):
            write(Path(folder) / dtype, lengths[number::2], dtype)
            streams.append(open_stream(Stream(local=f"{folder}/{dtype}"), number))
        run(streams, packing, batches)
        runs = [run(streams, packing, batches) for _ in range(args.runs)]
    num_tokens = sum(int(batch.segments[:, 4].sum()) for batch in batches)
    seconds = [sum(spent.values()) for spent in runs]
    record = {
        "bench": "batch",
        "unit": "tokens/s",
        "median": round(num_tokens / statistics.median(seconds)),
        "runs_s": [round(s, 4) for s in seconds],
        "us_per_batch": {
            step: round(statistics.median(spent[step] for spent in runs) / len(batches) * 1e6, 1)
            for step in runs[0]
        },
        "params": {**vars(args), "lengths": "lognormal, median 400, mean 900, Philox key 0"},
        "machine": f"{platform.machine()}, {os.cpu_count()} cpus",
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": numba.__version__,
            "torch": torch.__version__,
        },
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
