"""The task of an adapter, and its result.

::

    Task --> work --> Measured --> tokens a second, fill

Kinds of work: `read` samples or blocks one by one, `load` batches as a training loop gets them,
`pack` samples that are in memory into rows, `plan` which sample goes where and no tokens,
`texts`: batches from files of texts or of lists of tokens, `resume` them on half the ranks.

Cost: reading the clock once per item.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import workloads

__all__ = ["ROWS", "TEXTS", "Case", "Measured", "Task", "drain", "folder", "samples"]

Kind = Literal["read", "load", "pack", "plan", "texts", "resume"]
TEXTS = ("jsonl", "parquet")
ROWS = (*TEXTS, "lists")
"""The workloads of kinds "texts" and "resume"."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One measurement, the same for all peers."""

    workload: str
    max_seq_len: int
    batch_size: int
    num_samples: int
    """Samples of the workload on disk."""
    memory_samples: int
    """How many of them are in memory, for peers that pack slowly."""
    seconds: float
    """How long to read a stream."""
    raw: str
    """The MDS stream, raw."""
    data: str
    """Where a peer keeps its own files."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of one measurement."""

    tokens: int
    """Real tokens delivered, padding not counted."""
    seconds: float
    slots: int | None = None
    """Token slots of the rows that contained them, if there were rows."""
    cpu_s: float | None = None
    """Processor seconds of the process and all that it started, where they are measured."""
    more: dict[str, Any] = field(default_factory=dict)
    """What else a line has."""

    def answer(self) -> dict[str, Any]:
        """Return the result as values for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to use a peer."""

    kind: Kind
    work: Callable[[Task], Measured]
    workers: int = 0
    workloads: tuple[str, ...] = ("web", "sft")


def drain(
    items: Iterable[Any], count: Callable[[Any], int], seconds: float, slots: int | None = None
) -> Measured:
    """Count tokens from the first item on, until time or items run out.

    Args:
        items: Batches, samples or blocks.
        count: Real tokens of an item.
        seconds: How long.
        slots: Token slots of an item, if it has rows.
    """
    iterator = iter(items)
    next(iterator)
    begin = last = time.perf_counter()
    tokens = items_seen = 0
    for item in iterator:
        tokens += count(item)
        items_seen += 1
        last = time.perf_counter()
        if last - begin > seconds:
            break
    if hasattr(iterator, "close"):
        iterator.close()
    return Measured(
        tokens=tokens,
        seconds=max(last - begin, 1e-9),
        slots=None if slots is None else items_seen * slots,
    )


@lru_cache(maxsize=1)
def _in_memory(workload: str, num_samples: int) -> list[np.ndarray]:
    return list(workloads.tokens(workload, num_samples))


def samples(task: Task, limit: int | None = None) -> list[np.ndarray]:
    """Return the first `memory_samples` samples as arrays, cut to `limit` tokens."""
    made = _in_memory(task.workload, task.memory_samples)
    return made if limit is None else [sample[:limit] for sample in made]


def folder(task: Task, name: str) -> tuple[Path, bool]:
    """Return a peer's folder for this workload, and whether it already exists."""
    path = Path(task.data) / f"{task.workload}-{task.num_samples}-{name}"
    return path, path.exists()
