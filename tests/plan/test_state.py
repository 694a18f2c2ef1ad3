"""The state of a planned run: what it contains, accepts and refuses."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Mixing, Order, PackCost, Packing
from streampack.config import order as order_config
from streampack.config import packing as packing_config
from streampack.errors import ResumeError
from streampack.plan import state as states
from streampack.plan.device_plan import DeviceView
from streampack.plan.recipe import Recipe
from streampack.plan.state import STATE_VERSION, Progress, read_state
from tests.helpers.examples import examples
from tests.helpers.planning import decode_epochs, encode_epochs, epoch_sequence, recipe

DIGESTS = ["5f2c", "91aa"]


def run_shape(state: dict) -> states.RunShape:
    return states.run_shape(read_state(state))


LENGTHS = [np.arange(1, 60), np.arange(1, 90)]


def make(**kwargs) -> Recipe:
    return recipe(LENGTHS, num_lanes=2, lane_turn=4, global_batch_size=16, **kwargs)


def snapshots_of(r: Recipe, epoch: int, num_batches: int = 1) -> list[dict]:
    sequence = epoch_sequence(r, DeviceView(batch_size=16), Progress(epoch=epoch))
    for _ in range(num_batches):
        sequence.next()
    snapshots = json.loads(json.dumps(sequence.snapshots()))
    sequence.close()
    return snapshots


def state_of(r: Recipe, **kwargs) -> dict:
    progress = Progress(epoch=3, position=48, snapshots=snapshots_of(make(), 3))
    return {**json.loads(json.dumps(encode_epochs(r, DIGESTS, progress))), **kwargs}


def test_a_state_goes_through_json_and_comes_back_whole():
    state = state_of(make())
    progress = decode_epochs(state, make(), DIGESTS)

    assert (progress.epoch, progress.position) == (3, 48)
    assert progress.snapshots == snapshots_of(make(), 3)
    assert len(progress.snapshots) == 2
    assert run_shape(state)[:3] == (2, 4, 16)


@pytest.mark.parametrize(
    "forgiven",
    [
        {"packing": Packing(max_seq_len=64, buffer_tokens=65_536)},
        {"order": Order(seed=3, num_lanes=2)},
        {"order": Order(seed=3, shuffle_block_size=262_144)},
        {"mixing": Mixing(global_batch_size=16)},
        {"mixing": Mixing(arithmetic="mosaicml")},
    ],
)
def test_what_does_not_change_the_sequence_may_change(forgiven):
    assert decode_epochs(state_of(make()), make(**forgiven), DIGESTS).position == 48


@pytest.mark.parametrize(
    ("field", "module", "constant"),
    [
        ("shuffle_block_size", order_config, "SHUFFLE_BLOCK_SIZE"),
        ("buffer_tokens", packing_config, "MIN_BUFFER_TOKENS"),
    ],
)
def test_a_default_that_another_release_changes_is_refused_unless_it_is_set_to_the_saved_value(
    monkeypatch, field, module, constant
):
    packing = Packing(max_seq_len=1024)
    saved = encode_epochs(make(packing=packing), DIGESTS, Progress())
    value = saved["fingerprint"][field]
    assert value == getattr(module, constant)
    monkeypatch.setattr(module, constant, 2 * value)

    with pytest.raises(ResumeError, match=rf"with {field}={value}, but .* has {field}={2 * value}"):
        decode_epochs(saved, make(packing=packing), DIGESTS)
    if field == "shuffle_block_size":
        again = make(packing=packing, order=Order(seed=3, shuffle_block_size=value))
    else:
        again = make(packing=replace(packing, **{field: value}))
    assert decode_epochs(saved, again, DIGESTS) == Progress()


@pytest.mark.parametrize(
    "mixing", [{"batching_method": "stratified"}, {"weight_unit": "tokens"}, {"epoch_end": "carry"}]
)
def test_other_totals_of_the_streams_are_refused_where_packs_depend_on_them(mixing):
    r = make(mixing=Mixing(**mixing))
    other = replace(r, streams=(replace(r.streams[0], num_tokens=9999), r.streams[1]))

    with pytest.raises(ResumeError, match=r"tokens=.* has tokens=.*restore the length files"):
        decode_epochs(state_of(r), other, DIGESTS)


@pytest.mark.parametrize("before", ["5f2c", "5f2c:1"])
@pytest.mark.parametrize("now", ["5f2c", "5f2c:1"])
def test_a_length_file_may_be_added_to_a_stream_or_deleted(before, now):
    state = encode_epochs(make(), [before, "91aa"], Progress(epoch=3, position=48))
    assert decode_epochs(state, make(), [now, "91aa"]).position == 48


def test_a_state_of_iterables_is_refused_by_its_kind():
    with pytest.raises(ResumeError, match="is of a dataset of iterables"):
        run_shape(state_of(make(), kind="iterable"))


@pytest.mark.parametrize("key", ["streams", "chapters"])
def test_what_only_states_of_chapters_have_is_ignored_in_others(key):
    assert decode_epochs(state_of(make(), **{key: 7}), make(), DIGESTS).position == 48


@pytest.mark.parametrize("cost", [None, PackCost(80, hidden_size=20)])
def test_options_that_are_not_set_are_left_out_and_those_with_defaults_are_as_if_they_were_set(
    cost,
):
    packing = Packing(max_seq_len=64, cost=cost)
    state = state_of(make(packing=packing))
    assert None not in state["fingerprint"].values()
    same = replace(packing, cost=cost and replace(cost, capacity=96), buffer_tokens=65_536)
    assert decode_epochs(state, make(packing=same), DIGESTS).position == 48


def test_the_fingerprint_names_no_paths_ranks_nodes_or_workers():
    text = json.dumps(state_of(make()))

    assert not any(word in text for word in ("rank", "node", "worker", "local", "remote", "/"))


# Damaged and hostile states.

HOSTILE = [None, True, -1, 0, 1, 2**31, 2**42 + 1, 2**63, 2**200, 1.5, float("nan"), float("inf")]
HOSTILE += ["", "1", "x" * 10_000, b"1", [], [[]], {}, {"lane": 0}, object, {1, 2}, (1,)]
HOSTILE += [np.arange(3), np.int64(3), [0] * 10_000, [[0] * 6], [["0"] * 6], [[2**70] * 6]]
RECIPES = [
    make(mixing=Mixing(batching_method=method, epoch_end=end, weight_unit=unit))
    for method in ("random", "stratified")
    for end in ("pad", "carry")
    for unit in ("samples", "tokens")
]
RECIPES += [
    make(packing=Packing(max_seq_len=64, **options))
    for options in (
        {"method": "next_fit"},
        {"method": "two_tiers", "short_seq_len": 16},
        {"method": "knapsack"},
        {"method": "concat"},
    )
]


@cache
def saved(number: int) -> dict:
    """The state saved by a run of a recipe."""
    r = RECIPES[number]
    progress = Progress(epoch=1, position=16, snapshots=snapshots_of(r, 1))
    return encode_epochs(r, DIGESTS, progress)


def places(value: object, path: tuple = ()) -> list[tuple]:
    """The path of every value in a state."""
    if isinstance(value, dict):
        inner = [place for key, own in value.items() for place in places(own, (*path, key))]
    elif isinstance(value, list):
        inner = [place for i, own in enumerate(value) for place in places(own, (*path, i))]
    else:
        inner = []
    return [path, *inner] if path else inner


def put(state: dict, path: tuple, value: object) -> None:
    holder = state
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = copy.deepcopy(value)  # so that it can be damaged further


# Faults: pickle_state_dict.
@pytest.mark.thorough
@pytest.mark.parametrize("most", [120, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_damaged_state_is_refused_or_gives_batches_and_nothing_else(most):
    @examples(most)
    @given(data=st.data(), number=st.integers(0, len(RECIPES) - 1))
    def law(data, number):
        state = json.loads(json.dumps(saved(number)))
        state["snapshots"] = json.loads(state["snapshots"])  # so that its contents are damaged too
        for _ in range(data.draw(st.integers(1, 2))):
            found = places(state)
            path = found[data.draw(st.integers(0, len(found) - 1))]
            hostile = st.sampled_from(HOSTILE) | st.integers() | st.integers(0, 400)
            put(state, path, data.draw(hostile))
        with suppress(ResumeError):
            first_batch(state, RECIPES[number])

    law()


def first_batch(state: dict, r: Recipe) -> None:
    num_lanes, lane_turn, global_batch_size, *_ = run_shape(state)
    r = replace(
        r,
        num_lanes=min(num_lanes, 8),  # more are slow, not wrong
        lane_turn=lane_turn,
        global_batch_size=min(global_batch_size, 4096),
    )
    progress = decode_epochs(state, r, DIGESTS)
    if progress.epoch > 100 or progress.position > 1000:
        return  # valid, but it takes long to get there
    sequence = epoch_sequence(r, DeviceView(batch_size=16), progress)
    batch = sequence.next()
    sequence.close()
    assert batch is None or batch.num_rows == 16


@pytest.mark.parametrize(
    "key", ["version", "epoch", "position", "num_lanes", "lane_run", "global_batch_size"]
)
@pytest.mark.parametrize("value", [None, True, "1", 1.0, -1, 2**63, [1], {"a": 1}])
def test_every_number_of_a_state_must_be_an_integer_in_its_range(key, value):
    state = state_of(make(), **{key: value})

    def load() -> None:
        run_shape(state)
        decode_epochs(state, make(), DIGESTS)

    with pytest.raises(ResumeError, match=rf"{key} "):
        load()


@pytest.mark.parametrize("changed", [{"num_packs": 3}, {"lane": 1}, {"digest": ""}, {"more": 1}])
def test_a_damaged_snapshot_is_dropped_with_a_warning(changed, caplog):
    saved = state_of(make())
    first, second = json.loads(saved["snapshots"])

    progress = decode_epochs(saved | {"snapshots": [first | changed, second]}, make(), DIGESTS)

    assert [kept["lane"] for kept in progress.snapshots] == [second["lane"]]
    assert "1 of the state's snapshots are damaged, or of another state" in caplog.text
    assert decode_epochs(saved, make(), DIGESTS).snapshots == snapshots_of(make(), 3)


@pytest.mark.parametrize("snapshots", [7, None, "{", "[" * 9999, "[7]", '"abc"', ["x"], [{}]])
def test_what_is_no_list_of_snapshots_is_dropped_with_a_warning(snapshots, caplog):
    state = state_of(make(), snapshots=snapshots)

    assert decode_epochs(state, make(), DIGESTS) == Progress(epoch=3, position=48)
    assert "all of the state's snapshots are damaged" in caplog.text


@pytest.mark.parametrize("lanes", [2**14 + 1, 10**6])
def test_lanes_that_would_take_long_to_plan_are_refused(lanes):
    with pytest.raises(ResumeError, match=f"num_lanes is {lanes}, .* at most 16384"):
        run_shape({"version": STATE_VERSION, "num_lanes": lanes})


@pytest.mark.parametrize("method", ["stratified", "per_stream"])
def test_a_state_of_a_million_epochs_that_would_all_be_walked_is_refused(method):
    r = make(mixing=Mixing(batching_method=method, epoch_end="carry"))
    state = encode_epochs(r, DIGESTS, Progress(epoch=50_000))
    assert decode_epochs(state, r, DIGESTS).epoch == 50_000
    with pytest.raises(ResumeError, match=r"epoch is 1000000, .* at most 50000"):
        decode_epochs(state | {"epoch": 10**6}, r, DIGESTS)
