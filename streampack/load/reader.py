"""From a planned device batch to the batch that is delivered, in whatever process reads.

::

    plan --gather--> rows of int32, in the cache --finish--> native --convert--> batch
                     in a worker: in shared memory           'compact': the rows as they are

Cost: see `read` and `assemble`. Memory: one batch's rows besides the batches that are alive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from streampack.assemble import (
    LIGHT,
    Blocks,
    Formatter,
    Scratch,
    make_batch,
    make_compact,
    to_compact,
    to_native,
)
from streampack.config import Packing
from streampack.plan import DeviceBatch
from streampack.read import Gatherer, Rows
from streampack.types import IntArray

__all__ = ["BatchReader"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchReader:
    """Turns plans into batches; needs nothing else, so any thread or worker can have one."""

    gatherer: Gatherer
    packing: Packing
    convert: Formatter = to_native
    blocks: Blocks = field(default_factory=Blocks)
    """Where batches lie."""
    scratch: Scratch = field(default_factory=Scratch)
    """Where tokens lie until a batch is made of them."""
    label_scratch: Scratch = field(default_factory=Scratch)
    """Where labels do, in streams that have them."""

    @property
    def keeps_rows(self) -> bool:
        """Whether a batch is made of the rows themselves, not of copies."""
        return self.convert is to_compact

    @property
    def computes(self) -> bool:
        """Whether torch computes something for a batch; native and compact ones are copied only."""
        return self.convert not in (to_native, to_compact)

    @property
    def is_light(self) -> bool:
        """Whether batches cost little beside their tokens: those are all that workers hand over."""
        return self.convert in LIGHT

    def __call__(self, plan: DeviceBatch) -> Any:
        """Read one planned device batch, in the dataset's `batch_format`."""
        gatherer = self.gatherer
        if self.keeps_rows:
            room, tokens = self.room(plan.num_rows)
            return self.finish(plan, gatherer.gather(plan.packs, plan.num_rows, out=room), tokens)
        shape = self._shape(plan.num_rows)
        room = self.scratch.take(gatherer.dtype, shape)
        labels = self.label_scratch.take(np.int32, shape) if gatherer.has_labels else None
        rows = gatherer.gather(plan.packs, plan.num_rows, out=room, labels_out=labels)
        batch = self.finish(plan, rows)
        self.scratch.give_back(room)
        if labels is not None:
            self.label_scratch.give_back(labels)
        return batch

    def _shape(self, num_rows: int) -> tuple[int, int]:
        return num_rows, self.packing.max_seq_len

    def room(self, num_rows: int) -> tuple[IntArray, Tensor]:
        """Return memory for a batch that is made of its rows, shape (num_rows, max_seq_len)."""
        [array], [tensor] = self.blocks.take((self.gatherer.dtype, self._shape(num_rows)))
        return array, tensor

    def finish(self, plan: DeviceBatch, rows: Rows, tokens: Tensor | None = None) -> Any:
        """Make the batch of a plan whose rows were read, `tokens` being theirs if it keeps them."""
        where: dict[str, Any] = {
            "epoch": plan.epoch,
            "position": plan.position,
            "positions": self.packing.positions,
        }
        if self.keeps_rows:
            return make_compact(rows, plan.packs, tokens=tokens, **where)
        return self.convert(make_batch(rows, plan.packs, blocks=self.blocks, **where))
