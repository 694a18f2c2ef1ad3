"""Byte budget of an online worker: the bound of `Buffers(worker_bytes=...)`.

::

    worker_bytes >= ahead * (tensors of a batch)             known in advance: an upper bound
                  + bytes that the format adds to one        known in advance, or measured per batch
                  + payloads of buffered samples             measured as they arrive
                    and of prefetched batches

Cost: about 5 us a batch.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from streampack.batch.batch import Batch
from streampack.batch.formats.registry import Formatter, is_builtin, is_cheap, to_native
from streampack.config import Buffers
from streampack.errors import ConfigError
from streampack.mix.apportion import apportion
from streampack.online.plan import FlowPlan
from streampack.runtime.memory_budget import BYTES_PER_TOKEN, LESS_AHEAD, MemoryFootprint
from streampack.runtime.provenance import tensors_in

WINDOW_TOKENS = 1 << 20  # most tokens in a window, unless so many packs have more:
WINDOW_PACKS = 16
FEWEST_PACKS = 2  # a window of one pack keeps its order
PLACE_BYTES = 24  # of a payload: row, first token and one past the last, in int64
BYTES_PER_SEGMENT = 60  # its segment row, an edge, its entry in seq_lens
BYTES_PER_ROW = 4  # the edge of its padding
FORMAT_BYTES = 32  # per token slot: the format's own labels, masks and positions; see the tests


def tensor_bytes(batch: Batch) -> int:
    """Return the bytes of a native batch's tensors."""
    return sum([value.nbytes for value in batch.values() if isinstance(value, torch.Tensor)])


def batch_bytes(plan: FlowPlan) -> int:
    """Return the most bytes that the tensors of a native batch can take."""
    slots = plan.batch_tokens
    per_row = plan.pack_tokens if plan.bucketing is None else 1  # a row may have one token
    rows = slots // per_row
    segments = rows * min(per_row, plan.packing.max_samples_per_pack or per_row)
    fields = {k: v for stream in plan.streams for k, v in stream.token_fields.items()}
    per_slot = BYTES_PER_TOKEN + sum(np.dtype(each).itemsize for each in fields.values())
    return slots * per_slot + segments * BYTES_PER_SEGMENT + (rows + 1) * BYTES_PER_ROW


def num_bytes(thing: Any) -> int:
    """Return the bytes of a payload.

    Arrays and tensors count their values, images (such as PIL's) a byte per pixel and band, and
    containers their contents. Anything else counts `sys.getsizeof`, which may be too little.

    >>> num_bytes(np.zeros((2, 3), np.float32)), num_bytes([b"ab", b"c"]) == 2 * sys.getsizeof(b"")
    (24, False)
    """
    nbytes = getattr(thing, "nbytes", None)
    if isinstance(nbytes, int | np.integer):
        return int(nbytes)
    if isinstance(thing, Mapping):
        return sum(map(num_bytes, thing.values()))
    if isinstance(thing, list | tuple):
        return sum(map(num_bytes, thing))
    if hasattr(thing, "getbands") and hasattr(thing, "size"):
        width, height = thing.size
        return int(width * height * len(thing.getbands()))
    return sys.getsizeof(thing)


def payload_bytes(payloads: Mapping[str, list[tuple[Any, int, int]]]) -> int:
    """Return the bytes of payloads and of their spans in a batch."""
    things = [thing for each in payloads.values() for thing, _, _ in each]
    return num_bytes(things) + PLACE_BYTES * len(things)


def footprint_of(plan: FlowPlan, num_workers: int, format_bytes: int = 0) -> MemoryFootprint:
    """Return a rank's memory use with `num_workers` workers, without windows of samples."""
    packer_tokens = plan.packing.buffer_limit
    if plan.bucketing is not None:
        packer_tokens = plan.packing.sample_limit * plan.packing.row_tokens
    return MemoryFootprint(
        packer_tokens=plan.num_packers * packer_tokens,
        batch_tokens=plan.batch_tokens,
        num_workers=num_workers,
        plans_in_workers=num_workers > 0,
        batch_bytes=batch_bytes(plan),
        format_bytes=format_bytes,
    )


