"""How many batches may be read ahead, under the bounds of `Buffers`.

::

    rank_tokens    >=  packers' buffers + workers * (ahead * batch)      num_workers > 0
    worker_tokens  >=                      ahead * batch
    worker_tokens  >=  packers' buffers +  ahead * batch                 num_workers = 0
    worker_bytes   >=  what one's format adds + ahead * batch in bytes

The packers' buffers decide the sequence, so no bound may shrink them: a bound that cannot hold them
and one batch a worker is refused, and the least that works is named.
"""

from __future__ import annotations

from dataclasses import dataclass

from streampack.config import Buffers
from streampack.errors import ConfigError

__all__ = ["BYTES_PER_TOKEN", "Footprint", "batches_ahead"]

PACKERS = "the packers' buffers"  # as messages call them
BYTES_PER_TOKEN = 28  # tokens, labels and input_pos in int64, document_ids in int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a rank holds, in tokens."""

    packer_tokens: int
    """Hard bound of all packers' buffers in the process that plans."""
    batch_tokens: int
    """Token slots of one device batch."""
    num_workers: int = 0
    """Processes that read; 0: the one that plans."""
    plans_in_workers: bool = False
    """Whether each worker plans for itself, as under torch's own DataLoader."""
    batch_bytes: int | None = None
    """Bytes of a finished batch; None: `BYTES_PER_TOKEN` for each of its slots."""
    format_bytes: int = 0
    """What its format adds to the batch that is delivered."""

    @property
    def worker_packers(self) -> int:
        """Tokens of packers' buffers in each reading process."""
        return self.packer_tokens if self.plans_in_workers or not self.num_workers else 0

    @property
    def rank_packers(self) -> int:
        """Tokens of packers' buffers in all of the rank's processes."""
        copies = max(self.num_workers, 1) if self.plans_in_workers else 1
        return self.packer_tokens * copies


def _fit(
    name: str, limit: int | None, fixed: int, each: int, wanted: int, what: str = PACKERS
) -> int:
    """Return how many batches of `each` fit beside what is `fixed`, up to `wanted`."""
    if limit is None:
        return wanted
    if limit < fixed + each:
        # Bytes are those of batches: what waits in packers does not count there.
        is_bytes = name == "worker_bytes"
        way_out = "batch_size" if is_bytes else "Packing.buffer_tokens, batch_size or num_lanes"
        raise ConfigError(
            f"Buffers({name}={limit}) cannot hold {what} ({fixed}) and one batch "
            f"({each}); set {name} to at least {fixed + each}, or lower {way_out}"
        )
    return min(wanted, (limit - fixed) // each)


def batches_ahead(buffers: Buffers, footprint: Footprint, wanted: int) -> int:
    """Return how many batches each worker may hold, at most `wanted`.

    Raises:
        ConfigError: If a bound cannot hold even one; the least that works is named.
    """
    workers = max(footprint.num_workers, 1)
    batch = footprint.batch_tokens
    ahead = _fit("worker_tokens", buffers.worker_tokens, footprint.worker_packers, batch, wanted)
    in_bytes, added = footprint.batch_bytes or batch * BYTES_PER_TOKEN, footprint.format_bytes
    what = "what the format adds" if added else PACKERS
    ahead = _fit("worker_bytes", buffers.worker_bytes, added, in_bytes, ahead, what)
    return _fit("rank_tokens", buffers.rank_tokens, footprint.rank_packers, workers * batch, ahead)
