"""Batches on a GPU: how fast a loader delivers native and compact batches to its memory.

::

    python benchmarks/bench_device.py

    device/native/W     W workers, pinned memory, batch.to("cuda", non_blocking=True)
    device/compact/W    W workers, pinned memory, expand(batch, "cuda") makes the rest there

Rates count token slots per second of wall time, from the first batch to the arrival of the last.
The GPU does nothing else. The ways take turns; the first round is a warm-up and does not count.

Cost: a minute. Without a GPU, every line is marked as skipped.
"""

from __future__ import annotations

import time
from typing import Any

import record
import torch
import workloads

from streampack import PackedDataLoader, PackedStreamingDataset, Packing, Stream, expand

MAX_SEQ_LEN, BATCH_SIZE = 8192, 8
WAYS = [(kind, workers) for kind in ("native", "compact") for workers in (0, 2, 4)]


def arrived(batch: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a native batch on the GPU; its copies may still be in progress."""
    if kind == "compact":
        return expand(batch, "cuda")
    return {
        key: value.to("cuda", non_blocking=True) if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
    }


def measure(stream: Stream, kind: str, num_workers: int, num_batches: int) -> tuple[float, float]:
    """Return the token slots per second, and the bytes copied per slot."""
    dataset = PackedStreamingDataset(
        streams=[stream],
        packing=Packing(max_seq_len=MAX_SEQ_LEN),
        batch_size=BATCH_SIZE,
        batch_format=kind,
    )
    loader = PackedDataLoader(dataset, num_workers=num_workers, pin_memory=True)
    slots = copied = 0
    start = 0.0
    for number, batch in enumerate(loader):
        arrived(batch, kind)
        if number == 0:
            torch.cuda.synchronize()
            start = time.perf_counter()
            continue
        slots += batch["tokens"].numel()
        tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
        copied += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if number == num_batches:
            break
    torch.cuda.synchronize()
    return slots / (time.perf_counter() - start), copied / slots


def main() -> None:
    """Print a line for each way."""
    parser = record.options(__doc__, runs=3, num_samples=100_000)
    parser.add_argument("--batches", type=int, default=1000)
    args = parser.parse_args()
    params = {name: value for name, value in vars(args).items() if name not in ("out", "data")}
    if not torch.cuda.is_available():
        for kind, workers in WAYS:
            record.emit(record.skipped(f"device/{kind}/{workers}", "no GPU", params), args.out)
        return
    folder = workloads.write("web", args.data, num_samples=args.num_samples)
    stream = Stream(local=str(folder), repeat=10)
    rates: dict[tuple[str, int], list[float]] = {way: [] for way in WAYS}
    slot_bytes = {}
    for _ in range(args.runs + 1):
        for way in WAYS:
            rate, slot_bytes[way] = measure(stream, *way, args.batches)
            rates[way].append(rate)
    params["gpu"] = torch.cuda.get_device_name()
    for way in WAYS:
        name = f"device/{way[0]}/{way[1]}"
        fields = {"clock": "wall time", "bytes_per_slot": round(slot_bytes[way], 2)}
        record.emit(record.line(name, "tokens/s", rates[way][1:], params, **fields), args.out)


if __name__ == "__main__":
    main()
