"""A device plans exactly the lanes that it reports."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Mixing
from streampack.plan.device_plan import DeviceView, touched_lanes
from streampack.plan.lane_stream import skips_lanes
from streampack.plan.recipe import Recipe
from streampack.plan.state import Progress
from tests.helpers.planning import epoch_sequence, recipe


def with_a_small_stream(method: str, num_lanes: int, run: int, num_small: int, **mixing) -> Recipe:
    """A stream of 600 samples, and one of a few."""
    generator = np.random.default_rng(0)
    return recipe(
        [generator.integers(1, 100, 600), generator.integers(30, 100, num_small)],
        mixing=Mixing(batching_method=method, epoch_end="carry", **mixing),
        num_lanes=num_lanes,
        lane_turn=run,
        global_batch_size=run * num_lanes,
    )


@given(
    method=st.sampled_from(["random", "stratified", "per_stream", "device_per_stream"]),
    sampling=st.sampled_from(["fixed", "balanced"]),
    shape=st.sampled_from([(4, 2, 1), (4, 4, 1), (8, 4, 2), (4, 2, 2)]),
    num_small=st.integers(1, 9),
    epoch=st.integers(0, 3),
)
def test_no_device_plans_a_lane_that_it_does_not_touch(method, sampling, shape, num_small, epoch):
    num_lanes, num_devices, run = shape
    r = with_a_small_stream(method, num_lanes, run, num_small, sampling_method=sampling)
    for place in range(num_devices):
        view = DeviceView(place=place, num_devices=num_devices, batch_size=run)
        touched = touched_lanes(r, view, before=epoch * r.packs_per_carry_epoch)
        sequence = epoch_sequence(r, view, Progress(epoch=epoch))
        while (plan := sequence.next()) is not None:
            assert plan.num_rows == run
        assert {queue.windows._lane for queue in sequence._queues} <= touched
        sequence.close()


@pytest.mark.parametrize(("num_small", "skips"), [(3, True), (40, False)])
def test_only_a_stream_with_fewer_samples_than_lanes_makes_a_device_touch_all(num_small, skips):
    r = with_a_small_stream("per_stream", 4, 1, num_small, sampling_method="fixed")
    view = DeviceView(place=0, num_devices=4, batch_size=1)
    assert skips_lanes(r) == skips
    assert touched_lanes(r, view) == (set(range(4)) if skips else {0})
