"""streampack itself, under the same rules as its peers.

Cost: see benchmarks/bench_loader.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

import streampack
from peers.task import Case, Measured, Task, drain, samples
from streampack import (
    IterableStream,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
)
from streampack.pack import fit_samples, make_packer

PACKAGES = ("streampack",)


def load(task: Task, num_workers: int = 0, batch_format: str = "native") -> Measured:
    """Batches of full packs, shuffled."""
    dataset = PackedStreamingDataset(
        [Stream(local=task.raw, repeat=20 if task.workload == "sft" else None)],
        packing=Packing(max_seq_len=task.max_seq_len),
        order=Order(seed=17),
        batch_size=task.batch_size,
        batch_format=batch_format,
    )
    loader = PackedDataLoader(dataset, num_workers=num_workers, persistent_workers=False)
    slots = task.batch_size * task.max_seq_len
    # All packs but the last batch are full, and stats() has the fill, so the loop need not check.
    measured = drain(loader, lambda _batch: slots, task.seconds, slots)
    fill = loader.stats()["fill"]
    return Measured(
        tokens=int(measured.tokens * fill), seconds=measured.seconds, slots=measured.slots
    )


def pack_in_memory(task: Task, *, as_lists: bool = False, prefetches: bool = True) -> Measured:
    """Whole batches of samples that are in memory: arrays, or lists of Python's ints.

    Without prefetching, batches are made in the loop itself, like the rows of peers that pack.
    """
    arrays = samples(task)
    dataset = PackedIterableDataset(
        [IterableStream([array.tolist() for array in arrays] if as_lists else arrays)],
        packing=Packing(max_seq_len=task.max_seq_len),
        batch_size=task.batch_size,
    )
    begin = time.perf_counter()
    loader = PackedDataLoader(dataset, prefetch_threads=int(prefetches))
    slots = sum(batch["tokens"].numel() for batch in loader)
    seconds = time.perf_counter() - begin
    return Measured(tokens=sum(map(len, arrays)), seconds=seconds, slots=slots)


def plan(task: Task) -> Measured:
    """Which sample goes into which pack, by best-fit decreasing over all."""
    lengths = np.array([len(sample) for sample in samples(task)])
    packing = Packing(max_seq_len=task.max_seq_len)
    zeros = np.zeros_like(lengths)
    begin = time.perf_counter()
    rows = np.stack([zeros, zeros, np.arange(len(lengths)), lengths], axis=1)
    packer = make_packer(packing)
    segments = fit_samples(rows, packing.max_seq_len, packing.overflow, ["samples"])
    num_packs = len(packer.add(segments)) + len(packer.flush())
    seconds = time.perf_counter() - begin
    return Measured(
        tokens=int(lengths.sum()), seconds=seconds, slots=num_packs * packing.max_seq_len
    )


def _cases() -> dict[str, Case]:
    made = {
        "best_fit_decreasing": Case(kind="plan", work=plan),
        "in_memory": Case(kind="pack", work=pack_in_memory),
        "in_memory_in_loop": Case(kind="pack", work=partial(pack_in_memory, prefetches=False)),
        "in_memory_lists": Case(kind="pack", work=partial(pack_in_memory, as_lists=True)),
        "threads": Case(kind="load", work=load),
        "workers_2": Case(kind="load", work=partial(load, num_workers=2), workers=2),
    }
    if hasattr(streampack, "expand"):
        compact: Callable[..., Measured] = partial(load, batch_format="compact")
        made["threads_compact"] = Case(kind="load", work=compact)
        made["workers_2_compact"] = Case(
            kind="load", work=partial(compact, num_workers=2), workers=2
        )
    return made


CASES = _cases()
