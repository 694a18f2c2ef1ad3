"""litData: documents, and fixed blocks of tokens (TokensLoader) that ignore documents.

Its chunks are written once, from the same samples.

Cost: about a second per million tokens, once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import workloads
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

from peers.task import Case, Measured, Task, drain, folder

PACKAGES = ("litdata",)
READ_TOGETHER = 32


def _documents(_part: int, workload: str, num_samples: int) -> Iterator[Any]:
    for sample in workloads.tokens(workload, num_samples):
        yield torch.from_numpy(sample.copy())


def _write(task: Task, blocks: bool) -> str:
    path, exists = folder(task, "litdata-blocks" if blocks else "litdata-documents")
    if not exists:
        partial_path = path.with_name(f"{path.name}.partial")
        shutil.rmtree(partial_path, ignore_errors=True)
        optimize(
            fn=partial(_documents, workload=task.workload, num_samples=task.num_samples),
            inputs=[0],
            output_dir=str(partial_path),
            chunk_bytes="64MB",
            num_workers=1,
            item_loader=TokensLoader() if blocks else None,
            verbose=False,
        )
        partial_path.rename(path)  # an interrupted run leaves nothing that looks complete
    return str(path)


def _dataset(task: Task, blocks: bool) -> StreamingDataset:
    loader = TokensLoader(block_size=task.max_seq_len) if blocks else None
    return StreamingDataset(_write(task, blocks), item_loader=loader)


def read(task: Task, blocks: bool) -> Measured:
    """Documents or blocks, one by one, in this process."""
    return drain(_dataset(task, blocks), len, task.seconds)


def load(task: Task, blocks: bool, num_workers: int) -> Measured:
    """Blocks in batches, or documents by 32 as one tensor, through its own loader."""
    collate: Callable[[list[torch.Tensor]], torch.Tensor] = torch.stack if blocks else torch.cat
    loader = StreamingDataLoader(
        _dataset(task, blocks),
        batch_size=task.batch_size if blocks else READ_TOGETHER,
        num_workers=num_workers,
        collate_fn=collate,
    )
    return drain(loader, torch.numel, task.seconds)


def _cases() -> dict[str, Case]:
    made = {}
    for what in ("documents", "blocks"):
        blocks = what == "blocks"
        made[what] = Case(kind="read", work=partial(read, blocks=blocks))
        made[f"{what}, 2 workers"] = Case(
            kind="load", work=partial(load, blocks=blocks, num_workers=2), workers=2
        )
    return made


CASES = _cases()
