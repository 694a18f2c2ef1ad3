"""Real torchrun jobs of 2, 3 and 4 ranks, on one node and two: the same packs, the same state.

::

    2 ranks               whole epoch, replicated epoch     state after step 5 --.
    3 ranks               whole epoch         resume there <---------------------'  state --.
    2 nodes of 2 ranks    whole epoch, replicated         resume there <--------------------'  --.
    this process          the reference                   continue to the end <------------------'

All jobs are forked from this process, by the same agents that torchrun starts.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streampack.world import World
from tests.helpers import conformance
from tests.helpers.worlds import torchrun_job as job
from tests.helpers.worlds.torchrun_agents import launch

JOBS = {"ranks2": (2, 1), "ranks3": (3, 1), "nodes2": (4, 2)}
SAVED_AFTER = 5
WHOLE = list(JOBS)
REPLICATED = ("ranks2", "nodes2")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Seen:
    """What all jobs saw, and what they should have."""

    folder: Path
    written: conformance.Written
    reference: list[str]
    """Digests of the epoch's packs in slot order, from one process."""
    states: dict[int, str]
    """The state at each position, without snapshots."""

    def ranks(self, job_name: str, run: str) -> list[dict[str, Any]]:
        files = [
            self.folder / job_name / f"{run}-rank{rank}.json" for rank in range(JOBS[job_name][0])
        ]
        return [json.loads(file.read_text()) for file in files]

    def packs(self, job_name: str, run: str) -> list[str]:
        """All packs of a run in slot order, each place once."""
        ranks = self.ranks(job_name, run)
        num_devices = ranks[0]["num_devices"]
        first = ranks[0]["start"] // 2
        by_place = {rank["place"]: rank for rank in ranks}
        assert len(by_place) == num_devices
        order = [by_place[k % num_devices] for k in range(first, first + num_devices)]
        steps = zip(*(rank["steps"] for rank in order), strict=True)
        return [pack for step in steps for rank in step for pack in rank["packs"]]


def streams_of(folder: Path, local: Path) -> list[dict[str, Any]]:
    """Arguments of the streams, kept in a folder of each node's own."""
    return [
        {"remote": str(folder / name), "local": str(local / "node{node}" / name)}
        for name in ("s0", "s1")
    ]


def start(folder: Path, origin: Path, name: str, runs: list[dict[str, Any]]) -> None:
    num_ranks, num_nodes = JOBS[name]
    out = folder / name
    out.mkdir()
    told = {"out": str(out), "runs": runs, "streams": streams_of(origin, out / "cache")}
    (out / "told.json").write_text(json.dumps(told))
    launch(job.main, [str(out / "told.json")], num_ranks, num_nodes)


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Seen:
    folder = tmp_path_factory.mktemp("worlds")
    rng = np.random.default_rng(11)
    lengths = [rng.integers(1, 60, 300).tolist(), rng.integers(1, 150, 60).tolist()]
    origin = folder / "origin"
    written = conformance.write_streams(origin, lengths, compression="zstd", hashes=("xxh64",))
    alone = job.make(
        [
            {"remote": str(path), "local": str(folder / "alone" / path.name)}
            for path in written.paths
        ],
        World(),
    )
    batches = list(alone)
    reference = [pack for batch in batches for pack in conformance.rows(batch)]
    conformance.check_exactly_once(reference, written, [300, 60])
    saved = {name: str(folder / f"{name}.pt") for name in JOBS}
    goes_on = {"name": "goes_on", "save_after": SAVED_AFTER, "stop_after": SAVED_AFTER + 1}
    start(
        folder,
        origin,
        "ranks2",
        [
            {
                "name": "whole",
                "save_after": SAVED_AFTER,
                "save": saved["ranks2"],
                "save_dcp": str(folder / "dcp"),
            },
            {"name": "replicated", "replication": 2},
            {"name": "sliced", "replication": 2, "context_parallel": 2},
        ],
    )
    start(
        folder,
        origin,
        "ranks3",
        [
            {"name": "whole"},
            {**goes_on, "load": saved["ranks2"], "save": saved["ranks3"]},
            {"name": "from_dcp", "load_dcp": str(folder / "dcp")},
        ],
    )
    start(
        folder,
        origin,
        "nodes2",
        [
            {"name": "whole"},
            {"name": "replicated", "replication": 2},
            {"name": "sliced", "replication": 2, "context_parallel": 2},
            {**goes_on, "load": saved["ranks3"], "save": saved["nodes2"]},
        ],
    )
    return Seen(
        folder=folder,
        written=written,
        reference=[job.digest_of(pack) for pack in reference],
        states={batch["position"]: job.bare(alone.state_after(batch)) for batch in batches},
    )


