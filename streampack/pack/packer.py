"""What every packer is: a small machine without I/O that takes segments and hands out packs.

::

    fit_samples --segments--> add --packs-->      ... at the end of an epoch: flush --packs-->

Cost: of each packer, see its file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from streampack.config import Packing
from streampack.pack.concat import concat
from streampack.pack.exact_fit import exact_fit
from streampack.pack.knapsack import knapsack
from streampack.pack.next_fit import next_fit
from streampack.pack.open_packs import best_fit, first_fit
from streampack.pack.two_tiers import two_tiers
from streampack.types import Int64Array, Packs, State

__all__ = ["Packer", "make_packer"]

METHODS: dict[str, Callable[[Packing], Packer]] = {
    "best_fit": best_fit,
    "concat": concat,
    "exact_fit": exact_fit,
    "first_fit": first_fit,
    "knapsack": knapsack,
    "next_fit": next_fit,
    "two_tiers": two_tiers,
}


class Packer(Protocol):
    """A packer; which packs it makes depends on the segments alone, not on how calls deal them."""

    def add(self, segments: Int64Array) -> Packs:
        """Take segment rows in arrival order, shape (n, 6); return the packs they complete."""

    def flush(self) -> Packs:
        """Return packs of all that is buffered; the buffer is empty then."""

    @property
    def buffered(self) -> Int64Array:
        """All segment rows in the buffer now, shape (n, 6); not to be changed."""

    @property
    def num_buffered_tokens(self) -> int:
        """Tokens in the buffer now."""

    @property
    def num_buffered_samples(self) -> int:
        """Segments in the buffer now."""

    @property
    def high_water_tokens(self) -> int:
        """The most tokens that were ever buffered."""

    @property
    def high_water_samples(self) -> int:
        """The most segments that were ever buffered."""

    def state_dict(self) -> State:
        """Return what is buffered, JSON-able; asking changes nothing."""

    def load_state_dict(self, state: State) -> None:
        """Go on where the packer stood whose state this is."""


def make_packer(packing: Packing) -> Packer:
    """Return an empty packer of the method that `packing` names.

    >>> make_packer(Packing(max_seq_len=8, method="next_fit")).num_buffered_tokens
    0
    """
    return METHODS[packing.method](packing)
