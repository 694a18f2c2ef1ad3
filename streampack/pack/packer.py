"""The packer protocol: a state machine without I/O that takes segments and returns packs.

::

    fit_samples --segments--> add --packs-->      ... at the end of an epoch: flush --packs-->

Cost: see the module of each packer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from streampack.config import Packing
from streampack.config.packing import DEFAULT_METHOD
from streampack.pack.best_fit_decreasing import WindowPacker, place_decreasing
from streampack.pack.in_order import InOrderPacker
from streampack.pack.knapsack import place_in_bins
from streampack.pack.two_tiers import two_tiers
from streampack.types import Int64Array, Packs, State

PACKERS: dict[str, Callable[[Packing], Packer]] = {
    "best_fit_decreasing": partial(WindowPacker, "best_fit_decreasing", place_decreasing),
    "concat": partial(InOrderPacker, "concat"),
    "knapsack": partial(WindowPacker, "knapsack", place_in_bins),
    "next_fit": partial(InOrderPacker, "next_fit"),
    "two_tiers": two_tiers,
}


class Packer(Protocol):
    """A packer. Its packs depend only on the segments, not on how they are divided into calls.

    The exception is a packer of windows (`Packing.packs_windows`): each call of `add` is a window.
    """

    def add(self, segments: Int64Array) -> Packs:
        """Add segment rows in arrival order, shape (n, 6); return the packs they complete."""

    def flush(self) -> Packs:
        """Pack the whole buffer and leave it empty."""

    @property
    def buffered(self) -> Int64Array:
        """All segment rows in the buffer, shape (n, 6). Do not modify."""

    @property
    def held(self) -> tuple[int, int]:
        """Tokens and segments in the buffer."""

    @property
    def high_water(self) -> tuple[int, int]:
        """Most tokens and most segments ever buffered."""

    def state_dict(self) -> State:
        """Return the buffer as JSON-compatible values. The packer is not changed."""

    def load_state_dict(self, state: State) -> None:
        """Resume from a saved state."""


def make_packer(packing: Packing) -> Packer:
    """Return an empty packer for the method of `packing`."""
    return PACKERS[packing.method or DEFAULT_METHOD](packing)
