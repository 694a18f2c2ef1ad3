"""The limits of the machine: memory copy, fresh memory, decompression, page cache reads.

::

    limits/copy/warm     into memory written before               limits/zstd/one_shot  new bytes
    limits/copy/fresh    into new memory from the kernel          limits/zstd/reused    one buffer
    limits/write/fresh   the same, without reading                limits/read/...       page cache

On one core, in GB/s: bytes copied, written, or decompressed (raw bytes). The shards are those that
the bench of the loader reads. All measurements take turns.

Cost: about 30 s, and as much again if the shards have to be written first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import record
import workloads
import zstandard

COPY_BYTES = 1 << 28
SMALL_BYTES = 1 << 20


def timed(work: Callable[[], int]) -> float:
    """Return the GB/s of a function that returns the number of bytes it handled."""
    begin = time.perf_counter()
    num_bytes = work()
    return num_bytes / (time.perf_counter() - begin) / 1e9


def write_fresh(num_bytes: int) -> int:
    """Write to memory that the kernel must first provide."""
    # Blocks of this size come from the kernel and return to it, so every page is new.
    np.empty(num_bytes, np.uint8).fill(1)
    return num_bytes


def copies(num_bytes: int) -> dict[str, Callable[[], int]]:
    """Return the copy functions for so many bytes."""
    source = np.ones(num_bytes, np.uint8)
    warm = np.zeros(num_bytes, np.uint8)
    small = np.zeros(SMALL_BYTES, np.uint8)
    wide = np.zeros(num_bytes // 4, np.int64)

    def copy_warm() -> int:
        np.copyto(warm, source)
        return num_bytes

    def copy_fresh() -> int:
        np.copyto(np.empty(num_bytes, np.uint8), source)
        return num_bytes

    def copy_in_cache() -> int:
        for _ in range(num_bytes // SMALL_BYTES):
            np.copyto(small, source[:SMALL_BYTES])
        return num_bytes

    def widen() -> int:
        np.copyto(wide, source.view(np.int32))
        return num_bytes

    return {
        "copy/warm": copy_warm,
        "copy/fresh": copy_fresh,
        "copy/in_cache": copy_in_cache,
        "copy/int32_to_int64": widen,
        "write/fresh": partial(write_fresh, num_bytes),
    }


def decompressions(path: Path) -> dict[str, Callable[[], int]]:
    """Return ways to decompress the shards of a zstd stream, which are read in advance."""
    shards = json.loads((path / "index.json").read_text())["shards"]
    packed = [(path / shard["zip_data"]["basename"]).read_bytes() for shard in shards]
    sizes = [shard["raw_data"]["bytes"] for shard in shards]
    buffer = bytearray(max(sizes))

    def one_shot() -> int:
        zstd = zstandard.ZstdDecompressor()
        for data, size in zip(packed, sizes, strict=True):
            zstd.decompress(data, max_output_size=size)
        return sum(sizes)

    def reused() -> int:
        zstd = zstandard.ZstdDecompressor()
        for data, size in zip(packed, sizes, strict=True):
            view, first = memoryview(buffer)[:size], 0
            reader = zstd.stream_reader(data)
            while got := reader.readinto(view[first:]):
                first += got
        return sum(sizes)

    return {"zstd/one_shot": one_shot, "zstd/reused": reused}


def reads(path: Path) -> dict[str, Callable[[], int]]:
    """Return ways to read the shards of a raw stream; the first round fills the page cache."""
    files = sorted(path.glob("shard.*.mds"))
    buffer = bytearray(max(file.stat().st_size for file in files))

    def into_buffer() -> int:
        total = 0
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while got := opened.readinto(buffer):
                    total += got
        return total

    def mapped() -> int:
        total = 0
        for file in files:
            data = np.memmap(file, np.uint8, mode="r")
            np.copyto(np.frombuffer(buffer, np.uint8)[: len(data)], data)
            total += len(data)
        return total

    return {"read/reused_buffer": into_buffer, "read/mapped_copy": mapped}


def main() -> None:
    """Print one line a limit."""
    parser = record.options(__doc__, runs=3)
    parser.add_argument("--megabytes", type=int, default=COPY_BYTES >> 20, help="to copy")
    args = parser.parse_args()
    works = [("memory", name, work) for name, work in copies(args.megabytes << 20).items()]
    for workload in ("web", "sft"):
        raw = workloads.write(workload, args.data, None, args.num_samples)
        packed = workloads.write(workload, args.data, "zstd", args.num_samples)
        made = decompressions(packed) | reads(raw)
        works += [(workload, name, work) for name, work in made.items()]
    runs: list[list[float]] = [[] for _ in works]
    for turn in range(args.runs + 1):
        for number, (_, _, work) in enumerate(works):
            rate = timed(work)
            if turn:
                runs[number].append(rate)
    for (workload, name, _), rates in zip(works, runs, strict=True):
        params = {"workload": workload, "megabytes": args.megabytes}
        record.emit(record.line(f"limits/{name}", "GB/s", rates, params), args.out)


if __name__ == "__main__":
    main()
