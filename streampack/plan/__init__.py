"""Which segments are in which pack of which step: integers only, the same in every process.

In: lengths, weights, a seed and a world. Out: the packs of a device's next batches, the shards they
need, and the state of a run. May import `pack`, `order` and `mix`. No file is opened here: lengths
come from a callable that the caller provides.

Cost: about 0.4 us a sample, regardless of the number of streams and lanes.
"""

from streampack.plan.device import DevicePlan, DeviceView, touched_lanes
from streampack.plan.lane_ends import count_slots, slots_in
from streampack.plan.recipe import PlanStream, Recipe
from streampack.plan.sequence import PackSequence, epoch_sequence
from streampack.plan.shard_tracker import ShardDelta
from streampack.plan.state import (
    Progress,
    RunShape,
    check_resized,
    decode_state,
    encode_state,
    nearest_divisors,
    plan_fingerprint,
    run_shape,
)

__all__ = [
    "DevicePlan",
    "DeviceView",
    "PackSequence",
    "PlanStream",
    "Progress",
    "Recipe",
    "RunShape",
    "ShardDelta",
    "check_resized",
    "count_slots",
    "decode_state",
    "encode_state",
    "epoch_sequence",
    "nearest_divisors",
    "plan_fingerprint",
    "run_shape",
    "slots_in",
    "touched_lanes",
]
