"""The shards that are needed next, and those that are finished, for every batch and world."""

from __future__ import annotations

import json
from itertools import product
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Mixing, Order, Packing
from streampack.config.packing import Method
from streampack.order.lanes import Extents
from streampack.order.shuffle import Lengths, Passes
from streampack.plan.device_plan import DeviceView, touched_lanes
from streampack.plan.lane_stream import LaneStream
from streampack.plan.recipe import Recipe
from streampack.plan.state import Progress
from streampack.types import SAMPLE, STREAM
from tests.helpers.examples import crossed, examples
from tests.helpers.planning import epoch_sequence, recipe

METHODS = ["random", "stratified"]
LENGTHS = [np.random.default_rng(n).integers(1, top, n) for n, top in [(2100, 60), (900, 90)]]


def make(method: str, epoch_end: str, num_lanes: int, block: int = 150, **order) -> Recipe:
    return recipe(
        LENGTHS,
        mixing=Mixing(batching_method=method, epoch_end=epoch_end),
        packing=Packing(max_seq_len=64, buffer_tokens=512),
        order=Order(seed=3, shuffle_block_size=block, **order),
        num_lanes=num_lanes,
        lane_turn=2,
        global_batch_size=12,
    )


def keys(rows: np.ndarray) -> list[tuple[int, int]]:
    return [(stream, shard) for stream, shard in rows.tolist()]


def shards_of(r: Recipe, batch) -> set[tuple[int, int]]:
    """The shards that contain a batch's samples."""
    return {
        (
            row[STREAM],
            int(np.searchsorted(r.streams[row[STREAM]].first_sample, row[SAMPLE], "right")) - 1,
        )
        for row in batch.packs.segments.tolist()
    }


@pytest.mark.parametrize(
    ("method_and_end", "lanes_and_devices"),
    crossed(list(product(METHODS, ["pad", "carry"])), [(2, 2), (2, 1), (1, 2), (1, 1)]),
)
def test_every_shard_of_a_batch_was_said_to_be_needed_and_was_not_finished(
    method_and_end, lanes_and_devices
):
    (method, epoch_end), (num_lanes, num_devices) = method_and_end, lanes_and_devices
    r = make(method, epoch_end, num_lanes)
    view = DeviceView(place=num_devices - 1, num_devices=num_devices, batch_size=2)
    sequence = epoch_sequence(r, view, Progress(epoch=1))
    # At a padded end, a device also reaches lanes that it did not track.
    has_all = epoch_end == "carry" or len(touched_lanes(r, view)) == num_lanes
    needed: set[tuple[int, int]] = set(keys(sequence.shards_ahead().ahead))
    assert sequence.shards_ahead() is None
    finished: set[tuple[int, int]] = set()
    num_finished = 0
    while (batch := sequence.next()) is not None:
        own = shards_of(r, batch)
        assert not has_all or own <= needed, "planned before it was needed"
        assert not own & finished, "finished, and touched again"
        needs = sequence.shards_ahead()
        if needs is not None:
            # A shard is needed again in another pass, or if two blocks share it.
            finished = (finished | set(keys(needs.finished))) - set(keys(needs.ahead))
            num_finished += len(needs.finished)
            assert len(set(keys(needs.ahead))) == len(needs.ahead)
            assert not set(keys(needs.ahead)) & set(keys(needs.finished))
            needed = set(keys(needs.ahead))
    sequence.close()
    # Samples are planned in chunks, and an epoch of these is smaller than one chunk.
    assert num_finished > 10 or epoch_end == "carry"


@pytest.mark.thorough
@pytest.mark.parametrize("method", get_args(Method))
def test_a_shard_is_not_finished_while_a_packer_holds_a_sample_of_it(method):
    options = {"short_seq_len": 16} if method == "two_tiers" else {}
    lengths = np.random.default_rng(4).choice([3, 5, 9, 16, 33, 60], 20_000)
    # Packers of windows plan whole chunks, and their packs come from two or more blocks.
    block = 8192 if method in ("best_fit_decreasing", "two_tiers") else 100
    r = recipe(
        [lengths],
        packing=Packing(max_seq_len=64, method=method, **options),
        order=Order(seed=3, shuffle_block_size=block),
    )
    sequence = epoch_sequence(r, DeviceView(batch_size=8))
    needed = set(keys(sequence.shards_ahead().ahead))
    num_finished = 0
    while (batch := sequence.next()) is not None:
        assert shards_of(r, batch) <= needed
        needs = sequence.shards_ahead()
        if needs is not None:
            num_finished += len(needs.finished)
            needed = set(keys(needs.ahead))
    assert num_finished > 100


