"""axolotl's MultipackBatchSampler, alone and with numpy's concatenation of each bin behind it.

Cost: about 5 µs per sample.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from axolotl.utils.samplers import MultipackBatchSampler
from torch.utils.data import SequentialSampler

from peers.task import Case, Measured, Task, samples

PACKAGES = ("axolotl",)
BIN_SIZE = 200  # samples in a bin at most, its default


def pack(task: Task, collates: bool) -> Measured:
    """Choose the samples of each bin; where it collates, make rows of ids and positions, too."""
    arrays = samples(task, task.max_seq_len)
    lengths = np.array([len(array) for array in arrays])
    begin = time.perf_counter()
    sampler = MultipackBatchSampler(
        SequentialSampler(arrays),
        batch_size=task.batch_size,
        batch_max_len=task.max_seq_len,
        lengths=lengths,
        bin_size=BIN_SIZE,
        drop_last=False,
        num_processes=1,
    )
    num_bins = tokens = 0
    for batch in sampler:
        for chosen in batch:
            num_bins += 1
            tokens += int(lengths[chosen].sum())
            if collates:
                np.concatenate([arrays[number] for number in chosen])
                np.concatenate([np.arange(lengths[number]) for number in chosen])
    seconds = time.perf_counter() - begin
    return Measured(tokens=tokens, seconds=seconds, slots=num_bins * task.max_seq_len)


CASES = {
    "multipack": Case(kind="plan", work=partial(pack, collates=False)),
    "multipack and collate": Case(kind="pack", work=partial(pack, collates=True)),
}
