"""Read planned device batches and convert them to the dataset's format, in any process.

::

    plan --gather--> rows of int32, in the cache --finish--> native --convert--> batch
                     in a worker: in shared memory           'compact': the rows as they are

Several batches of a plan are read together, which saves calls and memory. Workers write tokens
into a ring buffer instead of sending tensors. Two workers, each two plans ahead::

    plan 0 1 2 3 4 5 6 ...      slot = number of the plan, modulo the slots
         | | | | | |
    slot 0 1 2 3 4 5 0 ...      worker: fills its slot, then sends a message of a few hundred bytes
                                main:   makes the batch, which frees the slot

A slot is rewritten only when the plan `num_slots` later is requested. A loader that requests k
plans at a time, and has n times k in flight, needs (n + 1) times k slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streampack.batch.batch import make_batches, make_compacts
from streampack.batch.buffer_pool import BufferPool, Scratch
from streampack.batch.compact import to_compact
from streampack.batch.formats.registry import Formatter, is_cheap, to_native
from streampack.batch.kernels import ROW
from streampack.batch.layout import WEIGHTS
from streampack.config import Packing
from streampack.gather.gather import Gatherer, Rows
from streampack.plan.device_plan import DevicePlan
from streampack.types import STREAM, Int64Array, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchReader:
    """Turns plans into batches; self-contained, so that any thread or worker can have one."""

    gatherer: Gatherer
    packing: Packing
    convert: Formatter = to_native
    stream_weights: Tensor | None = None
    """The `loss_weight` of each stream, shape (num_streams,), or None if all are 1."""
    blocks: BufferPool = field(default_factory=BufferPool)
    """Memory of batches."""
    scratch: Scratch = field(default_factory=Scratch)
    """Memory of tokens until a batch is made of them."""
    label_scratch: Scratch = field(default_factory=Scratch)
    """Memory of labels, in streams that have them."""

    @property
    def keeps_rows(self) -> bool:
        """Whether a batch uses the rows themselves, not copies."""
        return self.convert is to_compact

    @property
    def computes(self) -> bool:
        """Whether converting uses torch operations; native and compact batches need only copies."""
        return self.convert is not to_native and not self.keeps_rows

    @property
    def is_cheap(self) -> bool:
        """Whether converting is cheap, so that workers send tokens only."""
        return is_cheap(self.convert)

    def __call__(self, plan: DevicePlan) -> Any:
        return self.read(plan)[0]

    def read(self, plan: DevicePlan) -> list[Any]:
        """Read the batches of a plan into one block, in the dataset's `batch_format`."""
        gatherer = self.gatherer
        shape = num_rows, row_tokens = self.shape(plan)
        if self.keeps_rows:
            room, tokens = self.room(plan)
            rows = gatherer.gather(plan.packs, num_rows, out=room)
            return self.finish(plan, rows, tokens)
        # Flat, so that batches of other rows can use the same memory.
        flat = (num_rows * row_tokens,)
        room = self.scratch.take(gatherer.dtype, flat).reshape(shape)
        labels = None
        if gatherer.has_labels:
            labels = self.label_scratch.take(np.int32, flat).reshape(shape)
        rows = gatherer.gather(plan.packs, num_rows, out=room, labels_out=labels)
        batches = self.finish(plan, rows)
        self.scratch.give_back(room)
        if labels is not None:
            self.label_scratch.give_back(labels)
        return batches

    def shape(self, plan: DevicePlan) -> tuple[int, int]:
        """Return the rows of a plan's batches together, and the tokens of each, or of its slice."""
        return plan.num_rows * plan.num_batches, self.gatherer.row_tokens * plan.slots_per_pack

    def room(self, plan: DevicePlan) -> tuple[IntArray, list[Tensor]]:
        """Return memory for the rows of a plan if its batches keep them, and a tensor per batch."""
        kind = (self.gatherer.dtype, self.shape(plan))
        [array], parts = self.blocks.take(kind, num_parts=plan.num_batches)
        return array, [tokens for [tokens] in parts]

    def finish(
        self, plan: DevicePlan, rows: Rows, tokens: Sequence[Tensor] | None = None
    ) -> list[Any]:
        """Make the batches of a plan from its rows.

        If batches keep the rows, `tokens` are the tensors that these consist of, one per batch.
        """
        steps = [(plan.epoch, position) for position in plan.positions]
        positions = self.packing.positions
        keeps_rows = self.keeps_rows
        if keeps_rows:
            made = make_compacts(rows, plan.packs, steps=steps, positions=positions, tokens=tokens)
        else:
            blocks = self.blocks
            made = make_batches(rows, plan.packs, steps=steps, positions=positions, blocks=blocks)
        if self.stream_weights is not None:
            for batch in made:
                batch[WEIGHTS] = self.stream_weights[batch["segments"][:, ROW + 1 + STREAM]]
        return made if keeps_rows else list(map(self.convert, made))


class RingReader:
    """Reads plans into slots of shared memory in workers, and makes their batches in the loop.

    Each slot is for the tokens of a plan; workers inherit the mapping.

    Raises:
        RuntimeError: From torch, if shared memory cannot hold them.
    """

    def __init__(self, reader: BatchReader, num_slots: int, slot_tokens: int) -> None:
        shape = num_slots, slot_tokens
        like = torch.from_numpy(np.empty(0, reader.gatherer.dtype))
        self._reader = reader
        self._num_slots = num_slots
        self._tokens = _shared(shape, like.dtype)
        self._labels = _shared(shape, torch.int32) if reader.gatherer.has_labels else None

    @staticmethod
    def bytes_per_token(reader: BatchReader) -> int:
        """Return the bytes of a slot for each of its tokens."""
        return np.dtype(reader.gatherer.dtype).itemsize + 4 * reader.gatherer.has_labels

    def tasks(self, plans: Iterable[DevicePlan]) -> Iterator[tuple[DevicePlan, int]]:
        """Return each plan with the slot for its tokens."""
        return zip(plans, cycle(range(self._num_slots)), strict=False)

    def __call__(self, task: tuple[DevicePlan, int]) -> tuple[int, Int64Array, bool]:
        """Fill a slot; return it, the sample's token after each segment, and whether it has labels.

        Called in a worker.
        """
        (plan, slot), labels = task, self._labels
        shape = self._reader.shape(plan)  # together the tokens of a slot
        rows = self._reader.gatherer.gather(
            plan.packs,
            plan.num_rows,
            out=self._tokens[slot].view(shape).numpy(),
            labels_out=None if labels is None else labels[slot].view(shape).numpy(),
        )
        return slot, rows.next_tokens, rows.labels is not None

    def finish(self, plan: DevicePlan, landed: tuple[int, Int64Array, bool]) -> Any:
        """Make the batch of a slot, which is free afterwards; called in the training process."""
        (slot, next_tokens, has_labels), shape, labels = landed, self._reader.shape(plan), None
        row = self._tokens[slot].view(shape)
        if has_labels and self._labels is not None:
            labels = self._labels[slot].view(shape).numpy()
        array, tokens = row.numpy(), [row]
        if self._reader.keeps_rows:
            array, tokens = self._reader.room(plan)
            # With numpy: torch would wake its threads, which costs more than the copy.
            np.copyto(array, row.numpy())
            labels = None if labels is None else labels.copy()
        rows = self._reader.gatherer.rows_of(array, next_tokens, labels)
        with one_thread() if self._reader.computes else nullcontext():
            return self._reader.finish(plan, rows, tokens)[0]


def _shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    shared: Tensor = torch.empty(shape, dtype=dtype).share_memory_()  # type: ignore[no-untyped-call]
    return shared


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
