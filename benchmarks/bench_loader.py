"""End to end: batches in the training process from local MDS shards, every way of loading.

::

    python benchmarks/bench_loader.py --workload web --seconds 1

    loader/dataset      the dataset itself, no thread          loader/zstd/first    cold cache
    loader/threads      PackedDataLoader(num_workers=0)        loader/zstd/second   the epoch after
    loader/workers_1    PackedDataLoader(num_workers=1)        loader/zstd/at_hand  as first, where
    loader/workers_2    PackedDataLoader(num_workers=2)                             memory at hand
                                                               loader/zstd/block    cold, one block
                                                               loader/limit/...     what memory and
                                                                                    zstd allow
    loader/torch_workers_2    torch's DataLoader(batch_size=None, num_workers=2)

Native batches, and compact ones where this version has them. Rates count token slots from the first
batch on; zstd's first epoch counts all of it, from local zstd shards of which none is unpacked yet.
Its shuffle blocks are smaller than the workload, as they are in any large one, so that shards are
unpacked while others are read; in one block (loader/zstd/block) the first batch needs them all.
Unpacked files need fresh memory, which the host of a virtual machine may have to find first;
loader/zstd/at_hand therefore measures right after the same amount was written and freed.
Processor time includes the workers and spans the whole iteration. The ways take turns; the first
round is a warm-up and does not count. Rates and limits are medians over the rounds.

Cost: about two minutes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import record
import torch
import workloads
from bench_limits import decompressions, timed, write_fresh
from torch.utils.data import DataLoader

import streampack
from streampack import Order, PackedDataLoader, PackedStreamingDataset, Packing, Stream

GRID = {"web": 8192, "sft": 4096}
FRESH_BYTES, WRITES = 1 << 26, 5  # more than malloc keeps, so every page is new
EPOCH_TOKENS = 150_000_000  # a short workload repeats until its epoch has this many
AT_HAND = 3  # times the bytes of all shards; not all memory that is freed stays available
ZSTD_BLOCK = 32_768  # samples that are shuffled together when reading zstd shards
EARLY = 50  # batches between two measurements of the workers' memory


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of loading."""

    name: str
    num_workers: int | None = 0
    """None: no loader."""
    is_torchs: bool = False
    """Whether the loader is torch's own."""
    batch_format: str = "native"
    expands: bool = False
    """Whether compact batches are made whole in the training process."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What one iteration measured."""

    rate: float
    """Token slots a second."""
    first_s: float
    """Seconds to the first batch."""
    cpu_s: float
    """Processor seconds for 10**9 tokens."""
    batch_bytes: float
    """Bytes of tensors for a token slot."""
    worker_mib: tuple[float, float] | None
    """Anonymous memory of the largest worker, early and at the end."""


def ways() -> list[Way]:
    """Return all ways that this version has."""
    native = [Way(name="dataset", num_workers=None), Way(name="threads")]
    native += [Way(name=f"workers_{count}", num_workers=count) for count in (1, 2)]
    native += [Way(name="torch_workers_2", num_workers=2, is_torchs=True)]
    if not hasattr(streampack, "expand"):
        return native
    compact = partial(Way, batch_format="compact")
    return [
        *native,
        compact(name="threads"),
        compact(name="threads_expand", expands=True),
        compact(name="workers_1", num_workers=1),
        compact(name="workers_2", num_workers=2),
    ]


def tensor_bytes(batch: dict[str, Any]) -> int:
    """Return the bytes of all tensors of a batch."""
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def num_slots(batch: dict[str, Any]) -> int:
    """Return the token slots of a batch."""
    slots: int = batch["tokens"].numel()
    return slots


def cpu_seconds() -> float:
    """Return the processor time of this process and of the children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def largest_worker() -> float:
    """Return the anonymous memory of this process's largest child in MiB; 0 without children."""
    sizes = [0.0]
    for child in multiprocessing.active_children():
        for row in Path(f"/proc/{child.pid}/status").read_text().splitlines():
            if row.startswith("RssAnon:"):
                sizes.append(int(row.split()[1]) / 1024)
    return max(sizes)


