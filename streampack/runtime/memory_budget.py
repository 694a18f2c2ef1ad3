"""Limit the number of prefetched batches to the bounds of `Buffers`.

::

    rank_tokens    >=  packers' buffers + workers * (ahead * batch)      num_workers > 0
    worker_tokens  >=                      ahead * batch
    worker_tokens  >=  packers' buffers +  ahead * batch                 num_workers = 0
    worker_bytes   >=  bytes added by a custom format + ahead * batch in bytes

A bound that cannot hold the packers' buffers and one batch per worker is refused, and the message
names the least that works. So are batches of workers that do not fit in shared memory.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from streampack.config import Buffers
from streampack.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
LESS_AHEAD = "lower batch_size or prefetch_factor"  # the way out of several messages
PACKERS = "the packers' buffers"  # their name in messages
BYTES_PER_TOKEN = 28  # tokens, labels and input_pos in int64, document_ids in int32


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFootprint:
    """Memory of a rank, in tokens."""

    packer_tokens: int
    """Hard bound of all packers' buffers in the process that plans."""
    batch_tokens: int
    """Token slots of one device batch."""
    num_workers: int = 0
    """Worker processes; 0: the process that plans also reads."""
    plans_in_workers: bool = False
    """Whether each worker plans for itself, as under torch's own DataLoader."""
    batch_bytes: int | None = None
    """Bytes of a finished batch, or None to count `BYTES_PER_TOKEN` for each of its slots."""
    format_bytes: int = 0
    """Bytes that its format adds to the batch that is delivered."""


def _fit(
    name: str,
    limit: int | None,
    fixed: int,
    each: int,
    wanted: int,
    *,
    what: str = PACKERS,
    more: str = "",
) -> int:
    """Return how many batches of `each` fit in addition to `fixed`, up to `wanted`."""
    if limit is None:
        return wanted
    if limit < fixed + each:
        # These are bytes of batches only: samples waiting in packers do not count.
        is_bytes = name == "worker_bytes"
        way_out = "batch_size" if is_bytes else "Packing.buffer_tokens, batch_size or num_lanes"
        raise ConfigError(
            f"Buffers({name}={limit}) cannot hold {what} ({fixed}) and one batch "
            f"({each}); set {name} to at least {fixed + each}{more}, or lower {way_out}"
        )
    return min(wanted, (limit - fixed) // each)


def max_prefetch(buffers: Buffers, footprint: MemoryFootprint, wanted: int) -> int:
    """Return how many batches each worker may hold, at most `wanted`."""
    workers, plans = max(footprint.num_workers, 1), footprint.plans_in_workers
    batch, packers = footprint.batch_tokens, footprint.packer_tokens
    in_reader = packers if plans or not footprint.num_workers else 0
    ahead = _fit("worker_tokens", buffers.worker_tokens, in_reader, batch, wanted)
    in_bytes, added = footprint.batch_bytes or batch * BYTES_PER_TOKEN, footprint.format_bytes
    what = "what the format adds" if added else PACKERS
    ahead = _fit("worker_bytes", buffers.worker_bytes, added, in_bytes, ahead, what=what)
    # A dataset does not know yet how many workers its loader will have.
    each = batch + packers
    more = "" if footprint.num_workers else f" (and up to {each} more for each of num_workers)"
    fixed = packers * (workers if plans else 1)
    return _fit("rank_tokens", buffers.rank_tokens, fixed, workers * batch, ahead, more=more)


class SharedMemory:
    """The memory in torch's folder for shared memory, of which `num_ranks` get equal parts."""

    def __init__(self, num_ranks: int, folder: Path = SHARED_MEMORY) -> None:
        self._num_ranks = num_ranks
        self._folder = folder
        self.free: int | None = None
        """Free bytes, or None: torch will then use another location or raise its own error."""
        with suppress(OSError):
            self.free = shutil.disk_usage(folder).free

    def has(self, num_bytes: int) -> bool:
        return self.free is None or self._num_ranks * num_bytes <= self.free

    def check(self, num_bytes: int) -> None:
        """Refuse workers if their batches, of `num_bytes` in each rank, do not fit."""
        if not self.has(num_bytes):
            raise ConfigError(
                f"{self._folder} has {self.free} bytes free, but workers hand batches over in it "
                f"and may need {self._num_ranks * num_bytes}; make it larger (docker: --shm-size), "
                f"{LESS_AHEAD}, or set num_workers=0, which needs none"
            )
