"""Ranks with `steps="equal"`: real processes of a gloo group end their loops together."""

from __future__ import annotations

import json
import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from streampack import (
    IterableStream,
    Mixing,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
    WorkerError,
    World,
)
from streampack.errors import StreampackError
from tests.helpers.batches import digest
from tests.helpers.even_steps import (
    STEPS_OF_RANKS,
    Unsized,
    dataset_of,
    equal_lengths,
    in_order,
    loader_of,
    loops,
    rows_of_packs,
)
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.processes


def load_equal(rank: int, folder: Path, *, workers: int, direct: bool = False) -> Any:
    del folder
    num = len(STEPS_OF_RANKS)
    packs, keep = STEPS_OF_RANKS[rank], {"steps": "equal"}
    plain = loops(loader_of(dataset_of(rank, num, packs), workers, check_ranks=False), 5)
    dataset = dataset_of(rank, num, packs, **keep)
    loader = dataset if direct else loader_of(dataset, workers)
    seen = {"plain": plain, "loops": loops(loader, 2)}
    part = [digest(batch) for batch in islice(loader, 5)]
    state = json.loads(json.dumps(loader.state_dict()))
    seen["loops"] += [part]  # left early, on all ranks
    seen["after"] = loops(loader, 2)
    dataset = dataset_of(rank, num, packs, **keep)
    resumed = dataset if direct else loader_of(dataset, workers)
    resumed.load_state_dict(state)
    seen["resumed"] = loops(resumed, 1)
    state = json.loads(json.dumps(resumed.state_dict()))
    last = loader_of(dataset_of(rank, num, packs, **keep), workers)
    if not direct:
        last.load_state_dict(state)
        seen["resumed"] += loops(last, 1)
    return seen


@pytest.mark.parametrize(("workers", "direct"), [(0, False), (0, True), (2, False)])
def test_ranks_of_41_38_36_and_45_steps_end_together_and_lose_nothing(tmp_path, workers, direct):
    options = {"workers": workers, "direct": direct}
    seen = on_ranks(tmp_path, load_equal, len(STEPS_OF_RANKS), **options)
    lengths = [[len(epoch) for epoch in each["plain"]] for each in seen]
    assert [own[0] for own in lengths] == list(STEPS_OF_RANKS)
    first, second, third, *rest = equal_lengths(lengths, 5)
    assert first == second == 36
    for each in seen:
        plain = in_order(each["plain"])
        assert [len(loop) for loop in each["loops"]] == [first, second, 5]
        assert in_order(each["loops"]) == plain[:77]
        # Left early, the loop is over, and its rest belongs to the next.
        assert [len(loop) for loop in each["after"]] == [third - 5 + rest[0], rest[1]]
        assert in_order([*each["loops"], *each["after"]]) == plain[: 5 * 36]
        # A state continues the loop itself.
        assert [len(loop) for loop in each["resumed"]] == [third - 5, rest[0]][: 2 - direct]
        num = sum(map(len, each["resumed"]))
        assert in_order(each["resumed"]) == plain[77 : 77 + num]


def load_after_last_batch(rank: int, folder: Path) -> Any:
    """Killed after the last step of a loop, before the loop could notice its end."""
    del folder
    num, packs = len(STEPS_OF_RANKS), STEPS_OF_RANKS[rank]
    loader = PackedDataLoader(dataset_of(rank, num, packs, steps="equal"))
    list(islice(loader, 36))
    resumed = PackedDataLoader(dataset_of(rank, num, packs, steps="equal"))
    resumed.load_state_dict(loader.state_dict())
    plain = in_order(loops(dataset_of(rank, num, packs), 3))
    assert in_order(loops(resumed, 1)) == plain[36:72]
    return resumed.state_dict()["loop"]["epoch"]


def test_a_state_of_a_loops_last_batch_resumes_in_the_next_loop_on_all_ranks(tmp_path):
    assert on_ranks(tmp_path, load_after_last_batch, len(STEPS_OF_RANKS)) == [2] * 4


def load_with_short_batches(rank: int, folder: Path, *, end: str) -> Any:
    del folder
    make = lambda **more: dataset_of(  # noqa: E731
        rank, 3, 10 + 3 * rank, batch_size=4, mixing=Mixing(epoch_end=end), **more
    )
    plain = loops(make(), 4)
    seen = loops(PackedDataLoader(make(steps="equal")), 3)
    assert in_order(seen) == in_order(plain)[: sum(map(len, seen))]
    return [[len(epoch) for epoch in plain], [len(loop) for loop in seen]]


@pytest.mark.parametrize("end", ["pad", "drop"])
def test_a_short_last_batch_is_a_step_or_dropped_as_in_the_ranks_epoch(tmp_path, end):
    seen = on_ranks(tmp_path, load_with_short_batches, 3, end=end)
    wanted = equal_lengths([plain for plain, _ in seen], 3)
    assert [own for _, own in seen] == [wanted] * 3


class Breaks(Unsized):
    def __iter__(self) -> Any:
        yield from self.rows[:9]
        raise OSError("a disk is away")


