"""Packers keep their bounds; start-up and memory do not grow with the streams."""

from __future__ import annotations

import json
import pickle
import time
import tracemalloc
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Mixing, Order, Packing
from streampack.errors import DataError
from streampack.mix.weights import Quota
from streampack.plan.device_plan import DeviceView
from streampack.plan.lane_stream import LaneStream
from streampack.plan.recipe import PlanStream, Recipe
from streampack.plan.state import Progress
from streampack.types import LENGTH
from tests.helpers.examples import crossed
from tests.helpers.planning import (
    covered,
    device_batches,
    epoch_sequence,
    global_batches,
    recipe,
    synthetic_stream,
)

METHODS = ["random", "stratified", "per_stream", "device_per_stream"]
FIFTY_MILLION = 50_000_000


def large(num_samples: int, method: str, num_lanes: int, asked: list[int], **mixing) -> Recipe:
    """Streams from which an epoch takes everything, or four fifths of their tokens."""
    by_tokens = mixing.get("weight_unit") == "tokens"
    streams = [
        synthetic_stream(num_samples, 0, asked=asked, has_totals=by_tokens),
        synthetic_stream(num_samples // 2, 1, asked=asked, has_totals=by_tokens),
        synthetic_stream(60, 2, shard_size=20),
    ]
    if by_tokens:
        quotas = [Quota(amount=each.num_tokens * 4 // 5, unit="tokens") for each in streams]
        streams = [replace(s, quota=q) for s, q in zip(streams, quotas, strict=True)]
    return Recipe(
        streams=tuple(streams),
        packing=Packing(max_seq_len=8192),
        mixing=Mixing(batching_method=method, **mixing),
        order=Order(seed=1),
        num_lanes=num_lanes,
        lane_turn=4,
        global_batch_size=8 * num_lanes,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("lanes_and_unit", "end_and_epoch"),
    crossed(
        list(product([1, 4], ["samples", "tokens"])),
        [("pad", 0), ("carry", 0), ("pad", 1), ("pad", 3)],
    ),
)
def test_fifty_million_samples_start_at_once_and_ask_for_a_block_of_lengths(
    method, lanes_and_unit, end_and_epoch
):
    (num_lanes, unit), (epoch_end, epoch) = lanes_and_unit, end_and_epoch
    asked: list[int] = []
    begin = time.process_time()
    r = large(FIFTY_MILLION, method, num_lanes, asked, epoch_end=epoch_end, weight_unit=unit)
    view = DeviceView(place=num_lanes - 1, num_devices=num_lanes, batch_size=4)
    sequence = epoch_sequence(r, view, Progress(epoch=epoch))
    for _ in range(3):
        assert len(sequence.next().packs) == 4
    sequence.close()

    # A block has 262,144 samples: six or seven shards of 50,000 in each of the two large streams.
    # An epoch that begins late in a block or pass also needs the next one. Every lane needs its two
    # cut shards, and the block where its tokens begin.
    most = 16 if not epoch else 32 if unit == "samples" else 32 * num_lanes
    assert len(set(asked)) <= most
    assert time.process_time() - begin < 20  # a first case compiles kernels


def counting(r: Recipe, asked: list[tuple[str, int]]) -> Recipe:
    """The recipe, with streams that record each shard they are asked for the lengths of."""

    def counted(stream: PlanStream) -> PlanStream:
        def ask(shard: int) -> np.ndarray:
            asked.append((stream.name, shard))
            return stream.lengths_of(shard)

        return replace(stream, lengths_of=ask)

    return replace(r, streams=tuple(map(counted, r.streams)))


@pytest.mark.parametrize("method", METHODS)
def test_by_tokens_an_epoch_begins_where_the_one_before_was_seen_to_end(method):
    asked: list[tuple[str, int]] = []
    r = counting(small(60_000, method, weight_unit="tokens", epoch_size=700_000), asked)
    r = replace(r, num_lanes=1)
    for epoch in range(3):
        asked.clear()
        sequence = epoch_sequence(r, DeviceView(batch_size=64), Progress(epoch=epoch))
        sequence.next()
        # The blocks of a chunk, for two streams: four of 32 shards, and the cut ones.
        assert len(set(asked)) <= 2 * 4 * 34
        while sequence.next() is not None:
            pass
        sequence.close()


@pytest.mark.parametrize("mixing", [{}, {"weight_unit": "tokens", "epoch_size": 700_000}])
def test_going_on_from_snapshots_asks_for_no_lengths_of_what_lies_before(mixing):
    asked: list[tuple[str, int]] = []
    r = counting(small(60_000, **mixing), asked)
    r = replace(r, num_lanes=1)
    view = DeviceView(batch_size=64)
    first = epoch_sequence(r, view, Progress(epoch=1))
    for _ in range(40):
        position = first.next().position
    state = json.loads(json.dumps(first.snapshots()))
    first.close()
    asked.clear()
    again = epoch_sequence(replace(r), view, Progress(epoch=1, position=position, snapshots=state))
    again.next()
    assert len(set(asked)) <= 2 * 4 * 34


def peak_bytes(run) -> int:
    """Peak memory of numpy and Python, in addition to what they had before."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def small(num_samples: int, method: str = "random", **kwargs) -> Recipe:
    lengths = np.random.default_rng(0).integers(1, 40, num_samples)
    mixing = Mixing(batching_method=method, **kwargs)
    return recipe(
        [lengths, lengths[: num_samples // 2]],
        mixing=mixing,
        # Shuffling in blocks bounds the memory of an order.
        order=Order(seed=1, shuffle_block_size=2048),
        packing=Packing(max_seq_len=64, buffer_tokens=1024),
        num_lanes=2,
        global_batch_size=64,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "epoch_end"), crossed(["random", "stratified"], ["carry", "pad"])
)
def test_the_memory_of_a_whole_epoch_does_not_grow_with_it(method, epoch_end):
    def read(r: Recipe) -> None:
        sequence = epoch_sequence(r, DeviceView(batch_size=64))
        while sequence.next() is not None:
            sequence.snapshots()

    sizes = [small(num, method, epoch_end=epoch_end) for num in (20_000, 80_000)]
    read(small(500, method))
    peaks = [peak_bytes(lambda r=r: read(r)) for r in sizes]

    assert peaks[1] < 1.5 * peaks[0] + 200_000


@pytest.mark.parametrize("epoch_end", ["pad", "carry"])
def test_going_on_late_without_snapshots_holds_no_more_than_going_on_early(epoch_end):
    r = small(60_000, epoch_end=epoch_end)

    def go_on(position: int) -> None:
        sequence = epoch_sequence(r, DeviceView(batch_size=64), Progress(position=position))
        assert sequence.next() is not None
        sequence.close()

    go_on(0)
    early, late = (peak_bytes(lambda p=p: go_on(p)) for p in (640, 64 * 200))
    assert late < 1.5 * early + 200_000


@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=300),
    method=st.sampled_from(METHODS),
    buffer_tokens=st.integers(64, 600),
    buffer_samples=st.integers(1, 12),
)
def test_no_packer_ever_holds_more_than_its_bounds(lengths, method, buffer_tokens, buffer_samples):
    r = recipe(
        [np.array(lengths), np.array(lengths[::-1])],
        mixing=Mixing(batching_method=method),
        packing=Packing(max_seq_len=64, buffer_tokens=buffer_tokens, buffer_samples=buffer_samples),
        num_lanes=1,
        global_batch_size=4,
    )
    sequence = epoch_sequence(r, DeviceView(batch_size=2))
    while sequence.next() is not None:
        for own in sequence.snapshots():
            held = own["packer"]["buffered"]
            assert len(held) <= buffer_samples
            assert sum(row[LENGTH] for row in held) <= buffer_tokens

    assert sequence.totals.packer_tokens <= r.num_queues * buffer_tokens


@pytest.mark.parametrize(("method", "num_lanes"), crossed(METHODS, [3, 1]))
def test_an_epoch_asks_for_the_lengths_of_each_shard_a_few_times_at_most(method, num_lanes):
    asked: list[tuple[str, int]] = []
    r = replace(small(30_000, method), num_lanes=num_lanes, global_batch_size=64 * num_lanes)
    device_batches(counting(r, asked), DeviceView(num_devices=num_lanes, batch_size=1))

    # Once to plan; in other lanes, once to bound them and once to find their ends. If two blocks
    # share a shard, both ask for it.
    assert len(asked) <= 4 * len(set(asked))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("num_lanes", "epoch_and_mixing"),
    crossed(
        [1, 2, 4],
        list(
            product([0, 2], [{"epoch_end": "carry"}, {"weight_unit": "tokens", "epoch_size": 5000}])
        ),
    ),
)
def test_streams_of_which_everything_is_dropped_are_an_error_where_they_would_never_end(
    method, num_lanes, epoch_and_mixing
):
    epoch, mixing = epoch_and_mixing
    r = recipe(
        [np.full(200, 90), np.full(300, 80)],
        mixing=Mixing(batching_method=method, **mixing),
        packing=Packing(max_seq_len=64, overflow="drop"),
    )
    r = replace(r, num_lanes=num_lanes)

    with pytest.raises(DataError, match=r"stream \['s\d.*longer than max_seq_len=64, and overflow"):
        epoch_sequence(r, DeviceView(batch_size=8), Progress(epoch=epoch)).next()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_lanes", [1, 3])
def test_a_stream_of_which_everything_is_dropped_is_passed_over_where_epochs_end(method, num_lanes):
    r = recipe(
        [np.full(200, 90), np.full(300, 40)],
        weights=[{"repeat": 9}, {}],
        mixing=Mixing(batching_method=method),
        packing=Packing(max_seq_len=64, overflow="drop"),
        num_lanes=num_lanes,
    )
    packs = [pack for batch, _ in global_batches(r) for pack in batch]

    assert [len(pieces) for pieces in covered(packs, 2)] == [0, 300]


def test_a_recipe_that_was_asked_for_lanes_pickles_no_larger():
    stream = replace(synthetic_stream(100_000), lengths_of=len)
    r = replace(recipe([np.ones(9, np.int64)]), streams=(stream,), num_lanes=8)
    num_bytes = len(pickle.dumps(r))
    whole = LaneStream(r, 0, 5)
    again = pickle.loads(pickle.dumps(r))
    assert len(pickle.dumps(r)) == num_bytes
    assert LaneStream(again, 0, 5).shards_in(0).tolist() == whole.shards_in(0).tolist()
