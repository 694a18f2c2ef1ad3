"""The laws of streams that set their own pack length."""

from __future__ import annotations

import numpy as np
import pytest

from streampack.config import Mixing, Packing
from streampack.plan.device_plan import DevicePlan, DeviceView
from streampack.plan.recipe import Recipe
from streampack.plan.state import Progress
from streampack.types import LENGTH, STREAM
from tests.helpers.planning import (
    device_batches,
    encode_epochs,
    recipe,
)

SIZE, RUN = 32, 8
SLOTS = [1, 2, 8]
LENGTHS = [
    np.random.default_rng(seed).integers(1, longest + 1, num)
    for seed, (num, longest) in enumerate([(900, 50), (400, 150), (150, 400)])
]
METHODS = ["device_per_stream", "per_stream"]


def make(method: str, epoch_end: str, *, num_lanes: int = 1, slots=SLOTS, **options) -> Recipe:
    """A recipe of three streams."""
    run = options.pop("lane_turn", RUN)
    return recipe(
        options.pop("lengths", LENGTHS),
        mixing=Mixing(batching_method=method, epoch_end=epoch_end, **options.pop("mixing", {})),
        packing=Packing(max_seq_len=SIZE, **options.pop("packing", {})),
        num_lanes=num_lanes,
        lane_turn=run,
        global_batch_size=options.pop("global_batch_size", 6 * num_lanes * run),
        slots_per_pack=slots,
        **options,
    )


def packs_of(plan: DevicePlan) -> list[list]:
    return [plan.packs[pack].tolist() for pack in range(len(plan.packs))]


def check_batch(plan: DevicePlan, batch_size: int, slots: list[int] = SLOTS) -> set[int]:
    """Check that a batch has rows of one length, each with one stream; return its streams."""
    packs = packs_of(plan)
    assert plan.num_rows * plan.slots_per_pack == batch_size
    assert len(packs) <= plan.num_rows
    streams = {row[STREAM] for pack in packs for row in pack}
    assert len(streams) <= 1
    assert {slots[stream] for stream in streams} <= {plan.slots_per_pack}
    assert all(sum(row[LENGTH] for row in p) <= SIZE * plan.slots_per_pack for p in packs)
    return streams


@pytest.mark.parametrize("method", METHODS)
def test_streams_take_turns_by_tokens_whatever_the_length_of_their_packs(method):
    r = make(
        method,
        "carry",
        mixing={"weight_unit": "tokens", "epoch_size": 200_000},
        weights=[{"proportion": 0.5}, {"proportion": 0.3}, {"proportion": 0.2}],
        global_batch_size=RUN * 4,
    )
    unit = RUN if method == "device_per_stream" else r.global_batch_size
    served = np.zeros(3)

    for number, plan in enumerate(device_batches(r, DeviceView(batch_size=RUN))):
        [stream] = check_batch(plan, RUN)
        served[stream] += RUN
        due = (number + 1) * RUN * np.array([0.5, 0.3, 0.2])
        assert (abs(served - due) <= 2 * unit).all()


def test_the_fingerprint_names_lengths_only_where_they_differ():
    plain, own = (make("device_per_stream", "pad", slots=slots) for slots in ([1, 1, 1], SLOTS))

    def keys(r: Recipe) -> dict:
        return encode_epochs(r, ["a", "b", "c"], Progress())["fingerprint"]

    assert "max_seq_len_of_streams" not in keys(plain)
    assert keys(own) == keys(plain) | {"max_seq_len_of_streams": [32, 64, 256]}
