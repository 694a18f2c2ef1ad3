"""A ring buffer in shared memory, through which workers pass tokens without sending tensors.

Two workers, each two plans ahead::

    plan 0 1 2 3 4 5 6 ...      slot = number of the plan, modulo the slots
         | | | | | |
    slot 0 1 2 3 4 5 0 ...      worker: fills its slot, then sends a message of a few hundred bytes
                                main:   makes the batch, which frees the slot

A slot is rewritten only when the plan `num_slots` later is requested. A loader with n plans in
flight requests the next before it delivers a batch, so n + 1 slots are enough. If it requests k
plans at a time, and has n times k in flight, it needs (n + 1) times k.

Cost: a copy of 4 (or 2) bytes per token in the worker. Memory: the slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from streampack.plan.device_plan import DevicePlan
from streampack.runtime.batch_reader import BatchReader
from streampack.types import Int64Array

RingTask: TypeAlias = tuple[DevicePlan, int]
"""A plan, and the slot for its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RingResult:
    """A worker's message after filling a slot."""

    slot: int
    next_tokens: Int64Array
    """The sample's token after each segment, shape (n,)."""
    has_labels: bool


class Ring:
    """Slots in shared memory, each for the tokens of a batch; workers inherit the mapping.

    Raises:
        RuntimeError: From torch, if shared memory cannot hold them.
    """

    def __init__(self, num_slots: int, reader: BatchReader, slot_tokens: int) -> None:
        shape = num_slots, slot_tokens
        like = torch.from_numpy(np.empty(0, reader.gatherer.dtype))
        self.num_slots = num_slots
        self.tokens = _shared(shape, like.dtype)
        self.labels = _shared(shape, torch.int32) if reader.gatherer.has_labels else None

    @staticmethod
    def bytes_per_token(reader: BatchReader) -> int:
        return np.dtype(reader.gatherer.dtype).itemsize + 4 * reader.gatherer.has_labels


def _shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    shared: Tensor = torch.empty(shape, dtype=dtype).share_memory_()  # type: ignore[no-untyped-call]
    return shared


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RingReader:
    """Reads plans into a ring in workers, and makes their batches in the training process."""

    reader: BatchReader
    ring: Ring

    def tasks(self, plans: Iterable[DevicePlan]) -> Iterator[RingTask]:
        return zip(plans, cycle(range(self.ring.num_slots)), strict=False)

    def __call__(self, task: RingTask) -> RingResult:
        (plan, slot), labels = task, self.ring.labels
        shape = self.reader.shape(plan)  # together the tokens of a slot
        rows = self.reader.gatherer.gather(
            plan.packs,
            plan.num_rows,
            out=self.ring.tokens[slot].view(shape).numpy(),
            labels_out=None if labels is None else labels[slot].view(shape).numpy(),
        )
        return RingResult(
            slot=slot, next_tokens=rows.next_tokens, has_labels=rows.labels is not None
        )

    def finish(self, plan: DevicePlan, landed: RingResult) -> Any:
        """Make the batch of a slot, which is free afterwards; called in the training process."""
        shape, labels = self.reader.shape(plan), None
        slot = self.ring.tokens[landed.slot].view(shape)
        if landed.has_labels and self.ring.labels is not None:
            labels = self.ring.labels[landed.slot].view(shape).numpy()
        array, tokens = slot.numpy(), [slot]
        if self.reader.keeps_rows:
            array, tokens = self.reader.room(plan)
            # With numpy: torch would wake its threads, which costs more than the copy.
            np.copyto(array, slot.numpy())
            labels = None if labels is None else labels.copy()
        rows = self.reader.gatherer.rows_of(array, landed.next_tokens, labels)
        with one_thread() if self.reader.computes else nullcontext():
            return self.reader.finish(plan, rows, tokens)[0]


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: next to busy workers, waking others costs more than it gains."""
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        yield
        return
    try:  # an interrupt may arrive as soon as the number is set
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(num_threads)
