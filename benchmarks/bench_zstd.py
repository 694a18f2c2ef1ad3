"""zstd shards: the first and second epoch from a cold cache, compared with zstd alone.

    python benchmarks/bench_zstd.py --num-samples 200000 --shuffle-block-size 32768

::

    decompress, 1 thread       the same shards, into one reused buffer, nothing written
    decompress, all cores      the same, one shard per core
    + write, all cores         the same, written to files as a cache must do
    fetch, remote | local      streampack fetches all shards (copy and hashes) but reads none
    raw | cold | warm epoch    PackedDataLoader(num_workers=0), to native batches

The ways take turns, so that background noise affects them equally. Rates count raw tokens, by wall
time and by CPU time. Shuffling reads across all the shards of a block, so an epoch of only one
block cannot start until every shard is present; with several blocks, fetching overlaps reading.

Cost: about 40 s, and 2 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import zstandard

from streampack import Order, PackedDataLoader, PackedStreamingDataset, Packing, Stream
from streampack.gather.shard_prefetch import fetch_all
from streampack.streams import open_stream
from streampack.write import write_stream

PIECE_BYTES = 2**21


def write(folder: Path, num_samples: int, compression: str | None) -> int:
    """Write a stream of web-like lengths (median 400, mean about 900); return its tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(400), 1.27, num_samples).clip(1, 100_000).astype(np.int64)
    tokens = rng.integers(0, 50_000, int(lengths.sum()), dtype=np.int32)
    ends = np.cumsum(lengths)
    samples = (tokens[end - length : end] for end, length in zip(ends, lengths, strict=True))
    write_stream(samples, folder, tokens_dtype="int32", compression=compression)
    return len(tokens)


def decompress(folder: Path, num_threads: int, out: Path | None = None) -> None:
    """Decompress all shards of a folder into one buffer per thread and, with `out`, into files."""

    def work(paths: list[Path]) -> None:
        buffer, codec = memoryview(bytearray(PIECE_BYTES)), zstandard.ZstdDecompressor()
        for path in paths:
            target = Path(os.devnull) if out is None else out / path.name
            with path.open("rb") as file, target.open("wb", buffering=0) as raw:
                reader = codec.stream_reader(file, read_size=PIECE_BYTES)
                while filled := reader.readinto(buffer):
                    if out is not None:
                        raw.write(buffer[:filled])

    paths = sorted(folder.glob("*.zstd"))
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, [paths[i::num_threads] for i in range(num_threads)]))


class Bench:
    """Everything that is timed; each way gets an empty folder."""

    def __init__(self, root: Path, args: argparse.Namespace) -> None:
        self.args = args
        self.raw, self.packed = root / "raw", root / "zstd"
        write(self.raw, args.num_samples, None)
        self.num_tokens = write(self.packed, args.num_samples, "zstd")
        self.warm = root / "warm"

    def stream(self, way: str, folder: Path) -> Stream:
        """Return a stream with an empty cache in a folder."""
        if way == "local":
            shutil.copytree(self.packed, folder / "cache", copy_function=os.link)
            return Stream(local=str(folder / "cache"))
        return Stream(remote=str(self.packed), local=str(folder / "cache"))

    def fetch(self, way: str, folder: Path) -> Callable[[], None]:
        """Return a function that fetches all shards of a stream."""
        stream = open_stream(self.stream(way, folder), 0)
        return lambda: fetch_all(stream, np.arange(stream.num_shards))

    def epoch(self, stream: Stream) -> Callable[[], None]:
        """Return a function that iterates over a stream once."""
        dataset = PackedStreamingDataset(
            [stream],
            packing=Packing(max_seq_len=self.args.max_seq_len),
            order=Order(seed=17, shuffle_block_size=self.args.shuffle_block_size),
            batch_size=self.args.batch_size,
        )
        loader = PackedDataLoader(dataset)

        def run() -> None:
            for _ in loader:
                pass

        return run

    def ways(self) -> dict[str, Callable[[Path], Callable[[], None]]]:
        """Return all ways by name; called with an empty folder, each returns a function to time."""
        num_cores = len(os.sched_getaffinity(0))
        return {
            "decompress, 1 thread": lambda _: lambda: decompress(self.packed, 1),
            "decompress, all cores": lambda _: lambda: decompress(self.packed, num_cores),
            "+ write, all cores": lambda to: lambda: decompress(self.packed, num_cores, to),
            "fetch, remote": lambda to: self.fetch("remote", to),
            "fetch, local": lambda to: self.fetch("local", to),
            "cold epoch, remote": lambda to: self.epoch(self.stream("remote", to)),
            "cold epoch, local": lambda to: self.epoch(self.stream("local", to)),
            "warm epoch": lambda _: self.epoch(
                Stream(remote=str(self.packed), local=str(self.warm))
            ),
            "raw epoch": lambda _: self.epoch(Stream(local=str(self.raw))),
        }


def timed(make: Callable[[Path], Callable[[], None]], root: Path) -> tuple[float, float]:
    """Return wall and CPU seconds of one run in an empty folder."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        run = make(Path(folder))
        begin, begin_cpu = time.perf_counter(), time.process_time()
        run()
        return time.perf_counter() - begin, time.process_time() - begin_cpu


def main() -> None:
    """Print one JSON line a way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-samples", type=int, default=200_000)
    parser.add_argument("--max-seq-len", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--shuffle-block-size", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", default=None, help="where to write (default: the system's temporary folder)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        bench = Bench(Path(folder), args)
        runs: dict[str, list[tuple[float, float]]] = {way: [] for way in bench.ways()}
        for repeat in range(args.repeats + 1):
            for way, make in bench.ways().items():
                taken = timed(make, Path(folder))
                if repeat:  # the first run also fills caches and compiles
                    runs[way].append(taken)
    limit_s = statistics.median(wall for wall, _ in runs["decompress, 1 thread"])
    for way, taken_s in runs.items():
        wall_s, cpu_s = (statistics.median(column) for column in zip(*taken_s, strict=True))
        record = {
            "bench": "zstd",
            "way": way,
            "unit": "tokens/s",
            "median": round(bench.num_tokens / wall_s),
            "of_one_thread": round(limit_s / wall_s, 3),
            "tokens_per_cpu_s": round(bench.num_tokens / cpu_s),
            "runs_s": [round(wall, 3) for wall, _ in taken_s],
            "runs_cpu_s": [round(cpu, 3) for _, cpu in taken_s],
            "params": {**vars(args), "folder": None, "lengths": "lognormal(ln 400, 1.27)"},
            "python": platform.python_version(),
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
