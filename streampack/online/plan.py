"""The options that decide the batches of an online dataset.

::

    streams, packing, mixing, ... --FlowPlan--> a packer, and a worker's slice of each source

Every worker has the same plan; its `WorkerSlice` selects its part of the sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from streampack.config import Bucketing, Mixing, Packing
from streampack.online.epoch_quota import EpochQuotas
from streampack.online.source_slice import SourceSlice, WorkerSlice
from streampack.streams import IterableStream

Steps: TypeAlias = int | Literal["equal"]
"""Steps of a loop: as many on every rank, or until the first rank has delivered its epoch."""


@dataclass(frozen=True, kw_only=True, eq=False)
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
    """Samples shuffled together in indexed sources, or None for stored order."""
    bucketing: Bucketing | None = None
    """Length bucketing (each batch counts as one pack), or None for packing."""
    steps: Steps | None = None
    """Where a loop ends on all ranks, or None if it ends with this rank's epoch."""
    pack_shuffle: int = 0
    """Packs that a worker shuffles together, as far as `Buffers` allow; 0: no shuffle."""

    @property
    def size(self) -> str:
        """The size of a batch, as messages name it."""
        if self.bucketing is not None:
            return f"max_tokens={self.bucketing.max_tokens}"
        return f"{self.packing.size}, batch_size={self.batch_size}"

    @cached_property
    def pack_tokens(self) -> int:
        """Token slots of a pack; of bucketing, which counts a batch as one pack, at most."""
        return self.packing.row_tokens if self.bucketing is None else self.bucketing.most_slots

    @cached_property
    def batch_tokens(self) -> int:
        """Token slots of a batch; of bucketing at most."""
        return self.batch_size * self.pack_tokens

    @cached_property
    def has_labels(self) -> bool:
        """Whether the samples of any stream have labels, a mask or slots without a target."""
        return any(stream.has_labels for stream in self.streams)

    @cached_property
    def has_extras(self) -> bool:
        return any(stream.has_extras for stream in self.streams)

    @cached_property
    def num_packers(self) -> int:
        """Packers of a worker: one for each stream, unless batches mix them at random."""
        return 1 if self.mixing.batching_method == "random" else len(self.streams)

    def slices(self, worker_slice: WorkerSlice) -> list[SourceSlice]:
        size = self.shuffle_block_size
        return [
            SourceSlice(
                stream.source,
                name,
                worker_slice,
                sharded=stream.sharded,
                replay=stream.replay,
                shuffle=None if size is None else (self.seed, number, size),
            )
            for number, (stream, name) in enumerate(zip(self.streams, self.names, strict=True))
        ]