def make_dataset(
    stream: Stream, way: Way, max_seq_len: int, batch_size: int, block_size: int | None = None
) -> Any:
    """Return the dataset of a way."""
    return PackedStreamingDataset(
        [stream],
        packing=Packing(max_seq_len=max_seq_len),
        order=Order(seed=17, shuffle_block_size=block_size),
        batch_size=batch_size,
        batch_format=way.batch_format,
    )


def batches_of(dataset: Any, way: Way) -> Callable[[], Iterator[dict[str, Any]]]:
    """Return a function that begins an epoch."""
    source = dataset
    if way.is_torchs:
        source = DataLoader(dataset, batch_size=None, num_workers=way.num_workers or 0)
    elif way.num_workers is not None:
        source = PackedDataLoader(dataset, num_workers=way.num_workers, persistent_workers=False)
    if not way.expands:
        return lambda: iter(source)
    return lambda: (streampack.expand(batch, "cpu") for batch in source)


def iterate(begin: Callable[[], Iterator[dict[str, Any]]], seconds: float, whole: bool) -> Epoch:
    """Iterate for so many seconds, or to the epoch's end where `whole`; measure it."""
    cpu, start = cpu_seconds(), time.perf_counter()
    batches = begin()
    batch = next(batches)
    first = time.perf_counter()
    delivered, counted, early, late, last = num_slots(batch), 0, 0.0, 0.0, first
    batch_bytes = tensor_bytes(batch) / delivered
    for number, batch in enumerate(batches):
        counted += num_slots(batch)
        last = time.perf_counter()
        if number and number % EARLY == 0:
            late = largest_worker()
            early = early or late
        if last - first > seconds and not whole:
            break
    del batch, batches
    gc.collect()  # ends the workers, so that their time is known
    spent = last - (start if whole else first)
    return Epoch(
        rate=(counted + whole * delivered) / max(spent, 1e-9),
        first_s=first - start,
        cpu_s=1e9 * (cpu_seconds() - cpu) / (counted + delivered),
        batch_bytes=batch_bytes,
        worker_mib=(early, late) if early else None,
    )


