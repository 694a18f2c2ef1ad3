"""Which segments lie in which pack: lanes, the sequence over all lanes, and the state of a run."""

from streampack.plan.ends import count_packs
from streampack.plan.recipe import PlanStream, Recipe
from streampack.plan.sequence import DeviceBatch, DeviceView, EpochSequence
from streampack.plan.state import Progress, pack_state, run_shape, unpack_state

__all__ = [
    "DeviceBatch",
    "DeviceView",
    "EpochSequence",
    "PlanStream",
    "Progress",
    "Recipe",
    "count_packs",
    "pack_state",
    "run_shape",
    "unpack_state",
]
