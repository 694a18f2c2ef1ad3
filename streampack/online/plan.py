"""The options that decide the batches of an online dataset.

::

    streams, packing, mixing, ... --FlowPlan--> a packer, and a worker's slice of each source

Every worker has the same plan; its `WorkerSlice` selects its part of the sources.

Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from streampack.config import Bucketing, Mixing, Packing
from streampack.online.epoch_quota import EpochQuotas
from streampack.online.even_steps import Steps
from streampack.online.source_slice import SourceSlice, WorkerSlice
from streampack.pack import make_packer
from streampack.pack.length_buckets import LengthBucketPacker
from streampack.pack.packer import Packer
from streampack.streams import IterableStream


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowPlan:
    """The options that decide the batches of every worker."""

    streams: tuple[IterableStream, ...]
    names: tuple[str, ...]
    packing: Packing
    mixing: Mixing
    amounts: EpochQuotas
    batch_size: int
    seed: int
    shuffle_block_size: int | None
    """Samples shuffled together in indexed sources; None: stored order."""
    bucketing: Bucketing | None = None
    """Length bucketing, whose batches each count as one pack; None: packing."""
    steps: Steps | None = None
    """Where a loop ends, on all ranks; None: with this rank's epoch."""

    def packer(self) -> Packer:
        """Return an empty packer."""
        if self.bucketing is not None:
            return LengthBucketPacker(self.bucketing)
        return make_packer(self.packing)

    def parts(self, place: WorkerSlice) -> list[SourceSlice]:
        """Return a worker's slice of each source."""
        size = self.shuffle_block_size
        return [
            SourceSlice(
                stream.source,
                name,
                place,
                sharded=stream.sharded,
                replay=stream.replay,
                shuffle=None if size is None else (self.seed, number, size),
            )
            for number, (stream, name) in enumerate(zip(self.streams, self.names, strict=True))
        ]