def window_tokens(plan: FlowPlan, buffers: Buffers, num_workers: int) -> list[int]:
    """Return the most tokens in a window of each packer of each of `num_workers` workers.

    Windows fit next to the packers' buffers and one batch, and leave half of that room to
    prefetched batches, unless packs are shuffled. `max_prefetch` refuses buffers that do not hold
    the least that packers need.
    """
    row_tokens, limits = plan.packing.row_tokens, [buffers.worker_tokens]
    if buffers.rank_tokens is not None:
        limits.append(buffers.rank_tokens // max(num_workers, 1))
    footprint = footprint_of(plan, num_workers)
    used = footprint.packer_tokens + footprint.batch_tokens
    rooms = [limit - used for limit in limits if limit is not None]
    if plan.pack_shuffle:
        asked = [plan.pack_shuffle * row_tokens, *rooms]
        least = max(min(plan.pack_shuffle, FEWEST_PACKS), plan.num_packers)
    else:
        window = max(WINDOW_TOKENS, WINDOW_PACKS * row_tokens)
        asked = [plan.num_packers * window, *(room // 2 for room in rooms)]
        least = plan.num_packers
    # Whole packs, one for each packer and others: if packs are shuffled, streams share these.
    others = max(min(asked), least * row_tokens) // row_tokens - plan.num_packers
    shares = [1] * plan.num_packers
    if plan.pack_shuffle and plan.num_packers > 1:
        shares = [amount or 0 for amount in plan.amounts.amounts]
    return [row_tokens * (1 + own) for own in apportion(others, shares)]


def format_bytes(convert: Formatter, plan: FlowPlan) -> int | None:
    """Return the most bytes that a format adds to a native batch, or None if not known."""
    if convert is to_native:
        return 0
    if not is_builtin(convert):
        return None
    size = plan.packing.row_tokens
    return plan.batch_tokens * (FORMAT_BYTES + (0 if is_cheap(convert) else size))


def added_bytes(converted: Any, batch: Batch) -> int:
    """Return the bytes of a converted batch's tensors that do not share native storage."""
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(batch)}
    storages = [t.untyped_storage() for t in tensors_in(converted) if t.layout is torch.strided]
    found = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for place, size in found.items() if place not in own)


class HeldMemory:
    """Counts the tokens and bytes that a worker keeps, and enforces the bound of bytes.

    `fixed` bytes are reserved for tensors; `ahead` is the most batches not yet delivered.
    """

    def __init__(self, limit: int | None, fixed: int, ahead: int) -> None:
        self._limit = limit
        self._fixed = fixed
        # For each batch that may be undelivered: tensors plus payloads, and payloads alone.
        self._batches: deque[tuple[int, int]] = deque(maxlen=min(max(ahead - 1, 0), sys.maxsize))
        self.payloads = 0
        """Bytes of the payloads of samples."""
        self._tokens = 0
        self.high_water_bytes = 0
        """Peak bytes of batches and payloads."""
        self.high_water_tokens = 0
        self.longest_wait = 0
        """Most windows that a sample waited for after its own."""

    def count(self, tokens: int) -> None:
        """Count tokens that packers and packs hold, or no longer: not those that wait for one."""
        self._tokens += tokens
        self.high_water_tokens = max(self.high_water_tokens, self._tokens)

    def ends_window(self) -> bool:
        """Whether the payloads that wait are so many that they are packed first."""
        return self._limit is not None and 2 * self.payloads >= self._limit

    def check(self, where: str) -> None:
        """Refuse payloads, up to sample `where`, that do not fit next to the finished batches."""
        if self._limit is None:
            return
        payloads = self.payloads + sum(each for _, each in self._batches)
        if self._fixed + payloads > self._limit:
            raise ConfigError(
                f"Buffers(worker_bytes={self._limit}) cannot hold the payloads up to {where}: "
                f"those that wait and those of {len(self._batches)} finished batches take "
                f"{payloads} bytes, and the batches' tensors take {self._fixed}; set "
                f"worker_bytes to at least {self._fixed + payloads}, or {LESS_AHEAD}, or lower "
                "Packing.buffer_samples or Order.pack_shuffle"
            )

    def finish(self, tensors: int, payloads: int) -> None:
        """Count the bytes of a finished batch, whose payloads were counted before."""
        others = sum(map(itemgetter(0), self._batches))
        own = others + tensors + payloads + self.payloads
        self.high_water_bytes = max(self.high_water_bytes, own)
        self._batches.append((tensors + payloads, payloads))