@pytest.mark.parametrize("name", WHOLE)
def test_the_ranks_of_a_job_deliver_the_epoch_exactly_and_in_the_same_global_batches(seen, name):
    assert seen.packs(name, "whole") == seen.reference


@pytest.mark.parametrize("name", WHOLE)
def test_all_ranks_of_a_job_take_the_same_number_of_steps_and_know_it_before(seen, name):
    ranks = seen.ranks(name, "whole")
    assert len({len(rank["steps"]) for rank in ranks}) == 1
    assert {rank["length"] for rank in ranks} == {len(ranks[0]["steps"])}


@pytest.mark.parametrize("name", REPLICATED)
def test_neighbouring_ranks_get_the_same_batches_under_replication(seen, name):
    ranks = seen.ranks(name, "replicated")
    for one, other in zip(ranks[::2], ranks[1::2], strict=True):
        assert one["steps"] == other["steps"]
        assert one["place"] == other["place"]
    assert seen.packs(name, "replicated") == seen.reference


@pytest.mark.parametrize("name", REPLICATED)
def test_the_slices_of_neighbouring_ranks_merge_into_the_packs_of_the_epoch(seen, name):
    ranks = seen.ranks(name, "sliced")
    assert all(len(rank["steps"]) == rank["length"] for rank in ranks)
    assert seen.packs(name, "sliced") == seen.reference


@pytest.mark.parametrize("name", WHOLE)
def test_the_state_is_the_same_from_every_rank_and_in_every_world(seen, name):
    ranks = seen.ranks(name, "whole")
    for step in zip(*(rank["steps"] for rank in ranks), strict=True):
        assert len({rank["state"] for rank in step}) == 1
        if step[0]["position"] in seen.states:
            # lane_run and global_batch_size are those of the run, whatever the world.
            assert step[0]["state"] == seen.states[step[0]["position"]]


def test_every_node_keeps_its_shards_in_a_folder_of_its_own(seen):
    nodes = {(rank["rank"], rank["node"]) for rank in seen.ranks("nodes2", "whole")}
    assert nodes == {(0, 0), (1, 0), (2, 1), (3, 1)}
    caches = sorted(path.name for path in (seen.folder / "nodes2" / "cache").iterdir())
    assert caches == ["node0", "node1"]


def test_a_run_goes_on_from_2_to_3_to_4_ranks_and_to_one_from_rank_0s_state(seen):
    num_packs = 2 * 2 * SAVED_AFTER
    assert seen.ranks("ranks3", "goes_on")[0]["start"] == num_packs
    done = seen.packs("ranks2", "whole")[:num_packs]
    for name, num_ranks in (("ranks3", 3), ("nodes2", 4)):
        ranks = seen.ranks(name, "goes_on")
        assert {rank["start"] for rank in ranks} == {len(done)}
        done += seen.packs(name, "goes_on")[: 2 * num_ranks * SAVED_AFTER]
    local = [{"local": str(path)} for path in seen.written.paths]
    alone = job.make(local, World())
    state = torch.load(seen.folder / "nodes2.pt", weights_only=True)["loader"]
    assert state["position"] == len(done)
    alone.load_state_dict(state)
    done += [job.digest_of(pack) for batch in alone for pack in conformance.rows(batch)]
    assert done == seen.reference
    assert max(Counter(done).values()) == 1


def test_a_distributed_checkpoint_of_2_ranks_goes_on_in_3(seen):
    num_packs = 2 * 2 * SAVED_AFTER
    assert {rank["start"] for rank in seen.ranks("ranks3", "from_dcp")} == {num_packs}
    assert seen.packs("ranks3", "from_dcp") == seen.reference[num_packs:]
