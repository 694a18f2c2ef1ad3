"""The packers by the names of their methods.

::

    fit_samples --segments--> add --packs-->      ... at the end of an epoch: flush --packs-->

Cost: see the module of each packer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from streampack.config import Packing
from streampack.config.packing import DEFAULT_METHOD
from streampack.pack.best_fit_decreasing import WindowPacker, place_decreasing
from streampack.pack.buffered import BufferedPacker
from streampack.pack.in_order import InOrderPacker
from streampack.pack.knapsack import place_in_bins
from streampack.pack.two_tiers import place_in_tiers

PACKERS: dict[str, Callable[[Packing], BufferedPacker]] = {
    "best_fit_decreasing": partial(WindowPacker, place_decreasing),
    "concat": InOrderPacker,
    "knapsack": partial(WindowPacker, place_in_bins),
    "next_fit": InOrderPacker,
    "two_tiers": partial(WindowPacker, place_in_tiers),
}


def make_packer(packing: Packing) -> BufferedPacker:
    """Return an empty packer for the method of `packing`."""
    return PACKERS[packing.method or DEFAULT_METHOD](packing.resolved())
