"""Equal work on every rank: the packs of a global batch are dealt to ranks by cost.

::

    a global batch, two steps of three ranks     planned    9 1 2 | 4 8 3     max 9 + 8
    (the cost of each pack)                      balanced   9 8 4 | 3 2 1     max 9 + 3

`Balance` moves packs between the steps and ranks of one global batch. The optimizer therefore sees
the same packs as without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from streampack._checks import check_choice, read_count
from streampack.errors import ConfigError
from streampack.types import LENGTH, Int64Array, Packs

Within: TypeAlias = Literal["rank", "node", "batch"]

COST_SCALE = 1024  # costs are integers, in this fraction of a token's dense work
MAX_COST = 2**40  # of one sample, in tokens; the costs of a global batch then fit 63 bits
DENSE_PER_HIDDEN = 12  # dense matrix work per token, over attention work per pair and hidden unit
PROBES = np.array([1, 2, 3, 17, 100, 128, 1000, 2048, 8191, 32_768, 131_072, 10**6], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """Cost of a sample in a transformer with causal attention; a token's matrix products cost 1.

    In every layer, each token costs 1 in matrix products, and each pair of tokens costs 1 / (12 *
    hidden_size) in attention. A sample of n tokens costs n + n**2 / (12 * hidden_size).

    Raises:
        ConfigError: If a size is not an integer of at least 1.

    >>> AttentionCost(hidden_size=4096)(np.array([100, 49_152])).round().tolist()
    [100.0, 98304.0]
    """

    hidden_size: int = 4096
    """Width of the model."""
    window: int | None = None
    """Tokens that a token attends to, itself included. None: all before it in its sample."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden_size", read_count("hidden_size", self.hidden_size))
        if self.window is not None:
            object.__setattr__(self, "window", read_count("window", self.window))

    def __call__(self, lengths: Int64Array) -> npt.NDArray[np.float64]:
        """Return the cost of samples of these lengths, shape (n,)."""
        near = lengths if self.window is None else np.minimum(lengths, self.window)
        pairs = near * (2 * lengths - near)
        costs: npt.NDArray[np.float64] = lengths + pairs / (DENSE_PER_HIDDEN * self.hidden_size)
        return costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Deal the packs of each global batch so that the ranks' device batches cost the same.

    The packs of a global batch stay the same, and a run still resumes exactly between global
    batches. With ``batching_method="device_per_stream"``, whole device batches move. A last batch
    with padding is left as it is.

    Raises:
        ConfigError: If `within` is unknown, or `cost` does not return a finite cost of at least 0
            for each length.

    >>> Balance(within="node").within
    'node'
    """

    within: Within = "node"
    """Which ranks share packs. "rank": none; each rank orders its own packs, and plans nothing
    more. "node": the ranks of a node; each plans the lanes of all of them. "batch": all ranks; each
    plans all lanes."""
    cost: Callable[[Int64Array], object] = field(default_factory=AttentionCost)
    """A function from the lengths of samples in a pack, shape (n,), to their costs, shape (n,).
    Pieces of a cut sample count as samples. All ranks must use the same function."""

    def __post_init__(self) -> None:
        check_choice("within", self.within, Within)
        if not callable(self.cost):
            raise ConfigError(
                f"cost={self.cost!r:.80} is not a function of lengths; omit it for AttentionCost()"
            )
        self._costs(PROBES)

    def digest(self) -> str:
        """Return a digest of the costs at fixed lengths; equal functions have equal digests."""
        return hashlib.blake2b(
            self._costs(PROBES).astype("<i8").tobytes(), digest_size=8
        ).hexdigest()

    def costs(self, packs: Packs) -> Int64Array:
        """Return the cost of each pack as an integer, shape (num_packs,)."""
        totals = np.append(0, np.cumsum(self._costs(packs.segments[:, LENGTH])))
        costs: Int64Array = np.diff(totals[packs.ends], prepend=0)
        return costs

    def _costs(self, lengths: Int64Array) -> Int64Array:
        costs = np.asarray(self.cost(lengths), np.float64)
        if costs.shape != lengths.shape:
            raise ConfigError(
                f"cost returned shape {costs.shape} for {len(lengths)} lengths; return one cost "
                "for each length"
            )
        is_bad = ~((costs >= 0) & (costs <= MAX_COST))
        if is_bad.any():
            worst = int(np.flatnonzero(is_bad)[0])
            raise ConfigError(
                f"cost returned {costs[worst]} for a sample of {lengths[worst]} tokens; return a "
                f"number of at least 0 and at most {MAX_COST}"
            )
        scaled: Int64Array = np.rint(costs * COST_SCALE).astype(np.int64)
        return scaled
