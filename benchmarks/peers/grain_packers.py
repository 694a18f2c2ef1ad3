"""Grain's packers over samples in memory: first fit, best fit, and concatenate and split.

Cost: about 30 µs per sample.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import grain
from grain.experimental import (
    BestFitPackIterDataset,
    ConcatThenSplitIterDataset,
    FirstFitPackIterDataset,
)

from peers.task import Case, Measured, Task, samples

PACKAGES = ("grain",)
NUM_BINS = 64


def pack(task: Task, packer: Any, splits: bool = False) -> Measured:
    """Pack all samples into rows of tokens, segment ids and positions."""
    arrays = samples(task, None if splits else task.max_seq_len)
    source = grain.MapDataset.source([{"tokens": array} for array in arrays])
    dataset = packer(
        source.to_iter_dataset(grain.ReadOptions(num_threads=0)),
        length_struct={"tokens": task.max_seq_len},
    )
    begin = time.perf_counter()
    num_rows = sum(1 for _ in dataset)
    seconds = time.perf_counter() - begin
    return Measured(
        tokens=sum(map(len, arrays)), seconds=seconds, slots=num_rows * task.max_seq_len
    )


_first = partial(FirstFitPackIterDataset, num_packing_bins=NUM_BINS)
_best = partial(BestFitPackIterDataset, num_packing_bins=NUM_BINS)

CASES = {
    "first fit": Case(kind="pack", work=partial(pack, packer=_first)),
    "best fit": Case(kind="pack", work=partial(pack, packer=_best)),
    "concat and split": Case(
        kind="pack", work=partial(pack, packer=ConcatThenSplitIterDataset, splits=True)
    ),
}
