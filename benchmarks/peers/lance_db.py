"""LanceDB's StreamingDataset with pack_sequences: elastic, resumable, one table, concat packing.

Cost: about 100 to 500 ns per token.
"""

from __future__ import annotations

import gc
from functools import lru_cache, partial

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.streaming import StreamingDataset
from torch.utils.data import DataLoader

from peers.task import Case, Measured, Task, drain, folder, samples

PACKAGES = ("lancedb",)
END, PADDING = 50_001, 50_002
READ_BATCH = 512  # rows a request; its default of 64 is slower here


@lru_cache
def _table(task: Task) -> lancedb.table.Table:
    path, _ = folder(task, f"{task.memory_samples}-lancedb")
    database = lancedb.connect(str(path))
    arrays = samples(task)
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])])
    column = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), np.concatenate(arrays))
    return database.create_table("samples", pa.table({"tokens": column}), mode="overwrite")


def load(task: Task, shuffle: bool) -> Measured:
    """Blocks of ids and document ids, stacked into batches in this process."""
    num_tokens = sum(len(array) + 1 for array in samples(task))
    dataset = StreamingDataset(
        _table(task),
        num_splits=1,
        shuffle=shuffle,
        columns=["tokens"],
        read_batch_size=READ_BATCH,
        pack_sequences=task.max_seq_len,
        eos_id=END,
        pad_id=PADDING,
        blocks_per_epoch=max(num_tokens // task.max_seq_len, 1),
    )
    loader = DataLoader(dataset, batch_size=task.batch_size)
    slots = task.batch_size * task.max_seq_len
    measured = drain(loader, lambda batch: batch["input_ids"].numel(), task.seconds, slots)
    del loader, dataset
    gc.collect()
    return measured


CASES = {
    "pack_sequences, stored order": Case(kind="load", work=partial(load, shuffle=False)),
    "pack_sequences, shuffled": Case(kind="load", work=partial(load, shuffle=True)),
}
