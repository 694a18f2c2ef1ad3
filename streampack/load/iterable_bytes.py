"""What a worker of the buffered way holds in bytes, under the bound of `Buffers(worker_bytes=...)`.

::

    worker_bytes >= ahead * (tensors of a batch)             known before: the most that may be
                  + what the format of one adds              known before, or seen at each batch
                  + payloads of samples that wait            seen as they come
                    and of batches ahead

What is known before decides how many batches are read ahead. Nobody knows how large payloads are
before they are there, and the packers decide what waits: so where these do not fit, the iteration
ends with the least that would have worked.

Not counted: tokens that wait, labels and values for each (`worker_tokens` bounds those), the rows
that a batch is made from, the sample that is being sliced, what a source or a tokenizer holds
itself, and Python's own objects.

Cost: about 5 us a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from streampack.assemble import Batch, Formatter, has_name, is_light, to_native
from streampack.errors import ConfigError
from streampack.load.buffers import BYTES_PER_TOKEN
from streampack.load.iterable_plan import FlowPlan

__all__ = ["HeldBytes", "added_bytes", "batch_bytes", "format_bytes", "tensor_bytes"]

BYTES_PER_SEGMENT = 60  # its row of the plan, an edge, its entry in seq_lens
BYTES_PER_ROW = 4  # the edge of its padding
FORMAT_BYTES = 32  # a token slot: labels, masks and positions of their own; see the tests


def tensor_bytes(batch: Batch) -> int:
    """Return the bytes of a native batch's tensors."""
    return sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))


def batch_bytes(plan: FlowPlan) -> int:
    """Return the most bytes that the tensors of a native batch take, whatever lies in it."""
    packing, rows = plan.packing, plan.batch_size
    slots, per_row = rows * packing.max_seq_len, packing.max_seq_len
    if plan.bucketing is not None:
        slots = rows = plan.bucketing.most_slots
        per_row = 1
    segments = rows * min(per_row, packing.max_samples_per_pack or per_row)
    fields = {k: v for stream in plan.streams for k, v in stream.token_fields.items()}
    per_slot = BYTES_PER_TOKEN + sum(np.dtype(each).itemsize for each in fields.values())
    return slots * per_slot + segments * BYTES_PER_SEGMENT + (rows + 1) * BYTES_PER_ROW


def format_bytes(convert: Formatter, plan: FlowPlan) -> int | None:
    """Return the most bytes that a format adds to a native batch; None: nobody knows before."""
    if convert is to_native:
        return 0
    if not has_name(convert):
        return None
    size = plan.packing.max_seq_len
    return plan.batch_size * size * (FORMAT_BYTES + (0 if is_light(convert) else size))


def added_bytes(made: Any, batch: Batch) -> int:
    """Return the bytes of a converted batch's tensors that are not the native one's own."""
    own = {
        value.untyped_storage().data_ptr()
        for value in batch.values()
        if isinstance(value, torch.Tensor)
    }
    found: dict[int, int] = {}
    waiting = [made]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, torch.Tensor):
            if thing.layout is torch.strided:
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, Mapping):
            waiting.extend(thing.values())
        elif isinstance(thing, list | tuple):
            waiting.extend(thing)
    return sum(size for place, size in found.items() if place not in own)


class HeldBytes:
    """Counts what a worker holds, and refuses what is beyond the bound.

    Args:
        limit: The bound; None: there is none.
        fixed: What the tensors of all batches ahead, and a format, may take of it.
        ahead: Batches that may be finished and not delivered.
    """

    def __init__(self, limit: int | None = None, fixed: int = 0, ahead: int = 1) -> None:
        self._limit = limit
        self._fixed = fixed
        # Of the batches that may not be delivered yet: tensors and payloads, and payloads alone.
        self._batches: deque[tuple[int, int]] = deque(maxlen=max(ahead - 1, 0))
        self.high_water = 0
        """The most bytes of batches and payloads that there were at once."""

    def check(self, payloads: int, where: str) -> None:
        """Refuse payloads that wait beside the batches ahead and do not fit.

        Args:
            payloads: Bytes of all that wait, and of the batch that is being made.
            where: What messages call the sample that came last.

        Raises:
            ConfigError: Naming what would have worked so far.
        """
        if self._limit is None:
            return
        payloads += sum(each for _, each in self._batches)
        if self._fixed + payloads > self._limit:
            raise ConfigError(
                f"Buffers(worker_bytes={self._limit}) cannot hold the payloads up to {where}: "
                f"those that wait and those of {len(self._batches)} finished batches take "
                f"{payloads} bytes, beside {self._fixed} for the batches' tensors; set "
                f"worker_bytes to at least {self._fixed + payloads}, or lower prefetch_factor, "
                "batch_size or Packing.buffer_samples"
            )

    def finish(self, tensors: int, payloads: int, waiting: int) -> None:
        """Count a batch that is made.

        Args:
            tensors: Bytes of its tensors.
            payloads: Bytes of the payloads in it.
            waiting: Bytes of the payloads that wait still.
        """
        others = sum(each for each, _ in self._batches)
        self.high_water = max(self.high_water, others + tensors + payloads + waiting)
        self._batches.append((tensors + payloads, payloads))
