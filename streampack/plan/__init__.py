"""Which segments lie in which pack: lanes, the sequence over all lanes, and the state of a run."""

from streampack.plan.ahead import ShardNeeds
from streampack.plan.ends import count_packs, slots_in
from streampack.plan.recipe import PlanStream, Recipe
from streampack.plan.sequence import DevicePlan, DeviceView, EpochSequence, touched_lanes
from streampack.plan.state import (
    Progress,
    check_resized,
    nearest_divisors,
    pack_state,
    run_shape,
    saving_worker,
    unpack_state,
)

__all__ = [
    "DevicePlan",
    "DeviceView",
    "EpochSequence",
    "PlanStream",
    "Progress",
    "Recipe",
    "ShardNeeds",
    "check_resized",
    "count_packs",
    "nearest_divisors",
    "pack_state",
    "run_shape",
    "saving_worker",
    "slots_in",
    "touched_lanes",
    "unpack_state",
]
