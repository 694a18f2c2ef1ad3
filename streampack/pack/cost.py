"""Packs of equal cost: the size of a segment in a pack that is bounded by tokens and by cost.

::

    max_seq_len=100, capacity=150, max_cost=200        tokens   cost   size
                                                           10     10     10    as many as its tokens
                                                          100    200    150    its share of the cost

A segment takes the larger of two shares of a pack: that of the capacity and that of the cost. A
pack that fits its capacity therefore keeps both bounds. Packers need no second dimension.

Cost: 20 ns a segment.
"""

from __future__ import annotations

import numpy as np

from streampack.balance import COST_SCALE, AttentionCost
from streampack.config import PackCost, Packing
from streampack.errors import ConfigError
from streampack.types import Int64Array


def cost_of(cost: PackCost) -> AttentionCost:
    """Return the cost function of a bound."""
    return AttentionCost(hidden_size=cost.hidden_size, window=cost.window)


def check_max_cost(packing: Packing) -> None:
    """Refuse a `max_cost` that one sample of max_seq_len exceeds."""
    if packing.cost is None:
        return
    least = int(np.ceil(cost_of(packing.cost)(np.array([packing.max_seq_len]))[0]))
    if packing.cost.max_cost < least:
        raise ConfigError(
            f"max_cost={packing.cost.max_cost} is less than the cost of one sample of max_seq_len="
            f"{packing.max_seq_len} tokens; set it to at least {least}, or lower max_seq_len"
        )


def sizes_in_pack(lengths: Int64Array, packing: Packing) -> Int64Array:
    """Return the slots that segments of these lengths take of a pack, with all bounds, shape (n,).

    >>> packing = Packing(max_seq_len=100, cost=PackCost(200, hidden_size=8))
    >>> sizes_in_pack(np.array([10, 90]), packing).tolist()
    [10, 131]
    """
    if packing.cost is None:
        return lengths
    # Rounded as in `Balance`, so that all machines agree.
    costs = np.rint(cost_of(packing.cost)(lengths) * COST_SCALE)
    shares = costs * packing.row_tokens / (packing.cost.max_cost * COST_SCALE)
    sizes: Int64Array = np.maximum(lengths, np.ceil(shares).astype(np.int64))
    return np.minimum(sizes, packing.row_tokens)
