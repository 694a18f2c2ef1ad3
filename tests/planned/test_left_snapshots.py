"""The state of one rank has the snapshots of all lanes, and a resume elsewhere reads little again.

Streams are remote and have no length file: a shard is fetched when its lengths are first needed.
"""

from __future__ import annotations

import json
import re
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import distributed
from torch.utils.data import DataLoader

from streampack import (
    Chapter,
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    ResumeError,
    Stream,
    World,
)
from streampack.lookback import at
from streampack.plan.recipe import Recipe
from streampack.runtime.resumable import engine_of
from streampack.streams.mds_shards import MdsShards
from streampack.testing.shown import in_slot_order, rows, steps, worlds
from streampack.write import write_stream
from tests.helpers.ranks import on_ranks

SAMPLES = {"web": 6_000, "code": 600}
PER_SHARD = 12
NUM_RANKS = 4  # on two nodes
ORDER = {"seed": 4, "shuffle_block_size": 32, "pack_shuffle": 32}
CHAPTERS = [
    Chapter(weights={"web": 3, "code": 1}, steps=7),
    Chapter(weights={"web": 1}, steps=4),
    Chapter(weights={"web": 2, "code": 1}, steps=20),
]
RUNS: dict[str, dict[str, Any]] = {
    "epochs": {"mixing": Mixing(global_batch_size=32, epoch_end="carry"), "batch_size": 8},
    "by stream": {
        "mixing": Mixing(
            global_batch_size=16, batching_method="device_per_stream", epoch_end="carry"
        )
    },
    "chapters": {"chapters": CHAPTERS},
}
WAYS_OUT = r"tokens of .*loader\.gather_state\(\).*load_state_dict\(state, replan=True\)"
STEPS = {"epochs": 35, "by stream": 12, "chapters": 14}


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    """Draw few samples together, so that small streams are not read as a whole at the start."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = Recipe._sizes
        patch.setattr(Recipe, "_sizes", lambda *place: sizes(*place)._replace(chunk=32))
        yield


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("origin")
    for name, num in SAMPLES.items():
        # All of one size in bytes, so that a shard has as many samples.
        ids = (np.arange(20 + number % 3) for number in range(num))
        write_stream(ids, folder / name, compression=None, size_limit=PER_SHARD * 104)
        (folder / name / "lengths.bin").unlink()
    return folder


def make(origin: Path, cache: Path, world: World, run: str) -> PackedStreamingDataset:
    names = ["web"] if run == "epochs" else SAMPLES
    options = {"mixing": Mixing(global_batch_size=16), "batch_size": 4}
    return PackedStreamingDataset(
        [Stream(remote=origin / name, local=cache / name) for name in names],
        packing=Packing(max_seq_len=64),
        world=world,
        **options | {"order": Order(num_lanes=4, **ORDER)} | RUNS[run],
    )


def lanes_of(state: dict[str, Any]) -> list[list[int]]:
    return sorted([each["lane"], each["queue"]] for each in json.loads(state["snapshots"]))


def read_again(cache: Path, dataset: PackedStreamingDataset, seen: set[int]) -> int:
    """The samples of fetched shards of "web" that were seen before."""
    first = engine_of(dataset).spec.streams[0].first_sample.tolist()
    shards = {int(path.name.split(".")[1]) for path in cache.rglob("shard.*.mds.*")}
    return sum(len(seen.intersection(range(first[n], first[n + 1]))) for n in shards)


def settle(is_ready: Any) -> None:
    """Wait for what other ranks leave in threads of theirs."""
    deadline = time.monotonic() + 10
    while not is_ready() and time.monotonic() < deadline:
        time.sleep(0.01)


def use_tcp(rank: int, folder: Path) -> None:
    """Make the process group again, with the store that launchers use."""
    distributed.barrier()
    distributed.destroy_process_group()
    port = folder / "port"
    if not rank:
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(port)
    else:
        settle(port.exists)
        store = distributed.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)


def train(loader: Any, num: int) -> dict[str, Any]:
    """Take some batches, step by step with the other ranks, and return the last."""
    for step, batch in enumerate(loader, 1):  # noqa: B007
        distributed.barrier()
        if step == num:
            break
    return batch


def run_rank(rank: int, folder: Path, *, origin: Path) -> dict[str, Any]:
    world, seen = worlds(NUM_RANKS, 2)[rank], {}
    for name in RUNS:
        if name == "by stream":
            use_tcp(rank, folder)  # before that, the store is a file
        loader = PackedDataLoader(make(origin, folder / name / f"node{world.node}", world, name))
        batch = train(loader, STEPS[name])
        gathered = loader.gather_state()
        settle(lambda: lanes_of(loader.state_dict()) == lanes_of(gathered))  # noqa: B023
        distributed.barrier()
        own = json.loads(json.dumps(loader.state_dict()))
        after = loader.dataset.state_after(batch)
        seen[name] = {"state": own, "after": lanes_of(after), "gathered": lanes_of(gathered)}
        distributed.barrier()
    # Another run, whose lanes are the same, in a world of which only two ranks load.
    if rank < 2:
        alone = World(rank=rank, num_ranks=NUM_RANKS, dp_rank=rank, dp_size=2, group=[0, 1])
        loader = PackedDataLoader(
            make(origin, folder / "others" / str(rank), alone, "epochs"), check_ranks=False
        )
        next(iter(loader))
        seen["group"] = lanes_of(loader.state_dict())
    distributed.barrier()
    distributed.barrier()
    dataset = make(origin, folder / "torch" / str(rank), world, "chapters")
    batch = train(DataLoader(dataset, batch_size=None, num_workers=1), 4)
    settle(lambda: len(lanes_of(dataset.state_after(batch))) == 4)
    seen["torch"] = lanes_of(dataset.state_after(batch))
    return seen


@pytest.fixture(scope="module")
def seen(origin, tmp_path_factory) -> list[dict[str, Any]]:
    return on_ranks(tmp_path_factory.mktemp("ranks"), run_rank, NUM_RANKS, origin=origin)


@pytest.mark.processes
@pytest.mark.parametrize("run", RUNS)
def test_the_state_of_any_rank_has_the_snapshots_of_all_lanes(seen, run):
    for rank in seen:
        assert lanes_of(rank[run]["state"]) == rank[run]["gathered"] == rank[run]["after"]
    assert {lane for lane, _ in rank[run]["gathered"]} == set(range(4))


@pytest.mark.processes
def test_ranks_of_a_group_leave_snapshots_apart_and_torchs_workers_leave_them_too(seen):
    # One batch of 8 packs in turns of 8: each of the two ranks has begun one lane, or both know it.
    assert all({0, 1} >= {lane for lane, _ in rank["group"]} for rank in seen[:2])
    assert [len(rank["torch"]) for rank in seen] == [4] * NUM_RANKS


@pytest.mark.processes
@pytest.mark.parametrize("run", RUNS)
def test_half_the_ranks_go_on_from_the_state_of_rank_0_and_read_few_rows_again(
    seen, origin, tmp_path, run
):
    state = seen[0][run]["state"]
    datasets = [make(origin, tmp_path / "half", world, run) for world in worlds(2)]
    whole = make(origin, tmp_path / "whole", World(), run)
    for dataset in datasets:
        dataset.load_state_dict(state)
    whole.load_state_dict(state | {"snapshots": "[]"})
    wanted = [row for batch in islice(PackedDataLoader(whole), 16) for row in rows(batch)]
    got: list[Any] = []
    loaders = [PackedDataLoader(each) for each in in_slot_order(datasets, state["position"])]
    for step in steps(loaders):
        got += [row for batch in step for row in rows(batch)]
        if len(got) >= len(wanted):
            break
    assert got[: len(wanted)] == wanted
    if run == "epochs":
        batches = islice(PackedDataLoader(make(origin, tmp_path / "first", World(), run)), 4 * 35)
        before = {row for batch in batches for row in batch["segments"][:, 3].tolist()}
        assert len(before) > SAMPLES["web"] / 3
        again = read_again(tmp_path / "half", whole, before)
        assert again <= 0.05 * SAMPLES["web"] < 0.3 * read_again(tmp_path / "whole", whole, before)


@pytest.fixture
def tokenized(monkeypatch):
    """Let lengths of shards cost as much as those of texts do."""
    monkeypatch.setattr(MdsShards, "length_cost", "tokenize", raising=False)


def states_of_ranks(origin: Path, cache: Path, run: str) -> list[dict[str, Any]]:
    """The states of two nodes that have no process group, after some steps."""
    loaders = [PackedDataLoader(make(origin, cache, world, run)) for world in worlds(2, 2)]
    for _ in islice(steps(loaders), STEPS[run]):
        pass
    return [loader.state_dict() for loader in loaders]


@pytest.mark.usefixtures("tokenized")
@pytest.mark.parametrize("run", RUNS)
def test_a_state_without_a_lane_of_texts_is_refused_with_the_tokens_and_the_ways_out(
    origin, tmp_path, run
):
    first, second = states_of_ranks(origin, tmp_path / "cache", run)
    bare = first | {"snapshots": "[]"}
    other = make(origin, tmp_path / "cache", worlds(2, 2)[1], run)
    for state in (first, bare):
        with pytest.raises(ResumeError, match=WAYS_OUT) as refused:
            other.load_state_dict(state)
        num_tokens = int(re.search(r"about (\d+) tokens", str(refused.value))[1])
        in_epoch = sum(each.num_tokens for each in engine_of(other).run.recipe(0).streams)
        assert 0.02 * in_epoch < num_tokens <= in_epoch
    other.load_state_dict(second)
    wanted = [rows(batch) for batch in islice(PackedDataLoader(other), 8)]
    loader = PackedDataLoader(make(origin, tmp_path / "cache", worlds(2, 2)[1], run))
    loader.load_state_dict(first, replan=True)
    assert [rows(batch) for batch in islice(loader, 8)] == wanted


@pytest.mark.usefixtures("tokenized")
def test_neither_looking_back_nor_set_epoch_tokenizes_the_run_again(origin, tmp_path):
    dataset = make(origin, tmp_path / "cache", World(), "epochs")
    assert at(dataset, 0).rows
    with pytest.raises(ResumeError, match=WAYS_OUT):
        at(dataset, 20)
    loader = PackedDataLoader(dataset)
    for _ in islice(loader, 84):
        pass
    here = at(dataset, 20)  # from snapshots that the running process left
    assert len(here.rows) == 32
    fresh = make(origin, tmp_path / "cache", World(), "epochs")
    fresh.load_state_dict(loader.state_dict() | {"snapshots": "[]"}, replan=True)
    assert repr(at(fresh, 20)) == repr(here)
    later = make(origin, tmp_path / "cache", World(), "epochs")
    later.set_epoch(2)
    with pytest.raises(ResumeError, match=WAYS_OUT):
        next(iter(PackedDataLoader(later)))
    later.load_state_dict(later.state_dict(), replan=True)
    assert next(iter(PackedDataLoader(later)))["epoch"] == 2


def test_a_state_taken_right_after_a_resume_keeps_the_snapshots_of_lanes_that_wait(
    origin, tmp_path
):
    loader = PackedDataLoader(make(origin, tmp_path / "cache", World(), "epochs"))
    for _ in islice(loader, 40):
        pass
    state = loader.state_dict()
    assert lanes_of(state) == [[lane, 0] for lane in range(4)]
    loader.load_state_dict(state)
    next(iter(loader))
    assert lanes_of(loader.state_dict()) == lanes_of(state)
