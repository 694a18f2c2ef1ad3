"""Dealing the packs of a global batch by cost: the same packs, and equal costs on all ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.balance import Balance
from streampack.config import Mixing, Order, Packing
from streampack.plan.deal import deal_by_cost, step_time
from streampack.plan.device_plan import DeviceView
from streampack.plan.recipe import Recipe
from tests.helpers.examples import examples
from tests.helpers.planning import device_batches, epoch_sequence, recipe

METHODS = ["random", "stratified", "per_stream", "device_per_stream"]
LENGTHS = [np.random.default_rng(n).integers(1, top, n) for n, top in [(700, 150), (300, 40)]]
SIZE = 24
WORLDS = [(1, 6), (2, 3), (4, 3), (4, 6), (8, 1), (6, 2)]  # devices, batch size
WITHIN = ["rank", "node", "batch"]


def make(method: str = "random", num_lanes: int = 1, **mixing) -> Recipe:
    return recipe(
        LENGTHS,
        mixing=Mixing(batching_method=method, **mixing),
        packing=Packing(max_seq_len=64, buffer_tokens=512),
        order=Order(seed=3, pack_shuffle=40),
        num_lanes=num_lanes,
        lane_turn=3,
        global_batch_size=SIZE,
    )


def views_of(num_devices: int, batch_size: int, within: str, **cost) -> list[DeviceView]:
    """A job of two nodes, or of one node if the number of devices is odd."""
    balance = Balance(within=within, **cost)
    views = []
    for place in range(num_devices):
        node = [p for p in range(num_devices) if p % 2 == place % 2 or num_devices % 2]
        sharing = {"rank": [place], "node": node, "batch": range(num_devices)}[within]
        views.append(
            DeviceView(
                place=place,
                num_devices=num_devices,
                batch_size=batch_size,
                balance=balance,
                sharing=tuple(sharing),
            )
        )
    return views


def steps_of(r: Recipe, views: list[DeviceView], epoch: int = 0, **kwargs) -> list[list[list]]:
    """The packs of each batch, by step and device."""
    per_device = [device_batches(r, view, epoch, **kwargs) for view in views]
    return [
        [[batch.packs[i].tolist() for i in range(len(batch.packs))] for batch in step]
        for step in zip(*per_device, strict=True)
    ]


def by_global_batch(steps: list[list[list]], per_batch: int) -> list[list[str]]:
    return [
        sorted(
            json.dumps(pack) for step in steps[n : n + per_batch] for own in step for pack in own
        )
        for n in range(0, len(steps), per_batch)
    ]


@pytest.mark.thorough
@examples(6, many=40)
@given(
    st.sampled_from(METHODS),
    st.sampled_from(["pad", "drop", "carry"]),
    st.sampled_from(WITHIN),
    st.sampled_from(WORLDS),
    st.sampled_from([1, 2, 4]),
)
def test_each_global_batch_holds_the_packs_that_it_has_without_balance(
    method, epoch_end, within, world, num_lanes
):
    r = make(method, num_lanes, epoch_end=epoch_end)
    views = views_of(*world, within)
    per_batch = SIZE // views[0].stride
    plain = steps_of(r, [replace(view, balance=None) for view in views], epoch=1)
    dealt = steps_of(r, views, epoch=1)
    assert by_global_batch(dealt, per_batch) == by_global_batch(plain, per_batch)
    if method == "device_per_stream":
        batches = {json.dumps(own) for step in plain for own in step}
        assert {json.dumps(own) for step in dealt for own in step} == batches
    last = (len(plain) - 1) // per_batch * per_batch
    if sum(len(own) for step in plain[last:] for own in step) < SIZE:
        assert dealt[last:] == plain[last:], "a padded batch is left alone"


@pytest.mark.parametrize("within", WITHIN)
def test_batches_planned_together_are_those_planned_one_by_one(within):
    r = make("stratified", 2)
    view = views_of(4, 3, within)[1]
    single = [b.packs.segments.tolist() for b in device_batches(r, view)]
    sequence = epoch_sequence(r, view)
    together = []
    while (batch := sequence.next(5)) is not None:
        together += [
            batch.slice(n, n + 1).packs.segments.tolist() for n in range(batch.num_batches)
        ]
    assert together == single


costs = st.integers(1, 10_000)


@examples(60, many=200)
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_every_item_is_dealt_once_and_steps_take_no_longer(data, num_steps, num_ranks, size):
    count = num_steps * num_ranks * size
    own = np.array(data.draw(st.lists(costs, min_size=count, max_size=count)))
    dealt = deal_by_cost(own, num_steps, num_ranks)
    assert dealt.shape == (num_steps, num_ranks, size)
    assert sorted(dealt.ravel().tolist()) == list(range(count))
    spread = own[dealt].sum(axis=2)
    assert step_time(spread) <= num_ranks
    # The module's bound: the largest device batch exceeds the mean by at most one pack.
    assert spread.max() <= own.sum() / (num_steps * num_ranks) + own.max()
