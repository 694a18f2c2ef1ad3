"""Resume: save after any batch and load in any world; bad states are refused."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from streampack.errors import ResumeError
from streampack.loader.loader import PackedDataLoader
from streampack.plan.pack_queue import PackQueue
from streampack.planned.dataset import PackedStreamingDataset
from streampack.runtime.resumable import engine_of
from streampack.streams import Stream
from streampack.testing import assert_resumes
from streampack.world import World
from tests.helpers import conformance
from tests.helpers.conformance import Written, all_rows, show, worlds
from tests.helpers.examples import crossed, examples
from tests.helpers.ranks import on_ranks

METHODS = ("random", "stratified", "per_stream", "device_per_stream")
ENDS = ("drop", "carry", "pad")
GLOBAL_BATCH = 12


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Written:
    rng = np.random.default_rng(8)
    lengths = [rng.integers(1, 50, 60).tolist(), rng.integers(1, 150, 30).tolist()]
    return conformance.write_streams(tmp_path_factory.mktemp("streams"), lengths)


def make(written: Written, *, method: str = "random", **options: Any) -> PackedStreamingDataset:
    mixing = {"batching_method": method, "global_batch_size": GLOBAL_BATCH}
    mixing |= options.pop("mixing", {})
    order = {"num_lanes": 3} | options.pop("order", {})
    return conformance.make(written, mixing=mixing, order=order, **options)


def states_of(dataset: PackedStreamingDataset) -> tuple[list[Any], list[str]]:
    """The batches of an epoch, and the state after each of them as text."""
    loader = PackedDataLoader(dataset)
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(json.dumps(loader.state_dict()))
    return batches, states


def loaded(dataset: PackedStreamingDataset, state: dict[str, Any] | str) -> PackedStreamingDataset:
    dataset.load_state_dict(json.loads(state) if isinstance(state, str) else state)
    return dataset


# Faults: resume_same.
@pytest.mark.parametrize(("method", "epoch_end"), crossed(METHODS, ENDS))
def test_a_loader_goes_on_from_every_batch(written, method, epoch_end):
    def loader() -> PackedDataLoader:
        return PackedDataLoader(make(written, method=method, mixing={"epoch_end": epoch_end}))

    assert assert_resumes(loader) > 10


@pytest.mark.parametrize(("method", "epoch_end"), crossed(METHODS, ENDS))
def test_snapshots_are_only_a_speed_up(written, method, epoch_end):
    epoch = 0 if epoch_end == "drop" else 1
    options = {"method": method, "mixing": {"epoch_end": epoch_end}}
    dataset = make(written, **options)
    dataset.set_epoch(epoch)
    batches, states = states_of(dataset)
    shown = [show(batch) for batch in batches]
    for done, (batch, state) in enumerate(zip(batches[:-1], states[:-1], strict=True), 1):
        small = json.loads(state) | {"snapshots": "[]"}
        assert small == dataset.state_after(batch) | {"snapshots": "[]"}
        assert [show(b) for b in loaded(make(written, **options), small)] == shown[done:]
        del small["snapshots"]
        if done % 5 == 0:  # and a state without the field
            assert [show(b) for b in loaded(make(written, **options), small)] == shown[done:]


# Faults: resume_odd_stop_3_workers, resume_workers_2_to_0, resume_workers_2_to_3.
@pytest.mark.parametrize(("num_workers", "prefetch_factor"), [(0, 2), (2, 1), (2, 7)])
def test_the_state_is_of_what_was_delivered_whatever_was_read_ahead(
    written, num_workers, prefetch_factor
):
    batches, states = states_of(make(written))
    loader = PackedDataLoader(
        make(written), num_workers=num_workers, prefetch_factor=prefetch_factor
    )
    for batch, wanted in zip(loader, states, strict=True):
        own = loader.state_dict()
        assert own["position"] == batch["position"] == json.loads(wanted)["position"]
    loader = PackedDataLoader(
        make(written), num_workers=num_workers, prefetch_factor=prefetch_factor
    )
    for stop in (1, 4):
        for done, _ in enumerate(loader, 1):
            if done == stop:
                break
        state = loader.state_dict()
        rest = [show(batch) for batch in PackedDataLoader(loaded(make(written), state))]
        assert rest == [show(batch) for batch in batches[stop:]]
        loader.load_state_dict(
            json.loads(states[-1]) | {"epoch": 0, "position": 0, "snapshots": []}
        )


def lanes_of(state: dict[str, Any]) -> list[int]:
    return [snapshot["lane"] for snapshot in json.loads(state["snapshots"])]


def gather_states(rank: int, _: Path, written: Written) -> list[Any]:
    loader = PackedDataLoader(make(written, world=worlds(2, 2)[rank], order={"num_lanes": 2}))
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    states = [loader.state_dict(), loader.gather_state()]
    next(batches) if rank else None
    try:
        loader.gather_state()
    except ResumeError as error:
        states.append({"refused": str(error)})
    return states


def test_ranks_gather_a_state_that_no_lane_is_planned_again_from(written, tmp_path, monkeypatch):
    first, second = on_ranks(tmp_path, gather_states, 2, written=written)
    # A state may have lanes of the other rank too, see planned/test_left_snapshots.py.
    assert [rank in lanes_of(own[0]) for rank, own in enumerate((first, second))] == [True, True]
    assert first[1] == second[1]
    assert lanes_of(first[1]) == [0, 1]
    assert "rank 0 is at position=12, but rank 1 at 16; gather" in first[2]["refused"]

    restored = []
    restore = PackQueue.restore

    def note(planner: PackQueue, snapshot: Any) -> None:
        restored.append(snapshot["lane"])
        restore(planner, snapshot)

    monkeypatch.setattr(PackQueue, "restore", note)
    for rank, world in enumerate(worlds(2, 2)):
        whole = [show(b) for b in make(written, world=world, order={"num_lanes": 2})]
        dataset = make(written, world=world, order={"num_lanes": 2})
        assert [show(b) for b in loaded(dataset, first[1])] == whole[3:]
        assert restored.pop(0) == rank


def test_a_state_is_gathered_without_a_process_group_too(written):
    loader = PackedDataLoader(make(written))
    next(iter(loader))
    state = loader.state_dict()
    gathered = loader.gather_state()
    assert json.loads(gathered.pop("snapshots")) == json.loads(state.pop("snapshots"))
    assert gathered == state


# Faults: resume_ranks_1_to_2, resume_ranks_2_to_1.
@given(data=st.data())
@examples(5, many=30)
def test_any_world_goes_on_where_another_world_stopped(written, data):
    draw = data.draw
    method = draw(st.sampled_from(METHODS), "method")
    lanes = draw(st.sampled_from([1, 2, 3, 6]), "lanes")
    # One stream fills no global batch, so per_stream with drop refuses it; see test_last_batches.
    ends = ["pad", "carry"] if method == "per_stream" else ["pad", "drop", "carry"]
    options = {
        "mixing": {
            "batching_method": method,
            "global_batch_size": GLOBAL_BATCH,
            "epoch_end": draw(st.sampled_from(ends), "epoch_end"),
        },
        "order": {"num_lanes": lanes},
    }
    # The size that per_stream needs and that a first run would suggest.
    fitting = [b for b in (1, 2, 3, 4, 6) if GLOBAL_BATCH % (lanes * b) == 0]
    first_size = draw(st.sampled_from(fitting), "first batch_size")
    # A run keeps its lanes and global batches unless they are given.
    later = {"mixing": options["mixing"] | {"global_batch_size": None}}
    epoch = draw(st.integers(0, 1), "epoch")

    def whole(size: int) -> PackedStreamingDataset:
        dataset = conformance.make(written, batch_size=size, **options)
        dataset.set_epoch(epoch)
        return dataset

    everything = all_rows([whole(first_size)])
    state = whole(first_size).state_dict()
    done: list[Any] = []
    for _ in range(draw(st.integers(1, 3), "worlds")):
        num_nodes, per_node = draw(st.integers(1, 3), "nodes"), draw(st.integers(1, 3), "per node")
        # As large a window as an epoch of carry: there is none larger, were it the run's first.
        most = 54 // (num_nodes * per_node)
        sizes = [n for n in range(1, most + 1) if state["position"] % n == 0]
        batch_size = draw(st.sampled_from(sizes), "batch_size")
        ranks = [
            conformance.make(written, batch_size=batch_size, world=world, **later)
            for world in worlds(num_nodes * per_node, num_nodes)
        ]
        # Batch k goes to the device at place k mod devices, no matter where the run resumes.
        first = state["position"] // batch_size
        ranks.sort(key=lambda rank: (rank.world.place - first) % rank.world.num_devices)
        loaders = [PackedDataLoader(loaded(rank, state)) for rank in ranks]
        saver = draw(st.sampled_from(loaders), "saver")
        num_steps = draw(st.integers(1, 60 // (len(ranks) * batch_size) + 1), "steps")
        for step in islice(conformance.steps(loaders), num_steps):
            if step[0]["epoch"] == epoch:
                done += [row for batch in step for row in conformance.rows(batch)]
                # The state of a single rank, with the snapshots of its lanes, works for all ranks.
                state = json.loads(json.dumps(saver.state_dict()))
    assert done == everything[: len(done)]
    last = loaded(conformance.make(written, batch_size=1, **later), state)
    rest = [row for b in last if b["epoch"] == epoch for row in conformance.rows(b)]
    assert done + rest == everything


# Refusals.


@pytest.fixture(scope="module")
def state(written) -> dict[str, Any]:
    return json.loads(states_of(make(written))[1][4])


# Faults: resume_block_size_changed, resume_shuffle_algo_changed.
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weights": [{"repeat": 2}, {}]},
            r"weights\['.*'\]=\[60, .*\[120, .*; resume with the run's",
        ),
        ({"max_seq_len": 128}, r"max_seq_len=64.*max_seq_len=128"),
        ({"packing": {"method": "next_fit"}}, r"method='best_fit_decreasing'.*method='next_fit'"),
        ({"packing": {"buffer_tokens": 640}}, r"buffer_tokens=65536.*buffer_tokens=640"),
        ({"packing": {"eos_id": 1}}, r"eos_id=None.*eos_id=1"),
        ({"method": "stratified"}, r"batching_method='random'.*batching_method='stratified'"),
        ({"mixing": {"epoch_end": "drop"}}, r"epoch_end='pad'.*epoch_end='drop'"),
        ({"mixing": {"sampling_method": "fixed"}}, r"sampling_method='balanced'.*'fixed'"),
        ({"mixing": {"weight_unit": "tokens"}}, r"weight"),
        (
            {"mixing": {"epoch_size": 50}},
            r"weights\['.*'\]=\[60, .*; resume with .* epoch_size and weight_unit, or start",
        ),
        (
            {"mixing": {"global_batch_size": 24}},
            r"global_batch_size=12.*asks for 24, and position 10 is not a multiple.*set it to 10",
        ),
        (
            {"order": {"num_lanes": 2}},
            r"num_lanes=3.*has num_lanes=2; a run keeps its num_lanes: set 3",
        ),
        ({"order": {"seed": 4}}, r"seed=3.*seed=4"),
        ({"order": {"shuffle": False}}, r"shuffle=True.*shuffle=False"),
        ({"order": {"shuffle_block_size": 10}}, r"shuffle_block_size=262144.*size=10"),
    ],
)
def test_a_state_of_another_sequence_is_refused_by_the_differing_field(
    written, state, options, message
):
    dataset = make(written, **options)
    before = [show(batch) for batch in dataset]
    dataset.set_epoch(0)
    with pytest.raises(ResumeError, match=message):
        dataset.load_state_dict(state)
    # A refusal changes nothing.
    assert [show(batch) for batch in dataset] == before


def other_streams(written: Written, tmp_path: Path) -> dict[str, list[Stream]]:
    lengths = written.lengths
    changed = conformance.write_streams(tmp_path, [[*lengths[0][:-1], 9], lengths[1]])
    first, second = (re.escape(repr(path.name)) for path in written.paths)
    return {
        rf"streams in another order: {first}, {second}; pass them": written.streams()[::-1],
        rf"saved with 2 streams, but this dataset has 1, {first}; res": written.streams()[:1],
        rf"stream {first} \(streams\[0\]\) has changed .*: .* data, or": changed.streams(),
    }


# Faults: resume_dataset_grew.
def test_a_state_of_other_streams_is_refused(written, state, tmp_path):
    blueprint = make(written)
    for message, streams in other_streams(written, tmp_path).items():
        dataset = PackedStreamingDataset(
            streams=streams,
            packing=engine_of(blueprint).recipe.packing,
            mixing=engine_of(blueprint).recipe.mixing,
            order=engine_of(blueprint).recipe.order,
            batch_size=2,
            world=World(),
        )
        with pytest.raises(ResumeError, match=message):
            dataset.load_state_dict(state)


@pytest.mark.parametrize("number", [0, -2])
def test_damaged_snapshots_and_those_of_another_position_change_no_batch(written, number, caplog):
    batches, states = states_of(make(written))
    state, other = json.loads(states[1]), json.loads(states[number])
    for snapshots in (other["snapshots"], state["snapshots"].replace("1", "2")):
        dataset = loaded(make(written), state | {"snapshots": snapshots})
        assert "snapshots are damaged, or of another state" in caplog.text
        assert [show(batch) for batch in dataset] == [show(batch) for batch in batches[2:]]
        caplog.clear()


def test_a_position_after_the_epoch_is_refused(written):
    _, states = states_of(make(written))
    dataset = loaded(make(written), json.loads(states[1]) | {"position": 10**6})
    with pytest.raises(ResumeError, match=r"position 1000000 is after the epoch's \d+ packs"):
        next(iter(dataset))


# Faults: resume_batch_8_to_12.
@pytest.mark.parametrize(
    ("method", "epoch_end", "num_workers"),
    [*crossed(METHODS, ENDS, [0]), *crossed(["random", "per_stream"], ["carry", "pad"], [2])],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_run_goes_on_in_batches_of_any_size_that_divides_its_position(
    written, method, epoch_end, num_workers
):
    """A device batch may be larger than the run's global batches, and need not divide them."""
    options = {"method": method, "mixing": {"epoch_end": epoch_end}}
    batches, states = states_of(make(written, **options))
    options["mixing"]["global_batch_size"] = None
    whole = [row for batch in batches for row in conformance.rows(batch)]
    for batch_size, done in ((5, 10), (7, 14), (16, 16), (18, 18)):
        grown = loaded(
            conformance.make(written, batch_size=batch_size, mixing=mixing_of(options)),
            states[done // 2 - 1],
        )
        loader = PackedDataLoader(grown, num_workers=num_workers)
        rest = [conformance.rows(batch) for batch in loader]
        # Each stream pads its own last global batch.
        pads_streams = (method, epoch_end) == ("per_stream", "pad")
        assert pads_streams or all(len(own) == batch_size for own in rest[:-2])
        assert [row for own in rest for row in own] == whole[done:]


def mixing_of(options: dict[str, Any]) -> dict[str, Any]:
    return {"batching_method": options["method"], **options["mixing"]}


# Faults: resume_list_collate.
def test_a_collate_that_drops_the_place_leaves_no_wrong_state(written):
    # Under torch's own loader, only a batch knows its position.
    dataset = make(written)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, collate_fn=conformance.rows)
    batch = list(islice(loader, 5))[-1]
    with pytest.raises(ResumeError, match=r"cannot know its position"):
        dataset.state_dict()
    with pytest.raises(ResumeError, match=r"the batch has no epoch and no position"):
        dataset.state_after({"rows": batch})
