"""How many samples of each stream an epoch takes, and which stream serves a slot.

In: weights and sizes of streams. Out: quotas, schedules and draws, as integers. May import only the
top-level modules. Pure functions: equal arguments give equal results in every process.

Cost: O(streams) for weights; about 10 ns a draw.
"""

from streampack.mix.apportion import apportion, scaled_shares
from streampack.mix.deficit import Deficits
from streampack.mix.schedule import LinearShares, Schedule, ScheduleState
from streampack.mix.weights import (
    Quota,
    Weight,
    check_amount,
    check_weights,
    exact_share,
    resolve_weights,
)

__all__ = [
    "Deficits",
    "LinearShares",
    "Quota",
    "Schedule",
    "ScheduleState",
    "Weight",
    "apportion",
    "check_amount",
    "check_weights",
    "exact_share",
    "resolve_weights",
    "scaled_shares",
]
