"""torchtune's PackedDataset over samples that are lists in memory.

Cost: about 150 ns per token.
"""

from __future__ import annotations

import os
import time

os.environ["TQDM_DISABLE"] = "1"

from torchtune.datasets import PackedDataset

from peers.task import Case, Measured, Task, samples

PACKAGES = ("torchtune", "torchao")


def pack(task: Task) -> Measured:
    """Pack everything, then ask for each pack once; samples are split across packs."""
    lists = [
        {"tokens": tokens, "labels": tokens}
        for tokens in (array.tolist() for array in samples(task))
    ]
    begin = time.perf_counter()
    packed = PackedDataset(lists, max_seq_len=task.max_seq_len, split_across_pack=True)
    for number in range(len(packed)):
        packed[number]
    seconds = time.perf_counter() - begin
    tokens = sum(len(sample["tokens"]) for sample in lists)
    return Measured(tokens=tokens, seconds=seconds, slots=len(packed) * task.max_seq_len)


CASES = {"PackedDataset": Case(kind="pack", work=pack)}