def load_with_a_failure(rank: int, folder: Path, *, workers: int) -> Any:
    del folder
    again = Breaks if rank == 1 else Unsized
    loader = loader_of(dataset_of(rank, 3, 20, again=again, steps="equal"), workers)
    num = 0
    try:
        for _ in loader:
            num += 1
    except StreampackError as error:
        return [num, f"{type(error).__name__}: {error}", loader.state_dict()["loop"]["step"]]
    return num


@pytest.mark.parametrize("workers", [0, 1])
def test_the_failure_of_a_rank_ends_all_ranks_at_the_same_step(tmp_path, workers):
    seen = on_ranks(tmp_path, load_with_a_failure, 3, workers=workers)
    assert len({(num, step) for num, _, step in seen}) == 1
    assert seen[0][0] == seen[0][2] > 0
    assert seen[1][1].startswith("DataError")
    for rank in (0, 2):
        assert seen[rank][1].startswith("WorkerError: 1 of 3 ranks failed before step")


def load_until_killed(rank: int, folder: Path) -> Any:
    """Save a state at every step; rank 2 is killed in its second loop."""
    num, packs = len(STEPS_OF_RANKS), STEPS_OF_RANKS[rank]
    loader, seen = PackedDataLoader(dataset_of(rank, num, packs, steps="equal")), []
    try:
        for _ in range(2):
            for batch in loader:
                seen.append(digest(batch))
                (folder / f"state{rank}").write_text(json.dumps([loader.state_dict(), seen]))
                if rank == 2 and len(seen) == 50:
                    os.kill(os.getpid(), signal.SIGKILL)
    except WorkerError as error:
        return str(error)
    return "no error"


def load_after_kill(rank: int, folder: Path) -> Any:
    num, packs = len(STEPS_OF_RANKS), STEPS_OF_RANKS[rank]
    state, before = json.loads((folder / f"state{rank}").read_text())
    loader = PackedDataLoader(dataset_of(rank, num, packs, steps="equal"))
    loader.load_state_dict(state)
    after = loops(loader, 2)
    plain = in_order(loops(dataset_of(rank, num, packs), 4))
    assert before + in_order(after) == plain[: 50 + len(in_order(after))]
    return [len(before), *map(len, after)]


def test_a_killed_rank_is_noticed_by_the_others_and_all_resume_where_they_were(tmp_path):
    seen = on_ranks(tmp_path, load_until_killed, len(STEPS_OF_RANKS), may_die=True)
    assert seen[2] is None
    for rank in (0, 1, 3):
        assert seen[rank].startswith("steps='equal': another rank has ended")
    assert on_ranks(tmp_path, load_after_kill, len(STEPS_OF_RANKS)) == [[50, 22, 36]] * 4


def load_on_a_gpu_backend(rank: int, folder: Path, *, replication: int) -> Any:
    """As with NCCL, the default group has no backend for the CPU."""
    del folder
    world = World(rank=rank, num_ranks=4, replication=replication)
    rows = rows_of_packs(0, STEPS_OF_RANKS[rank // replication])
    dataset = PackedIterableDataset(
        [IterableStream(Unsized(rows), sharded=True)],
        packing=Packing(max_seq_len=8),
        world=world,
        steps="equal",
    )
    return [len(loop) for loop in loops(PackedDataLoader(dataset), 2)]


@pytest.mark.parametrize(("replication", "steps"), [(1, 36), (2, 38)])
def test_ranks_agree_under_a_gpu_backend_and_with_replicas(tmp_path, replication, steps):
    options = {"backend": "cuda:gloo", "replication": replication}
    assert on_ranks(tmp_path, load_on_a_gpu_backend, 4, **options) == [[steps, steps]] * 4


def load_with_one_resumed(rank: int, folder: Path) -> Any:
    del folder
    loader = PackedDataLoader(dataset_of(rank, 2, 20, steps="equal"))
    list(islice(loader, 3))
    if rank == 1:
        list_of = PackedDataLoader(dataset_of(rank, 2, 20, steps="equal"), check_ranks=False)
        list_of.load_state_dict(loader.state_dict())
        loader = list_of
    return in_order(loops(loader, 1))


def test_ranks_at_different_steps_are_refused(tmp_path):
    for seen in on_ranks(tmp_path, load_with_one_resumed, 2):
        assert seen.startswith("ResumeError: ranks are at different steps")


def load_without_a_batch(rank: int, folder: Path) -> Any:
    del folder
    dataset = dataset_of(
        rank, 2, 1 + rank, steps="equal", batch_size=2, mixing=Mixing(epoch_end="drop")
    )
    return in_order(loops(PackedDataLoader(dataset), 1))


def test_a_loop_without_a_step_is_an_error_on_all_ranks(tmp_path):
    first, second = on_ranks(tmp_path, load_without_a_batch, 2)
    assert first.startswith("DataError: steps='equal': epoch 0 would have no step, since 1 of 2")
    assert "this one" in first
    assert second.startswith("DataError: steps='equal'")
    assert "this one" not in second
