"""Start-up: seconds from the constructor to the first batch, and memory, at up to 10**8 samples.

::

    python benchmarks/bench_start.py --samples 1000000 100000000 --peers

    shards 0, 1, 2, ...  ->  hard links to one file     index.json and length file: whole

Each measurement runs in a new process that has already imported everything and iterated a small
stream of the same kind, so that only the cost of the number of samples remains. Memory is the peak
resident set from there on, including mapped files; "beyond the index" subtracts the size of
index.json. `--peers` also measures MosaicML's StreamingDataset on the same shards, which takes
gigabytes.

Cost: about 20 s; with `--peers` about two minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import record

from streampack.mds.index import parse_index
from streampack.mds.length_file import LENGTH_FILE, length_file_pieces, write_length_file
from streampack.write import write_stream

SAMPLES = 18_600  # of a shard of 64 MiB, at 900 tokens of 4 bytes
TOKENS = 3  # of a sample, so that the one file is small
SMALL = 2  # shards of the stream that warms up
MAX_SEQ_LEN, BATCH_SIZE = 2048, 8

PATHS = filter(None, (record.SITE, os.environ.get("PYTHONPATH")))
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)}

COMMON = """
import gc, json, sys, time

def resident(name):
    for row in open("/proc/self/status"):
        if row.startswith(name + ":"):
            return int(row.split()[1]) / 1024

def measure(start):
    start(sys.argv[1])
    gc.collect()
    before = resident("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
    constructor, seconds = start(sys.argv[2])
    peak = resident("VmHWM") - before
    print(json.dumps({"constructor_s": constructor, "seconds": seconds, "mib": peak}), flush=True)
"""

OURS = """
from streampack import Order, PackedDataLoader, PackedStreamingDataset, Packing, Stream

def start(path):
    begin = time.perf_counter()
    dataset = PackedStreamingDataset(
        [Stream(local=path)], packing=Packing(max_seq_len=2048), order=Order(seed=17), batch_size=8)
    loader = PackedDataLoader(dataset)
    made = time.perf_counter() - begin
    next(iter(loader))
    return made, time.perf_counter() - begin

measure(start)
"""

MOSAIC = """
import os
from streaming import StreamingDataset

def start(path):
    begin = time.perf_counter()
    dataset = StreamingDataset(local=path, batch_size=8, shuffle=True, shuffle_seed=17)
    made = time.perf_counter() - begin
    next(iter(dataset))
    return made, time.perf_counter() - begin

measure(start)
os._exit(0)  # its threads would keep running
"""


def fake_stream(folder: Path, num_shards: int) -> Path:
    """Return a stream of this many shards, all links to one file; create it if missing."""
    out = folder / f"start-{num_shards}"
    if out.exists():
        return out
    partial = folder / f"start-{num_shards}.partial-{os.getpid()}"
    samples = (np.full(TOKENS, 7, np.int32) for _ in range(SAMPLES))
    write_stream(
        samples, partial, tokens_dtype="int32", compression=None, size_limit=None, hashes=()
    )
    [shard] = json.loads((partial / "index.json").read_text())["shards"]
    raw, shards = shard["raw_data"], []
    for number in range(num_shards):
        name = f"shard.{number:05}.mds"
        if name != raw["basename"]:
            os.link(partial / raw["basename"], partial / name)
        shards.append(shard | {"raw_data": raw | {"basename": name}})
    text = json.dumps({"version": 2, "shards": shards}).encode()
    (partial / "index.json").write_bytes(text)
    pieces = length_file_pieces(
        text,
        parse_index(text, str(partial)),
        "tokens",
        np.full(SAMPLES * num_shards, TOKENS, np.uint32),
        np.broadcast_to(np.uint32(7), (SAMPLES * num_shards, 2)),
    )
    write_length_file(partial / LENGTH_FILE, pieces)
    partial.rename(out)
    return out


def start(program: str, small: Path, path: Path) -> dict[str, float]:
    """Run one measurement in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", COMMON + program, str(small), str(path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
        env=ENVIRONMENT,
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def clear_mosaic() -> None:
    """Free the shared memory left by processes that exited without any clean-up."""
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import streaming.base.util as u;u.clean_stale_shared_memory()",
        ],
        check=False,
        capture_output=True,
        env=ENVIRONMENT,
    )


def measure(name: str, program: str, path: Path, small: Path, args: Any) -> dict[str, Any]:
    """Return the line of one program and one stream."""
    index = (path / "index.json").stat().st_size / 2**20
    runs = [start(program, small, path) for _ in range(args.runs)]
    params = {
        "num_samples": int(path.name.split("-")[1]) * SAMPLES,
        "max_seq_len": MAX_SEQ_LEN,
        "batch_size": BATCH_SIZE,
    }
    seconds, peaks = ([run[key] for run in runs] for key in ("seconds", "mib"))
    return record.line(
        f"start/{name}",
        "s",
        seconds,
        params,
        constructor_s=round(sorted(run["constructor_s"] for run in runs)[len(runs) // 2], 3),
        peak_mib=round(max(peaks), 1),
        index_mib=round(index, 1),
        beyond_index_mib=round(max(max(peaks) - index, 0.0), 1),
    )


def main() -> None:
    """Print one line for each number of samples, and program."""
    parser = record.options(__doc__, runs=3)
    parser.add_argument("--samples", nargs="+", type=int, default=[10**6, 10**7, 10**8])
    parser.add_argument("--peers", action="store_true", help="measure StreamingDataset, too")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    small = fake_stream(args.data, SMALL)
    programs = {"streampack": OURS} | ({"mosaicml": MOSAIC} if args.peers else {})
    for num_samples in args.samples:
        path = fake_stream(args.data, max(num_samples // SAMPLES, SMALL))
        for name, program in programs.items():
            if name == "mosaicml":
                clear_mosaic()
            try:
                record.emit(measure(name, program, path, small, args), args.out)
            except (subprocess.SubprocessError, ValueError) as error:
                why = getattr(error, "stderr", "") or str(error)
                params = {"num_samples": num_samples}
                record.emit(record.skipped(f"start/{name}", why[-300:], params), args.out)


if __name__ == "__main__":
    main()
