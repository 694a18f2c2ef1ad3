"""All that decides which batches the workers of the buffered way make.

::

    streams, packing, mixing, ... --FlowPlan--> a packer, and a worker's part of each source

Every worker has the same plan; which part is its own, its place says.

Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from streampack.config import Mixing, Packing
from streampack.load.buckets import Bucketing, BucketPacker
from streampack.load.iterable_amounts import EpochAmounts
from streampack.pack import make_packer
from streampack.pack.packer import Packer
from streampack.streams import IterableStream
from streampack.streams.part import PartPlace, SourcePart

__all__ = ["FlowPlan"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowPlan:
    """All that decides which batches a worker makes."""

    streams: tuple[IterableStream, ...]
    names: tuple[str, ...]
    packing: Packing
    mixing: Mixing
    amounts: EpochAmounts
    batch_size: int
    seed: int
    shuffle_block_size: int | None
    """Samples of sources with an index that are shuffled together; None: as they are stored."""
    bucketing: Bucketing | None = None
    """Makes batches of samples of similar length, each of which counts as one pack."""

    def packer(self) -> Packer:
        """Return an empty packer."""
        if self.bucketing is not None:
            return BucketPacker(self.bucketing)
        return make_packer(self.packing)

    def parts(self, place: PartPlace) -> list[SourcePart]:
        """Return a worker's part of each source."""
        size = self.shuffle_block_size
        return [
            SourcePart(
                stream.source,
                name,
                place,
                sharded=stream.sharded,
                replay=stream.replay,
                shuffle=None if size is None else (self.seed, number, size),
            )
            for number, (stream, name) in enumerate(zip(self.streams, self.names, strict=True))
        ]
