"""A ring of shared memory, through which workers hand tokens over without a tensor being sent.

Two workers, two plans ahead of each::

    plan 0 1 2 3 4 5 6 ...      slot = number of the plan, modulo the slots
         | | | | | |
    slot 0 1 2 3 4 5 0 ...      worker: fills its slot, then says so in a few hundred bytes
                                here:   makes the batch of it, and the slot is free

torch hands a tensor over by making a file for it, sending its descriptor through a socket, and
mapping it: most of a millisecond, and fresh memory on both sides. Here the memory stays mapped, and
what it holds is in the cache of the core that made it.

A slot is written again only when the plan that is `num_slots` later was asked for. A loader that
has n plans out at once asks for the next before it hands a batch on, so n + 1 slots are enough;
where it asks for k plans at a time, and has n times k out, (n + 1) times k.

Cost: a copy of 4 (or 2) bytes a token in the worker. Memory: the slots, for as long as the loader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streampack.load.handover import one_thread
from streampack.load.reader import BatchReader
from streampack.plan import DevicePlan
from streampack.read import Rows
from streampack.types import Int64Array

__all__ = ["Landed", "Ring", "RingReader", "Slotted"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slotted:
    """A plan, and where its tokens go."""

    plan: DevicePlan
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Landed:
    """What a worker says once a slot is filled."""

    slot: int
    next_tokens: Int64Array
    """The sample's token after each segment, shape (n,)."""
    has_labels: bool


class Ring:
    """Slots in shared memory, one for the rows of a batch; sent to workers as it is.

    Args:
        num_slots: Batches that may be on their way at once.
        reader: Whose batches they are.
        num_rows: Rows of a batch.

    Raises:
        RuntimeError: If shared memory cannot hold them; torch's.
    """

    def __init__(self, num_slots: int, reader: BatchReader, num_rows: int) -> None:
        shape = (num_slots, num_rows, reader.packing.max_seq_len)
        like = torch.from_numpy(np.empty(0, reader.gatherer.dtype))
        self.num_slots = num_slots
        self.tokens = _shared(shape, like.dtype)
        self.labels = _shared(shape, torch.int32) if reader.gatherer.has_labels else None

    @staticmethod
    def bytes_per_token(reader: BatchReader) -> int:
        """Return what a token takes in a slot."""
        return np.dtype(reader.gatherer.dtype).itemsize + 4 * reader.gatherer.has_labels


def _shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    shared: Tensor = torch.empty(shape, dtype=dtype).share_memory_()  # type: ignore[no-untyped-call]
    return shared


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RingReader:
    """Reads plans into a ring in workers, and makes their batches in the training process."""

    reader: BatchReader
    ring: Ring

    def tasks(self, plans: Iterable[DevicePlan]) -> Iterator[Slotted]:
        """Give each plan its slot."""
        for number, plan in enumerate(plans):
            yield Slotted(plan=plan, slot=number % self.ring.num_slots)

    def __call__(self, slotted: Slotted) -> Landed:
        """Fill a slot; in a worker."""
        plan, slot, labels = slotted.plan, slotted.slot, self.ring.labels
        rows = self.reader.gatherer.gather(
            plan.packs,
            plan.num_rows,
            out=self.ring.tokens[slot].numpy(),
            labels_out=None if labels is None else labels[slot].numpy(),
        )
        return Landed(slot=slot, next_tokens=rows.next_tokens, has_labels=rows.labels is not None)

    def finish(self, plan: DevicePlan, landed: Landed) -> Any:
        """Make the batch of a filled slot, which is free afterwards; in the training process."""
        tokens, labels = self.ring.tokens[landed.slot], None
        if landed.has_labels and self.ring.labels is not None:
            labels = self.ring.labels[landed.slot].numpy()
        array = tokens.numpy()
        if self.reader.keeps_rows:
            slot = array
            array, tokens = self.reader.room(plan.num_rows)
            # By numpy: torch would wake its threads for it, which costs more than the copy.
            np.copyto(array, slot)
            labels = None if labels is None else labels.copy()
        rows = Rows(
            tokens=array,
            next_tokens=landed.next_tokens,
            labels=labels,
            multiple=self.reader.packing.pad_to_multiple or 1,
        )
        with one_thread() if self.reader.computes else nullcontext():
            return self.reader.finish(plan, rows, [tokens])[0]
