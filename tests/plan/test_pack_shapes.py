"""The laws of streams that set their own pack length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streampack.config import Mixing, Packing
from streampack.plan.device_plan import DevicePlan, DeviceView
from streampack.plan.lane_ends import count_slots
from streampack.plan.recipe import Recipe
from streampack.plan.state import Progress
from streampack.types import LENGTH, STREAM
from tests.helpers.examples import examples
from tests.helpers.planning import (
    all_packs,
    covered,
    device_batches,
    encode_epochs,
    epoch_sequence,
    recipe,
    world_views,
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


@examples(12, many=150)
@given(
    method=st.sampled_from(["random", "stratified", *METHODS]),
    epoch_end=st.sampled_from(["pad", "drop"]),
    streams=st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1, 2])), min_size=1, max_size=3),
    num_lanes=st.integers(1, 4),
    sizes=st.tuples(st.sampled_from([2, 4]), st.integers(1, 2)),
    world=st.tuples(st.integers(1, 5), st.sampled_from([2, 4])),
    are_full=st.booleans(),
)
@example(
    method="per_stream",
    epoch_end="pad",
    streams=[(2, 1), (3, 2)],
    num_lanes=2,
    sizes=(2, 1),
    world=(2, 2),
    are_full=True,
)
def test_every_world_gets_the_same_packs_of_streams_of_one_to_five(
    method, epoch_end, streams, num_lanes, sizes, world, are_full
):
    slots = [own if method in METHODS else 1 for _, own in streams]
    lengths = [np.full(num, own * SIZE) for (num, _), own in zip(streams, slots, strict=True)]
    if not are_full:  # two samples to a pack, more or less
        rng = np.random.default_rng(len(lengths[0]))
        lengths = [rng.integers(1, own[0] + 1, 2 * len(own)) for own in lengths]
    run, num_batches = sizes
    r = make(
        method,
        epoch_end,
        num_lanes=num_lanes,
        slots=slots,
        lengths=lengths,
        lane_turn=run,
        global_batch_size=run * num_lanes * num_batches,
    )
    alone = epoch_sequence(r, DeviceView(batch_size=run), Progress(epoch=1))
    while (plan := alone.next()) is not None:
        if method in METHODS:
            check_batch(plan, run, slots)
    size = r.global_batch_size
    num_slots = count_slots(r, 1)
    counted = num_slots // size if epoch_end == "drop" else -(-num_slots // size)
    assert alone.num_slots == counted * size

    num_devices, batch_size = world
    expected = all_packs(r, world_views(1, run), 1)
    assert all_packs(r, world_views(num_devices, min(batch_size, run)), 1) == expected
    if epoch_end == "pad":
        pieces = covered(expected, len(slots))
        tokens = [sum(n for own in each.values() for _, n in own) for each in pieces]
        assert tokens == [own.sum() for own in lengths]


def test_the_fingerprint_names_lengths_only_where_they_differ():
    plain, own = (make("device_per_stream", "pad", slots=slots) for slots in ([1, 1, 1], SLOTS))

    def keys(r: Recipe) -> dict:
        return encode_epochs(r, ["a", "b", "c"], Progress())["fingerprint"]

    assert "max_seq_len_of_streams" not in keys(plain)
    assert keys(own) == keys(plain) | {"max_seq_len_of_streams": [32, 64, 256]}
