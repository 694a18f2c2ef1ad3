"""Packs are shuffled within windows: they are the same packs, and resume exactly."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Mixing, Order, PackCost, Packing
from streampack.mix.draw import CHUNK
from streampack.plan.device_plan import DeviceView
from streampack.plan.pack_order import even_order
from streampack.plan.pack_queue import PackQueue
from streampack.plan.recipe import Recipe
from streampack.plan.state import Progress
from streampack.types import LENGTH, SAMPLE
from tests.helpers.examples import examples
from tests.helpers.planning import (
    all_packs,
    device_batches,
    epoch_sequence,
    queue_packs,
    recipe,
    world_views,
)

METHODS = ["random", "stratified", "per_stream", "device_per_stream"]
LENGTHS = [np.random.default_rng(n).integers(1, top, n) for n, top in [(900, 150), (300, 40)]]


def make(order: Order, method: str = "random", num_lanes: int = 1, **mixing) -> Recipe:
    return recipe(
        LENGTHS,
        mixing=Mixing(batching_method=method, **mixing),
        packing=Packing(max_seq_len=64, buffer_tokens=512),
        order=order,
        num_lanes=num_lanes,
        lane_turn=2,
        global_batch_size=8 * num_lanes,
    )


def unshuffled(r: Recipe) -> Recipe:
    return replace(r, order=replace(r.order, pack_shuffle=0))


orders = st.builds(
    Order,
    seed=st.integers(0, 5),
    pack_shuffle=st.sampled_from([None, 1, 2, 7, 40, 300, 10**6]),
    shuffle_block_size=st.sampled_from([None, 3, 50, 5000]),
)


@examples(20, many=60)
@given(orders, st.sampled_from(METHODS), st.sampled_from([1, 3]), st.sampled_from(["pad", "carry"]))
def test_a_queue_gives_the_same_packs_each_within_a_window_of_its_place(
    order, method, num_lanes, epoch_end
):
    r = make(order, method, num_lanes, epoch_end=epoch_end)
    for queue in range(r.num_queues):
        count = 400
        queues = [PackQueue(each, num_lanes - 1, queue, 0) for each in (r, unshuffled(r))]
        shuffled, plain = (
            [pack for pack, _ in zip(queue_packs(queue), range(count), strict=False)]
            for queue in queues
        )
        most_packs, most_samples, *_ = r.sizes(num_lanes - 1, queue)
        # A window ends with a chunk of samples, and one sample fills at most three packs.
        bound = min(most_packs, 3 * most_samples) + 3 * CHUNK
        where = {json.dumps(pack): number for number, pack in enumerate(plain)}
        if epoch_end == "pad" and len(plain) < count:
            assert sorted(map(json.dumps, shuffled)) == sorted(where)
        for number, pack in enumerate(shuffled):
            at = where.get(json.dumps(pack), count)
            assert abs(at - number) <= bound


@examples(20, many=60)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["uniform", "few long", "two sizes"]),
    st.sampled_from([64, 128, 256]),
    st.integers(0, 300),
)
def test_runs_of_an_even_order_vary_less_in_tokens_than_those_of_a_shuffle(
    seed, shape, size, begin
):
    generator = np.random.default_rng(seed)
    tokens = {
        "uniform": generator.integers(1, 1000, 8192),
        "few long": np.where(generator.random(8192) < 0.2, generator.integers(1, 1000, 8192), 1000),
        "two sizes": generator.choice([100, 1000], 8192),
    }[shape]

    def spread(packs) -> float:
        runs = packs[begin : begin + 30 * size].reshape(-1, size)
        return float(runs.sum(axis=1).std())

    assert spread(tokens[even_order(tokens)]) < 0.6 * spread(tokens)


def test_packs_of_equal_cost_leave_in_the_even_order():
    packing = Packing(max_seq_len=64, cost=PackCost(80, hidden_size=20))
    r = replace(make(Order(seed=1)), packing=packing)
    packs = [pack for pack, _ in zip(queue_packs(PackQueue(r, 0, 0, 0)), range(400), strict=False)]
    tokens = np.array([sum(row[LENGTH] for row in pack) for pack in packs])
    shuffled = np.random.default_rng(0).permutation(tokens)
    even, random = (
        each[: len(each) // 8 * 8].reshape(-1, 8).sum(axis=1).std() for each in (tokens, shuffled)
    )
    assert even < 0.6 * random


@pytest.mark.parametrize("pack_shuffle", [1, 7, 40])
def test_small_windows_are_parts_of_a_chunk(pack_shuffle):
    r = make(Order(seed=1, pack_shuffle=pack_shuffle))
    plain, shuffled = (
        [json.dumps(pack) for pack in queue_packs(PackQueue(each, 0, 0, 0))]
        for each in (unshuffled(r), r)
    )
    places = [plain.index(pack) for pack in shuffled]
    moves = np.abs(np.array(places) - np.arange(len(places)))
    assert moves.max() < pack_shuffle
    assert (moves.max() > 0) == (pack_shuffle > 1)
    if pack_shuffle > 1:
        assert np.mean(moves) > 0.2 * pack_shuffle


@pytest.mark.thorough
@examples(5, many=25)
@given(orders, st.sampled_from(METHODS), st.sampled_from(["pad", "drop", "carry"]), st.data())
def test_a_run_resumes_inside_a_window_in_any_world_with_or_without_snapshots(
    order, method, epoch_end, data
):
    r = make(order, method, 2, epoch_end=epoch_end)
    epoch = data.draw(st.sampled_from([0, 2]))
    wanted = all_packs(r, world_views(1, 16), epoch)
    view = DeviceView(batch_size=16)
    sequence = epoch_sequence(r, view, Progress(epoch=epoch))
    stop = data.draw(st.integers(0, len(wanted) // 16))
    position, snapshots = 0, sequence.snapshots()
    for _ in range(stop):
        batch = sequence.next()
        position, snapshots = batch.position, sequence.snapshots()
    sequence.close()
    for num_devices, size in ((1, 16), (2, 8), (8, 2)):
        for kept in (json.loads(json.dumps(snapshots)), []):
            views = world_views(num_devices, size)
            rest = all_packs(r, views, epoch, position=position, snapshots=kept)
            assert rest == wanted[position:]


def test_stored_order_and_no_shuffle_keep_the_order_of_packing():
    packing = Packing(max_seq_len=64, method="next_fit")
    r = recipe([LENGTHS[0]], packing=packing, order=Order(shuffle=False))
    assert r.sizes(0, 0)[:2] == (0, 0)
    firsts = [
        batch.packs[i][0, SAMPLE]
        for batch in device_batches(r, DeviceView(batch_size=8))
        for i in range(len(batch.packs))
    ]
    assert firsts == sorted(firsts)
    assert Order(shuffle=False, pack_shuffle=0).pack_window == (0, 0)


def effective_documents(r: Recipe, size: int) -> tuple[float, float]:
    """Effective documents per global batch, for these packs and for fully shuffled ones."""
    [batches] = [device_batches(r, DeviceView(batch_size=size))]
    packs = [batch.packs[i] for batch in batches for i in range(len(batch.packs))]

    def mean(packs: list) -> float:
        found = []
        for first in range(0, len(packs) - size + 1, size):
            rows = np.concatenate(packs[first : first + size])
            tokens = np.bincount(rows[:, SAMPLE], rows[:, LENGTH])
            found.append(tokens.sum() ** 2 / (tokens**2).sum())
        return float(np.mean(found))

    order = np.random.default_rng(0).permutation(len(packs))
    return mean(packs), mean([packs[number] for number in order])


@pytest.mark.parametrize("num_lanes", [1, 4, 8])
def test_a_global_batch_holds_nearly_as_many_documents_as_of_packs_shuffled_over_the_epoch(
    num_lanes,
):
    lengths = np.random.default_rng(5).lognormal(np.log(2500), 1.27, 8000).clip(1, 100_000)
    r = recipe(
        [lengths.astype(np.int64)],
        packing=Packing(max_seq_len=2048),
        num_lanes=num_lanes,
        lane_turn=8,
        global_batch_size=64,
    )
    spread, best = effective_documents(r, 64)
    packed, _ = effective_documents(unshuffled(r), 64)
    assert spread >= 0.85 * best
    assert packed < 0.5 * best