class Workload:
    """One workload, its streams and all measurements of it."""

    def __init__(self, name: str, args: Any) -> None:
        self.name = name
        self.max_seq_len = args.max_seq_len or GRID[name]
        self._batch_size, self._seconds, self._data = args.batch_size, args.seconds, args.data
        self._raw = workloads.write(name, args.data, None, args.num_samples)
        self._packed = workloads.write(name, args.data, "zstd", args.num_samples)
        self._raw_bytes = sum(file.stat().st_size for file in self._raw.glob("*.mds"))
        num_tokens = int(workloads.lengths(name, args.num_samples).sum())
        self._ways = [way for way in ways() if way.name in ("threads", *args.way)]
        self._repeat = max(EPOCH_TOKENS // num_tokens, 1) if args.num_samples is None else 1
        self.epochs: dict[tuple[str, str], list[Epoch]] = {}
        self.limits: dict[str, list[float]] = {}

    @property
    def params(self) -> dict[str, Any]:
        """What all lines of this workload say."""
        return {
            "workload": self.name,
            "max_seq_len": self.max_seq_len,
            "batch_size": self._batch_size,
            "repeat": self._repeat,
            "seconds": self._seconds,
        }

    def measure(self) -> None:
        """Measure everything once."""
        for way in self._ways:
            stream = Stream(local=str(self._raw), repeat=self._repeat)
            dataset = make_dataset(stream, way, self.max_seq_len, self._batch_size)
            self._note(way.name, way, iterate(batches_of(dataset, way), self._seconds, False))
        self._measure_zstd(Way(name="threads"))
        self._measure_limits()

    def _measure_zstd(self, way: Way) -> None:
        ways = {"block": None, "first": ZSTD_BLOCK, "at_hand": ZSTD_BLOCK}
        for name, block_size in ways.items():
            local = Path(tempfile.mkdtemp(dir=self._data))
            # Linked, not copied: a copy would use up the free memory that unpacking needs.
            shutil.copytree(self._packed, local, copy_function=os.link, dirs_exist_ok=True)
            stream = Stream(local=str(local))
            dataset = make_dataset(stream, way, self.max_seq_len, self._batch_size, block_size)
            begin = batches_of(dataset, way)
            if name == "at_hand":
                write_fresh(AT_HAND * self._raw_bytes)
            self._note(f"zstd/{name}", way, iterate(begin, self._seconds, True))
            if name == "first":
                os.sync()  # no epoch waits for the disk because of the one before
                self._note("zstd/second", way, iterate(begin, self._seconds, False))
            shutil.rmtree(local)

    def _measure_limits(self) -> None:
        # The fastest: a virtual machine's host may have to find the memory first.
        write = max(timed(partial(write_fresh, FRESH_BYTES)) for _ in range(WRITES))
        unpack = timed(decompressions(self._packed)["zstd/reused"])
        self.limits.setdefault("write", []).append(write)
        self.limits.setdefault("zstd", []).append(unpack)

    def _note(self, name: str, way: Way, epoch: Epoch) -> None:
        self.epochs.setdefault((name, way.batch_format), []).append(epoch)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of everything but the first round."""
        middle = {
            key: statistics.median(epoch.rate for epoch in epochs[1:])
            for key, epochs in self.epochs.items()
        }
        write, unpack = (statistics.median(self.limits[name][1:]) for name in ("write", "zstd"))
        token_bytes = self._raw_bytes / int(workloads.lengths(self.name, self._samples()).sum())
        unpack /= token_bytes
        for (name, batch_format), epochs in self.epochs.items():
            rate = middle[name, batch_format]
            fields: dict[str, Any] = {
                "first_batch_s": round(statistics.median(e.first_s for e in epochs[1:]), 4),
                "cpu_s_per_billion_tokens": round(
                    statistics.median(e.cpu_s for e in epochs[1:]), 3
                ),
                "batch_bytes_per_token": round(epochs[0].batch_bytes, 2),
                "of_threads": round(rate / middle["threads", "native"], 3),
                "of_fresh_write": round(rate * epochs[0].batch_bytes / write / 1e9, 3),
            }
            if name.startswith("zstd"):
                fields["of_decompression"] = round(rate / unpack / 1e9, 3)
            if epochs[-1].worker_mib:
                early, late = epochs[-1].worker_mib
                fields["worker_mib"] = {"early": round(early, 1), "late": round(late, 1)}
            params = self.params | {"batch_format": batch_format}
            runs = [epoch.rate for epoch in epochs[1:]]
            yield record.line(f"loader/{name}", "tokens/s", runs, params, **fields)
        for name, runs in self.limits.items():
            yield record.line(f"loader/limit/{name}", "GB/s", runs[1:], self.params)

    def _samples(self) -> int:
        return int(self._raw.name.split("-")[1])


def main() -> None:
    """Print one line for each workload and way."""
    parser = record.options(__doc__, runs=5)
    parser.add_argument("--workload", nargs="+", default=list(GRID), choices=list(GRID))
    parser.add_argument("--max-seq-len", type=int, help="by default one for each workload")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument(
        "--way", nargs="+", default=[way.name for way in ways()], help="threads, and which more"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    args = parser.parse_args()
    chosen = [Workload(name, args) for name in args.workload]
    for _ in range(args.runs + 1):
        for workload in chosen:
            workload.measure()
    if not hasattr(streampack, "expand"):
        why = f"streampack {streampack.__version__} has no batch_format='compact'"
        record.emit(record.skipped("loader/compact", why), args.out)
    for workload in chosen:
        for result in workload.lines():
            record.emit(result, args.out)


if __name__ == "__main__":
    main()