# Of the samples of 33 tokens and more, none fits another's pack.
@pytest.mark.parametrize(("block", "least"), crossed([8, 100, 255, 2000, 3000], [3, 33]))
def test_no_more_shards_are_needed_together_than_a_cache_limit_has_room_for(block, least):
    r = recipe(
        [np.random.default_rng(4).integers(least, 60, 30_000)],
        packing=Packing(max_seq_len=64),
        order=Order(seed=3, shuffle_block_size=block),
    )
    sequence = epoch_sequence(r, DeviceView(batch_size=4))
    most = 0
    while True:
        needs = sequence.shards_ahead()
        most = most if needs is None else max(most, len(needs.ahead))
        if sequence.next() is None:
            break

    assert r.sizes(0, 0).packed >= 256
    assert most <= LaneStream(r, 0, 0).most_bytes(np.ones(len(r.streams[0].raw_bytes), np.int64))


def test_what_comes_first_is_needed_first_and_no_more_than_three_blocks_are_asked_for():
    r = make("random", "carry", 1, shuffle=False)
    sequence = epoch_sequence(r, DeviceView(batch_size=2))
    first = [shard for stream, shard in keys(sequence.shards_ahead().ahead) if stream == 0]
    # With 64 samples per shard and 150 per block, block 0 spans shards 0 to 2, and block 1 up to 4.
    assert first == [0, 1, 2, 3, 4]
    for _ in range(200):
        sequence.next()
        needs = sequence.shards_ahead()
        if needs is not None:
            assert len([key for key in keys(needs.ahead) if key[0] == 0]) <= 33


def test_nothing_beyond_the_epochs_end_is_asked_for():
    r = recipe(
        [np.full(1000, 10)],
        weights=[{"choose": 100}],
        order=Order(seed=3, shuffle_block_size=128),
        packing=Packing(max_seq_len=64),
    )
    sequence = epoch_sequence(r, DeviceView(batch_size=2))
    needs = sequence.shards_ahead()
    block = LaneStream(r, 0, 0).shards_in(0)
    assert keys(needs.ahead) == [(0, shard) for shard in block.tolist()]


@pytest.mark.parametrize("method", METHODS)
def test_after_a_resume_the_shards_of_buffered_samples_are_needed_too(method):
    r = make(method, "pad", 2)
    view = DeviceView(batch_size=2)
    sequence = epoch_sequence(r, view)
    for _ in range(150):
        batch = sequence.next()
    snapshots = json.loads(json.dumps(sequence.snapshots()))
    again = epoch_sequence(r, view, Progress(position=batch.position, snapshots=snapshots))
    needed = set(keys(again.shards_ahead().ahead))
    for _ in range(3):
        assert shards_of(r, again.next()) <= needed
        needs = again.shards_ahead()
        needed = needed if needs is None else set(keys(needs.ahead))


def passes_of(counts: list[int], block: int, seed: int) -> Passes:
    """Passes over shards with so many samples, of a token each."""
    extents = Extents(
        shards=np.arange(len(counts)),
        firsts=np.zeros(len(counts), np.int64),
        counts=np.array(counts),
    )
    first_sample = np.concatenate([[0], np.cumsum(counts)])
    return Passes(
        extents,
        Lengths(
            first_sample=first_sample,
            of_shard=lambda shard: np.ones(counts[shard], np.int64),
        ),
        number=0,
        block_size=block,
        seed=seed,
        seed_path=(0,),
    )


@examples(30, many=60)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    block=st.integers(1, 60),
    seed=st.integers(-1, 5),
    data=st.data(),
)
def test_two_blocks_never_take_more_bytes_than_stated(counts, block, seed, data):
    num_bytes = np.array([data.draw(st.integers(1, 10_000)) for _ in counts])
    passes = passes_of(counts, block, seed)
    most = passes.most_bytes(num_bytes, 0)
    assert most <= passes.most_bytes(num_bytes, 7) <= num_bytes.sum()
    last = passes.block_of(3 * sum(counts) - 1)
    for number in range(last):
        shards = set(passes.shards_in(number).tolist()) | set(passes.shards_in(number + 1).tolist())
        assert num_bytes[list(shards)].sum() <= most
    assert most <= num_bytes.sum()


def test_of_small_shards_two_blocks_are_stated_to_take_a_cut_one_more_at_each_end():
    passes, num_bytes = passes_of([1] * 300, 10, 3), np.full(300, 100)
    assert passes.most_bytes(num_bytes, 0) == 100 * (2 * 10 + 2)
    assert passes.most_bytes(num_bytes, 7) == 100 * (2 * 10 + 7 + 2)
