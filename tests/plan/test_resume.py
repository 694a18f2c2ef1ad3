"""Save at any batch, resume in any world, with or without snapshots: the same packs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Mixing, Order, Packing
from streampack.errors import ResumeError
from streampack.plan.device_plan import DeviceView
from streampack.plan.recipe import Recipe
from streampack.plan.run_worlds import check_resized
from streampack.plan.state import Progress
from tests.helpers.examples import crossed, examples
from tests.helpers.planning import all_packs, device_batches, epoch_sequence, recipe, world_views

METHODS = ["random", "stratified", "per_stream", "device_per_stream"]
ENDS = ["pad", "drop", "carry"]
LENGTHS = [np.random.default_rng(n).integers(1, top, n) for n, top in [(260, 60), (120, 90)]]
SIZE = 12


def make(
    method: str, epoch_end: str, num_lanes: int = 1, unit: str = "samples", **kwargs
) -> Recipe:
    return recipe(
        kwargs.pop("lengths", LENGTHS),
        mixing=Mixing(batching_method=method, epoch_end=epoch_end, weight_unit=unit, **kwargs),
        packing=Packing(max_seq_len=64, buffer_tokens=512),
        num_lanes=num_lanes,
        lane_turn=2,
        global_batch_size=SIZE * num_lanes,
    )


def states_of(r: Recipe, view: DeviceView, epoch: int) -> list[tuple[int, str]]:
    """The position and the snapshots, as JSON, before each batch of an epoch and after the last."""
    sequence = epoch_sequence(r, view, Progress(epoch=epoch))
    states = [(0, json.dumps(sequence.snapshots()))]
    while (batch := sequence.next()) is not None:
        states.append((batch.position, json.dumps(sequence.snapshots())))
    sequence.close()
    return states


def show(batch) -> tuple:
    segments, ends = batch.packs.segments.tolist(), batch.packs.ends.tolist()
    return segments, ends, batch.num_rows, batch.epoch, batch.position


@examples(20, many=150)
@given(
    method=st.sampled_from(METHODS),
    epoch_end=st.sampled_from(ENDS),
    num_lanes=st.sampled_from([1, 2]),
    unit=st.sampled_from(["samples", "tokens"]),
    epoch=st.integers(0, 2),
    size=st.sampled_from([2, 4, 8, 20, 24, 36, 40]),
    data=st.data(),
)
def test_another_global_batch_size_goes_on_with_the_packs_of_the_run_or_is_refused(
    method, epoch_end, num_lanes, unit, epoch, size, data
):
    r = make(method, epoch_end, num_lanes, unit)
    whole = all_packs(r, world_views(1, 2), epoch)
    position = size * data.draw(st.integers(0, len(whole) // size))
    resized = replace(r, global_batch_size=size)
    try:
        check_resized(r, resized, Progress(epoch=epoch, position=position))
    except ResumeError:
        carries_on = epoch_end == "carry" and epoch > 0
        assert carries_on or (position > 0 and method != "random")
        return
    views = world_views(2, data.draw(st.sampled_from([n for n in (1, 2, 4) if size % n == 0])))
    rest = all_packs(resized, views, epoch, position=position)
    # Epochs of whole global batches would end elsewhere.
    common = len(whole) if epoch_end == "pad" else min(len(whole), position + len(rest))
    if position or method == "random":
        assert (whole[:position] + rest)[:common] == whole[:common]
    assert rest == all_packs(resized, world_views(1, 2), epoch)[position:]
    if method == "random" and epoch_end == "pad":
        assert whole[:position] + rest == whole


def test_snapshots_do_not_grow_with_the_epoch():
    r = make("stratified", "pad", lengths=[np.full(60_000, 16), np.full(20_000, 30)])
    r = replace(r, order=Order(seed=3, pack_shuffle=1000))
    sizes = [len(snapshots) for _, snapshots in states_of(r, DeviceView(batch_size=1200), 0)]

    assert max(sizes[len(sizes) // 2 :]) < 1.5 * max(sizes[: len(sizes) // 2])
    assert max(sizes) < 20_000


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "unit_and_end"),
    crossed(
        METHODS,
        [("samples", "carry"), ("tokens", "pad"), ("samples", "pad"), ("tokens", "carry")],
    ),
)
def test_snapshots_hold_all_that_a_planner_of_many_chunks_goes_on_with(method, unit_and_end):
    unit, epoch_end = unit_and_end
    rng = np.random.default_rng(1)
    lengths = [rng.integers(0, 90, 16_000), rng.integers(0, 50, 9_000)]
    r = make(method, epoch_end, 1, unit, lengths=lengths)
    view = DeviceView(batch_size=12)
    whole = device_batches(r, view)
    states = states_of(r, view, 0)
    sequence = epoch_sequence(r, view)
    while sequence.next() is not None:
        pass

    for done in range(100, len(whole), 150):
        position, snapshots = states[done]
        assert all(own["arrivals"] for own in json.loads(snapshots))
        again = epoch_sequence(
            r, view, Progress(position=position, snapshots=json.loads(snapshots))
        )
        for batch in whole[done:]:
            assert show(again.next()) == show(batch)
        assert again.next() is None
        # The counts continue too, such as that of samples without tokens since the epoch began.
        assert again._queues.dropped.tolist() == sequence.totals.dropped.tolist()
    assert sequence.totals.dropped.min() >= 0 < sequence.totals.dropped.max()
