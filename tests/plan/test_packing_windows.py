"""Windows packed as a whole: the fill, how long samples wait, and equality in all worlds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Mixing, Order, Packing
from streampack.mix.draw import CHUNK
from streampack.pack import fit_samples, make_packer
from streampack.plan.device_plan import DeviceView
from streampack.plan.pack_queue import PackQueue
from streampack.plan.recipe import Recipe
from streampack.types import LENGTH, SAMPLE, Packs
from tests.helpers.examples import crossed, examples
from tests.helpers.lengths import synthetic_lengths
from tests.helpers.planning import (
    epoch_sequence,
    queue_packs,
    recipe,
    synthetic_stream,
)

METHODS = ["random", "stratified", "per_stream", "device_per_stream"]
WINDOWED = "best_fit_decreasing"
LENGTHS = [np.random.default_rng(n).integers(1, top, n) for n, top in [(6000, 150), (900, 40)]]

orders = st.builds(
    Order,
    seed=st.integers(0, 5),
    pack_shuffle=st.sampled_from([None, 0, 1, 40, 300, 10**6]),
    shuffle_block_size=st.sampled_from([None, 50, 5000, 20_000]),
)


def make(order: Order, method: str = "random", num_lanes: int = 1, **mixing) -> Recipe:
    return recipe(
        LENGTHS,
        mixing=Mixing(batching_method=method, **mixing),
        packing=Packing(max_seq_len=64, method=WINDOWED, buffer_tokens=512),
        order=order,
        num_lanes=num_lanes,
        lane_turn=2,
        global_batch_size=8 * num_lanes,
    )


def fill_of(packs: Packs, size: int) -> float:
    return 100 * packs.segments[:, LENGTH].sum() / (len(packs) * size)


def planned(lengths: np.ndarray, size: int, order: Order | None = None) -> Packs:
    """All packs of an epoch in one lane."""
    r = recipe([lengths], packing=Packing(max_seq_len=size), order=order, global_batch_size=512)
    sequence = epoch_sequence(r, DeviceView(batch_size=512))
    parts = []
    while (batch := sequence.next()) is not None:
        parts.append(batch.packs)
    sequence.close()
    return Packs.join(parts)


@pytest.mark.parametrize("kind", ["uniform", "chat"])
def test_hard_lengths_fill_packs_nearly_as_one_window_over_all_samples_would(kind):
    lengths = synthetic_lengths(kind, 100_000)
    samples = np.zeros((len(lengths), 4), np.int64)
    samples[:, 3] = lengths
    best = make_packer(Packing(max_seq_len=2048, method=WINDOWED))
    segments = fit_samples(samples, 2048, "split", [kind])

    found = planned(lengths, 2048)

    assert found.segments[:, LENGTH].sum() == lengths.sum()
    assert (
        fill_of(found, 2048) > fill_of(Packs.join([best.add(segments), best.flush()]), 2048) - 0.2
    )


@pytest.mark.parametrize(("kind", "size"), crossed(["web", "sft", "long"], [2048, 8192, 32_768]))
def test_ordinary_lengths_fill_all_packs_but_the_last(kind, size):
    found = planned(synthetic_lengths(kind, 100_000), size)

    assert fill_of(found, size) > 99.97 - 100 / len(found)


def test_windows_of_256_samples_span_smaller_shuffle_blocks_and_fill_packs():
    lengths = synthetic_lengths("uniform", 20_000)

    found = planned(lengths, 2048, Order(shuffle_block_size=32))

    assert fill_of(found, 2048) > 97.5


@pytest.mark.thorough
@examples(6, many=40)
@given(orders, st.sampled_from(METHODS), st.sampled_from([1, 3]))
def test_a_sample_waits_for_two_windows_at_most(order, method, num_lanes):
    r = make(order, method, num_lanes)
    for queue in range(r.num_queues):
        lane = num_lanes - 1
        # Next fit packs almost in the order of arrival.
        arrivals = replace(
            r,
            packing=Packing(max_seq_len=64, method="next_fit"),
            order=replace(order, pack_shuffle=0),
        )
        came = [
            row[SAMPLE] for pack in queue_packs(PackQueue(arrivals, lane, queue, 0)) for row in pack
        ]
        packs = list(queue_packs(PackQueue(r, lane, queue, 0)))
        left = [row[SAMPLE] for pack in packs for row in pack]
        assert sorted(left) == sorted(came)
        sizes = r.sizes(lane, queue)
        shuffled, window = sizes.max_packs, max(sizes.packed, sizes.max_samples) + CHUNK
        if len(set(came)) < len(came):
            continue  # pieces and streams that share numbers
        places = {sample: place for place, sample in enumerate(came)}
        moved = max(abs(places[sample] - place) for place, sample in enumerate(left))
        assert moved <= 3 * window + shuffled * 64


@pytest.mark.parametrize("num_lanes", [1, 4])
@pytest.mark.parametrize("max_seq_len", [2048, 65_536])
def test_the_first_batch_needs_no_more_shards_than_in_order(num_lanes, max_seq_len):
    asked: dict[str, list[int]] = {WINDOWED: [], "next_fit": []}
    for method, shards in asked.items():
        r = Recipe(
            streams=(synthetic_stream(400_000, shard_size=500, asked=shards),),
            packing=Packing(max_seq_len=max_seq_len, method=method),
            mixing=Mixing(),
            order=Order(shuffle_block_size=50_000),
            num_lanes=num_lanes,
            lane_turn=2,
            global_batch_size=16,
        )
        sequence = epoch_sequence(r, DeviceView(batch_size=16))
        sequence.next()
        sequence.close()

    assert 0 < len(set(asked[WINDOWED])) <= len(set(asked["next_fit"]))
