"""Whole processes: wall and CPU seconds from the start of Python to an import or a first batch.

::

    python benchmarks/bench_process.py --trees . ../older --remote s3://bucket/stream

    import    streampack's classes        local         a first batch, kernels on disk
    compile   the same, no kernel on disk remote        the same from a store, with an empty cache

With several trees of this repository, their processes take turns, so that all are measured under
the same conditions. CPU seconds vary less than wall seconds if other programs run.

Cost: a minute for each tree.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record
import workloads

MAX_SEQ_LEN, BATCH_SIZE = 2048, 8

IMPORT = "from streampack import PackedDataLoader, PackedStreamingDataset, Stream"
BATCH = """
import sys
from streampack import Order, PackedDataLoader, PackedStreamingDataset, Packing, Stream
local, remote = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
dataset = PackedStreamingDataset(
    [Stream(remote=remote, local=local)],
    packing=Packing(max_seq_len=2048), order=Order(seed=17), batch_size=8)
next(iter(PackedDataLoader(dataset)))
"""
END = "\nimport os, time; print(time.process_time(), flush=True); os._exit(0)"


def run(program: str, tree: Path, *arguments: str, **environment: str) -> tuple[float, float]:
    """Return wall and CPU seconds of one process, up to the end of `program`."""
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", program + END, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree.resolve()), **environment},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        last = process.stdout.readline()
        wall = time.perf_counter() - begin
    return wall, float(last)


def once(case: str, tree: Path, path: Path, remote: str | None) -> tuple[float, float]:
    """Run one case in a new process."""
    if case == "import":
        return run(IMPORT, tree)
    with tempfile.TemporaryDirectory() as empty:
        if case == "compile":
            return run(BATCH, tree, str(path), NUMBA_CACHE_DIR=empty)
        return run(BATCH, tree, *([empty, remote] if remote and case == "remote" else [str(path)]))


def main() -> None:
    """Print one line for each case and tree."""
    parser = record.options(__doc__, runs=7, num_samples=20_000)
    parser.add_argument("--trees", nargs="+", type=Path, default=[record.HOME], help="checkouts")
    parser.add_argument("--cases", nargs="*", default=["import", "local", "compile"])
    parser.add_argument("--remote", help="the URL of a stream, for the case remote")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    path = workloads.write("web", args.data, None, args.num_samples)
    cases = [*args.cases, *(["remote"] if args.remote else [])]
    for case in cases:
        found: dict[Path, list[tuple[float, float]]] = {tree: [] for tree in args.trees}
        for turn in range(args.runs + 1):
            for tree, runs in found.items():
                measured = once(case, tree, path, args.remote)
                if turn:  # the first one fills caches
                    runs.append(measured)
        for number, runs in enumerate(found.values()):
            params = {"max_seq_len": MAX_SEQ_LEN, "batch_size": BATCH_SIZE, "tree": number}
            wall, cpu = ([run[kind] for run in runs] for kind in range(2))
            cpu_s = round(sorted(cpu)[len(cpu) // 2], 3)
            record.emit(record.line(f"process/{case}", "s", wall, params, cpu_s=cpu_s), args.out)


if __name__ == "__main__":
    main()
