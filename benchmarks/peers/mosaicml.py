"""MosaicML's StreamingDataset: reading alone, and with a packing collator behind it.

The collator reimplements LLM-Foundry's BinPackCollator. It pads the samples to the longest as the
base collator does, strips the padding, puts each sample, longest first, into the first bin with
room, keeps surplus bins for the next batch, and pads the rows to max_seq_len.

Cost: a file lock and an open file per sample.
"""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import workloads
from streaming import StreamingDataset
from torch.utils.data import DataLoader

from peers.task import Case, Measured, Task, drain, folder

PACKAGES = ("mosaicml-streaming",)
IGNORED = -100
READ_TOGETHER = 32  # samples of a batch that is not packed
FILLED = 0.95  # of the slots of a batch, by the samples that the collator gets
Example = dict[str, torch.Tensor]


class BinPackCollator:
    """Packs the samples of a batch into rows, first fit with the longest first.

    Args:
        num_rows: Rows of a batch.
        max_seq_len: Tokens of a row.
    """

    def __init__(self, num_rows: int, max_seq_len: int) -> None:
        self._num_rows = num_rows
        self._max_seq_len = max_seq_len
        self._left: list[tuple[int, Example]] = []

    def __call__(self, items: list[dict[str, Any]]) -> Example:
        """Return ids, labels, mask and sequence ids, each of shape (num_rows, max_seq_len)."""
        examples = self._trimmed(self._padded(items))
        bins = self._left
        examples.sort(key=lambda example: len(example["input_ids"]), reverse=True)
        for number, example in enumerate(examples):
            self._put(bins, example, left=len(examples) - number)
        bins.sort(key=lambda entry: entry[0], reverse=True)
        self._left = bins[self._num_rows :]
        rows = [self._row(example) for _, example in bins[: self._num_rows]]
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    def _padded(self, items: list[dict[str, Any]]) -> Example:
        tokens = [torch.from_numpy(item["tokens"][: self._max_seq_len].copy()) for item in items]
        sizes = torch.tensor([len(each) for each in tokens])
        ids = torch.nn.utils.rnn.pad_sequence([each.long() for each in tokens], batch_first=True)
        mask = (torch.arange(ids.shape[1]) < sizes[:, None]).long()
        labels = torch.where(mask == 1, ids, IGNORED)
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}

    def _trimmed(self, batch: Example) -> list[Example]:
        examples = []
        for row, mask in enumerate(batch["attention_mask"]):
            kept = mask == 1
            example = {key: values[row][kept] for key, values in batch.items()}
            examples.append(example | {"sequence_id": torch.zeros_like(example["input_ids"])})
        return examples

    def _put(self, bins: list[tuple[int, Example]], example: Example, left: int) -> None:
        size = len(example["input_ids"])
        if left > max(self._num_rows - len(bins), 0):  # otherwise each one needs a separate row
            for place, (used, packed) in enumerate(bins):
                if used + size <= self._max_seq_len:
                    bins.pop(place)
                    bins.append((used + size, self._joined(packed, example)))
                    return
        bins.append((size, example))

    @staticmethod
    def _joined(packed: Example, example: Example) -> Example:
        number = packed["sequence_id"].max() + 1
        more = example | {"sequence_id": example["sequence_id"] + number}
        return {key: torch.cat([packed[key], more[key]]) for key in packed}

    def _row(self, example: Example) -> Example:
        padding = {"labels": IGNORED, "sequence_id": -1}
        empty = self._max_seq_len - len(example["input_ids"])
        return {
            key: torch.nn.functional.pad(values, (0, empty), value=padding.get(key, 0))
            for key, values in example.items()
        }


@lru_cache
def dataset_of(task: Task, use: str) -> StreamingDataset:
    """Return a new dataset for each use.

    A dataset that was iterated here cannot be iterated in a forked worker, and a process can only
    have one dataset per folder; a link to the folder counts as another folder.
    """
    link, exists = folder(task, f"mosaicml-{use}")
    if not exists:
        link.symlink_to(Path(task.raw).resolve())
    return StreamingDataset(local=str(link), batch_size=READ_TOGETHER, shuffle=False)


def read(task: Task) -> Measured:
    """Iterate samples in this process; nothing is packed, nothing collated."""
    dataset = dataset_of(task, "here")
    try:
        return drain(dataset, lambda item: len(item["tokens"]), task.seconds)
    finally:
        dataset._iterator.exit()  # its threads would keep reading


def concatenated(items: list[dict[str, Any]]) -> torch.Tensor:
    """Return the tokens of some samples as one tensor, the minimum that a loader can deliver."""
    return torch.from_numpy(np.concatenate([item["tokens"] for item in items]))


def read_with_workers(task: Task, num_workers: int) -> Measured:
    """Samples by 32 through worker processes, as one tensor of tokens; nothing is packed."""
    loader = DataLoader(
        dataset_of(task, "read-by-workers"),
        batch_size=READ_TOGETHER,
        num_workers=num_workers,
        collate_fn=concatenated,
    )
    return drain(loader, len, task.seconds)


def load_packed(task: Task, num_workers: int = 0) -> Measured:
    """Batches of packed rows: the collator gets as many samples as should fill them."""
    lengths = workloads.lengths(task.workload, task.num_samples).clip(max=task.max_seq_len)
    ratio = task.max_seq_len / lengths.mean() * FILLED
    dataset = dataset_of(task, "packed-by-workers" if num_workers else "here")
    loader = DataLoader(
        dataset,
        batch_size=int(task.batch_size * ratio),
        num_workers=num_workers,
        collate_fn=BinPackCollator(task.batch_size, task.max_seq_len),
    )
    slots = task.batch_size * task.max_seq_len
    try:
        return drain(loader, lambda batch: int(batch["attention_mask"].sum()), task.seconds, slots)
    finally:
        if not num_workers:
            dataset._iterator.exit()


CASES = {
    "read": Case(kind="read", work=read),
    "read, 2 workers": Case(kind="read", work=partial(read_with_workers, num_workers=2), workers=2),
    "packing collator": Case(kind="load", work=load_packed),
    "packing collator, 2 workers": Case(
        kind="load", work=partial(load_packed, num_workers=2), workers=2
    ),
}
