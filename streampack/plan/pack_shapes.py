"""How long the packs of each queue are, and how many slots of the sequence each of them takes.

::

    Packing(max_seq_len=4096), batches of 8          a slot is 4,096 tokens
    web     4,096    [a][b][c][d][e][f][g][h]        a device batch: 8 packs of one slot
    books  16,384    [a         ][b         ]        another: 2 packs of four slots

A pack must be in one device batch, and a batch has packs of one length. So the slots of a queue
are delivered a batch at a time. Where a queue ends inside a batch, "pad" completes it with empty
packs, and "drop" omits it. See docs/adr/0035 and 0047.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from streampack.config import Packing
from streampack.types import Int64Array


class PackShapes:
    """The packs of each queue of a lane, which take `slots_per_pack` slots each.

    `packing` is of packs of one slot. If packs have several lengths or `is_pure`, a queue delivers
    `slots_together` slots in a row; otherwise one.

    >>> shapes = PackShapes(Packing(max_seq_len=8), [1, 4], slots_together=8, is_padded=True)
    >>> shapes.packings[1].max_seq_len, shapes.slots_of(1, 3, is_all=True)
    (32, 16)
    """

    def __init__(
        self,
        packing: Packing,
        slots_per_pack: Sequence[int],
        *,
        slots_together: int,
        is_padded: bool,
        is_pure: bool = False,
    ) -> None:
        self.packings = tuple(
            packing if slots == 1 else replace(packing, max_seq_len=slots * packing.max_seq_len)
            for slots in slots_per_pack
        )
        """The packing of each queue, with its own max_seq_len."""
        self.longest = [each.max_seq_len for each in self.packings]
        """The most tokens of a segment in the packs of each queue."""
        self.slots_per_pack: Int64Array = np.array(slots_per_pack, np.int64)
        """Slots that a pack of each queue takes, shape (num_queues,)."""
        self.is_uniform = max(slots_per_pack, default=1) == 1
        """Whether all packs have one length, that of a slot."""
        self.is_pure = is_pure or not self.is_uniform
        """Whether a batch that a stream is chosen for never has another one."""
        self.slots_together = slots_together if self.is_pure else 1
        """Slots of a queue that are delivered together."""
        self.is_padded = is_padded
        """Whether a queue's last batch is completed with empty packs. Otherwise it is omitted."""

    def slots_of(self, queue: int, num_packs: int, *, is_all: bool) -> int:
        """Return the slots that the known packs of a queue serve, in whole batches.

        `is_all` says whether the queue ends with them.
        """
        slots, size = num_packs * int(self.slots_per_pack[queue]), self.slots_together
        return self.whole(slots, size) if is_all else slots // size * size

    def whole(self, slots: int, size: int) -> int:
        """Return the last slots that are delivered, where they are delivered `size` at a time."""
        return -(-slots // size) * size if self.is_padded else slots // size * size

    def packs_before(self, queues: Int64Array, slots: Int64Array) -> Int64Array:
        """Return how many whole packs of these queues come before these slots, shape (n,)."""
        return slots if self.is_uniform else slots // self.slots_per_pack[queues]
