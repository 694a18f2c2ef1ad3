"""Law 5: save at any batch, go on in any world, with or without snapshots: the same packs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Mixing, Order, Packing
from streampack.errors import ResumeError
from streampack.plan import DeviceView, Progress, Recipe, check_resized, epoch_sequence
from tests.helpers.examples import examples
from tests.helpers.planning import all_packs, device_batches, recipe, world_views

METHODS = ["random", "stratified", "per_stream", "device_per_stream"]
ENDS = ["pad", "drop", "carry"]
LENGTHS = [np.random.default_rng(n).integers(1, top, n) for n, top in [(260, 60), (120, 90)]]
SIZE = 12
WORLDS = [
    (1, 2),
    (2, 2),
    (3, 2),
    (1, 4),
    (6, 1),
    (2, 3),
    (1, 12),
    (4, 3),
    (1, 5),
    (2, 7),
    (3, 8),
    (1, 30),
]


def make(
    method: str, epoch_end: str, num_lanes: int = 1, unit: str = "samples", **kwargs
) -> Recipe:
    return recipe(
        kwargs.pop("lengths", LENGTHS),
        mixing=Mixing(batching_method=method, epoch_end=epoch_end, weight_unit=unit, **kwargs),
        packing=Packing(max_seq_len=64, buffer_tokens=512),
        num_lanes=num_lanes,
        lane_run=2,
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


@pytest.mark.thorough
@pytest.mark.parametrize("epoch_end", ENDS)
@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("with_snapshots", [True, False])
def test_going_on_from_every_batch_of_an_epoch_gives_the_rest_of_it(
    method, num_lanes, epoch_end, with_snapshots
):
    r = make(method, epoch_end, num_lanes)
    view = DeviceView(place=1, num_devices=2, batch_size=3)
    whole = device_batches(r, view, 1)

    for done, (position, snapshots) in enumerate(states_of(r, view, 1)):
        rest = device_batches(
            r,
            view,
            1,
            position=position,
            snapshots=json.loads(snapshots) if with_snapshots else [],
        )
        assert [show(batch) for batch in rest] == [show(batch) for batch in whole[done:]]


def show(batch) -> tuple:
    segments, ends = batch.packs.segments.tolist(), batch.packs.ends.tolist()
    return segments, ends, batch.num_rows, batch.epoch, batch.position


@pytest.mark.thorough
@examples(80)
@given(
    method=st.sampled_from(METHODS),
    epoch_end=st.sampled_from(ENDS),
    num_lanes=st.sampled_from([1, 2, 3]),
    unit=st.sampled_from(["samples", "tokens"]),
    worlds=st.tuples(st.sampled_from(WORLDS), st.sampled_from(WORLDS), st.sampled_from(WORLDS)),
    epoch=st.integers(0, 2),
    data=st.data(),
)
def test_going_on_in_other_worlds_and_batch_sizes_two_resumes_deep(
    method, epoch_end, num_lanes, unit, worlds, epoch, data
):
    r = make(method, epoch_end, num_lanes, unit)
    batches = device_batches(r, *world_views(1, 2), epoch)
    # Positions count slots, also those of padding.
    slots = [row for batch in batches for row in rows_of(batch)]
    end, position, snapshots = batches[-1].position, 0, []
    for (num_devices, batch_size), (_, next_size) in pairwise(worlds):
        # One rank's snapshots may be missing what another rank's lanes need.
        place = data.draw(st.integers(0, num_devices - 1))
        sequence = epoch_sequence(
            r,
            DeviceView(place=place, num_devices=num_devices, batch_size=batch_size),
            Progress(epoch=epoch, position=position, snapshots=snapshots),
        )
        for _ in range(data.draw(st.integers(0, 8))):
            batch = sequence.next()
            if batch is None:
                break
            # The loader goes on where the position is a multiple of the next batch size.
            if batch.position % next_size == 0 or batch.position == end:
                position = batch.position
                snapshots = json.loads(json.dumps(sequence.snapshots()))
        sequence.close()
        num_devices, batch_size = worlds[2]
        if position % batch_size == 0 or position == end:
            views = world_views(num_devices, batch_size)
            for given_snapshots in (snapshots, []):
                rest = all_packs(r, views, epoch, position=position, snapshots=given_snapshots)
                assert rest == [pack for pack in slots[position:] if pack]


def rows_of(batch) -> list[list]:
    """The packs of a batch, and an empty one for each row of padding after them."""
    packs = [batch.packs[number].tolist() for number in range(len(batch.packs))]
    return packs + [[]] * (batch.num_rows - len(packs))


@examples(150)
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
    # Where epochs end in whole global batches, they end elsewhere.
    common = len(whole) if epoch_end == "pad" else min(len(whole), position + len(rest))
    if position or method == "random":
        assert (whole[:position] + rest)[:common] == whole[:common]
    assert rest == all_packs(resized, world_views(1, 2), epoch)[position:]
    if method == "random" and epoch_end == "pad":
        assert whole[:position] + rest == whole


@pytest.mark.parametrize(
    ("options", "progress", "size", "message"),
    [
        (
            {"method": "stratified"},
            {"position": 24},
            8,
            r"saved with global_batch_size=12, but .* asks for 8: batching_method='stratified' "
            r"chooses .* other packs from position 24 on; leave .* keep 12, .* start of an epoch",
        ),
        (
            {"method": "random", "epoch_end": "carry"},
            {"epoch": 3},
            40,
            r"asks for 40: with epoch_end='carry' .* so the 3 before would .*; leave it out",
        ),
        (
            {"method": "random"},
            {"position": 60},
            8,
            r"asks for 8, and position 60 is not a multiple of it; set it to 6 or 10, .* keep 12",
        ),
        (
            {"method": "random"},
            {"position": 12},
            24,
            r"is not a multiple of it; set it to 12, or leave",
        ),
    ],
)
def test_a_global_batch_size_that_cannot_go_on_is_refused_with_what_can(
    options, progress, size, message
):
    r = make(**{"epoch_end": "pad"} | options)
    with pytest.raises(ResumeError, match=message):
        check_resized(r, replace(r, global_batch_size=size), Progress(**progress))


@pytest.mark.parametrize("epoch_end", ENDS)
@pytest.mark.parametrize("method", METHODS)
def test_saving_changes_nothing(method, epoch_end):
    r = make(method, epoch_end, 2)
    view = DeviceView(batch_size=4)
    sequence = epoch_sequence(r, view)
    batches = []
    while (batch := sequence.next()) is not None:
        assert sequence.snapshots() == sequence.snapshots()
        batches.append(show(batch))

    assert batches == [show(batch) for batch in device_batches(r, view)]


@pytest.mark.parametrize("epoch_end", ENDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_snapshots_are_json_and_hold_no_numbers_but_integers(method, epoch_end, unit):
    r = make(method, epoch_end, 2, unit)
    sequence = epoch_sequence(r, DeviceView(batch_size=4), Progress(epoch=1))
    for _ in range(5):
        sequence.next()
    snapshots = sequence.snapshots()

    assert json.loads(json.dumps(snapshots)) == snapshots
    assert {(own["lane"], own["queue"]) for own in snapshots} <= {
        (lane, queue) for lane in range(2) for queue in range(r.num_queues)
    }
    assert snapshots

    def leaves(value):
        if isinstance(value, dict):
            assert all(type(key) is str for key in value)
            value = [item for key, item in value.items() if key != "method"]
        if isinstance(value, list):
            return [leaf for item in value for leaf in leaves(item)]
        return [value]

    assert all(type(leaf) is int for leaf in leaves(snapshots))


def test_snapshots_do_not_grow_with_the_epoch():
    r = make("stratified", "pad", lengths=[np.full(60_000, 16), np.full(20_000, 30)])
    r = replace(r, order=Order(seed=3, pack_shuffle=1000))
    sizes = [len(snapshots) for _, snapshots in states_of(r, DeviceView(batch_size=1200), 0)]

    assert max(sizes[len(sizes) // 2 :]) < 1.5 * max(sizes[: len(sizes) // 2])
    assert max(sizes) < 20_000


def test_with_snapshots_a_resume_plans_no_more_than_a_chunk_again():
    asked: list[int] = []
    lengths = np.random.default_rng(0).integers(1, 40, 40_000)
    r = make("random", "pad", lengths=[lengths])
    states = states_of(r, DeviceView(batch_size=600), 0)
    position, snapshots = states[len(states) * 3 // 4]
    whole = r.streams[0].lengths_of

    def count(shard: int):
        asked.append(shard)
        return whole(shard)

    stream = replace(r.streams[0], lengths_of=count)
    again = replace(r, streams=(stream,))
    view = DeviceView(batch_size=600)
    epoch_sequence(again, view, Progress(position=position, snapshots=json.loads(snapshots))).next()
    assert len(asked) <= 625 * 2  # the shards of one block, asked for once or twice


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("epoch_end", ["pad", "carry"])
def test_snapshots_hold_all_that_a_planner_of_many_chunks_goes_on_with(method, unit, epoch_end):
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
        # Counts go on too: samples without tokens since the epoch began.
        assert again._queues.dropped.tolist() == sequence.dropped.tolist()
    assert sequence.dropped.min() >= 0 < sequence.dropped.max()
