"""Read planned device batches and convert them to the dataset's format, in any process.

::

    plan --gather--> rows of int32, in the cache --finish--> native --convert--> batch
                     in a worker: in shared memory           'compact': the rows as they are

Several batches of a plan are read together, which saves calls and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
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
from streampack.types import STREAM, IntArray


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
