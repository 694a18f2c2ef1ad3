"""Loops of `steps`: equally many on all ranks, in the order of a rank alone, nothing lost."""

from __future__ import annotations

import copy
import json
import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from streampack import (
    BucketedIterableDataset,
    Bucketing,
    ConfigError,
    DataError,
    IterableStream,
    Mixing,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
    ResumeError,
    WorkerError,
    World,
)
from streampack.errors import StreampackError
from tests.helpers.even_steps import (
    STEPS_OF_RANKS,
    Unsized,
    dataset_of,
    digest_of,
    equal_lengths,
    in_order,
    loader_of,
    loops,
    mixture,
    rows_of_packs,
)
from tests.helpers.ranks import on_ranks, on_ranks_that_die

METHODS = ("random", "stratified", "device_per_stream")


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], list[list[str]]]:
    """Twelve epochs of a rank without `steps`."""
    return {
        (method, end): loops(mixture(None, method, epoch_end=end), 12)
        for method in METHODS
        for end in ("pad", "drop")
    }


# One process.


@settings(deadline=None)
@given(
    method=st.sampled_from(METHODS),
    end=st.sampled_from(["pad", "drop"]),
    steps=st.integers(1, 40),
    threads=st.sampled_from([None, 0, 1]),
    parts=st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=6),
)
def test_loops_give_what_a_rank_alone_would_whatever_is_left_early_and_resumed(
    alone, method, end, steps, threads, parts
):
    """`parts`: after how many batches a loop is left, and whether its state is resumed then.

    `threads` None: over the dataset itself.
    """

    def begun() -> Any:
        dataset = mixture(steps, method, epoch_end=end)
        return dataset if threads is None else PackedDataLoader(dataset, prefetch_threads=threads)

    wanted, loader, left = iter(in_order(alone[method, end])), begun(), steps
    for stop, is_resumed in parts:
        got = [digest_of(batch) for batch in islice(loader, stop)]
        assert got == list(islice(wanted, min(stop, left)))
        left = left - len(got) if is_resumed else 0
        if is_resumed:
            state = json.loads(json.dumps(loader.state_dict()))
            loader = begun()
            loader.load_state_dict(state)
        left = left or steps


@pytest.mark.parametrize("threads", [0, 1])
def test_a_loop_of_a_number_of_steps_has_a_length(threads):
    loader = PackedDataLoader(mixture(7), prefetch_threads=threads)
    assert len(loader) == len(list(loader)) == 7
    with pytest.raises(TypeError, match="has no len"):
        len(PackedDataLoader(mixture("equal")))


def test_one_rank_with_equal_steps_has_its_own_epochs(alone):
    assert loops(PackedDataLoader(mixture("equal")), 3) == alone["random", "pad"][:3]


@pytest.mark.parametrize("at", ["loop", "end"])
def test_a_state_of_the_last_batch_continues_with_the_next_loop(alone, at):
    loader, wanted = PackedDataLoader(mixture(9)), in_order(alone["random", "pad"])
    for number, _ in enumerate(loader, 1):
        if number == 9:
            state = loader.state_dict()
    if at == "end":
        state = loader.state_dict()
    assert (
        state["loop"]
        == {
            "loop": {"epoch": 0, "step": 9, "steps": 9},
            "end": {"epoch": 1, "step": 0, "steps": 9},
        }[at]
    )
    resumed = PackedDataLoader(mixture(9))
    resumed.load_state_dict(state)
    assert loops(resumed, 2) == [wanted[9:18], wanted[18:27]]


def test_a_generator_that_can_be_iterated_once_continues_in_the_next_loop():
    dataset = PackedIterableDataset(
        [IterableStream([number] * 8 for number in range(25))],
        packing=Packing(max_seq_len=8),
        steps=10,
    )
    loader = PackedDataLoader(dataset)
    for loop in range(2):
        got = [int(batch["tokens"][0, 0]) for batch in loader]
        assert got == [*range(10 * loop, 10 * loop + 10)]
    with pytest.raises(DataError, match="can be iterated only once"):
        list(loader)


def test_set_epoch_of_the_next_loop_changes_nothing_and_of_another_begins_it(alone):
    wanted, loader = in_order(alone["random", "pad"]), PackedDataLoader(mixture(9))
    for epoch in range(3):  # as trainers do
        loader.dataset.set_epoch(epoch)
        assert [digest_of(batch) for batch in loader] == wanted[9 * epoch : 9 * epoch + 9]
    loader.dataset.set_epoch(1)
    assert loader.state_dict()["loop"] == {"epoch": 1, "step": 0, "steps": 9}
    assert [digest_of(batch) for batch in loader] == alone["random", "pad"][1][:9]


def test_a_state_without_steps_is_in_the_loop_of_its_epoch(alone):
    loader = PackedDataLoader(mixture(None))
    list(loader)
    list(islice(loader, 4))
    resumed = PackedDataLoader(mixture(9))
    resumed.load_state_dict(loader.state_dict())
    epoch = alone["random", "pad"][1]
    assert [digest_of(batch) for batch in resumed] == epoch[4:9]


def test_the_number_of_steps_may_change_at_a_resume(alone):
    wanted, loader = in_order(alone["random", "pad"]), PackedDataLoader(mixture(9))
    list(islice(loader, 6))
    for steps, parts in ((12, [wanted[6:12], wanted[12:24]]), (4, [wanted[6:10], wanted[10:14]])):
        resumed = PackedDataLoader(mixture(steps))
        resumed.load_state_dict(loader.state_dict())
        assert loops(resumed, 2) == parts


def test_a_state_of_another_kind_of_steps_is_refused():
    loader = PackedDataLoader(mixture(9))
    next(iter(loader))
    with pytest.raises(ResumeError, match=r"was saved with steps=9, but .* resume with a number"):
        PackedDataLoader(mixture("equal")).load_state_dict(loader.state_dict())
    damaged = loader.state_dict() | {"loop": {"epoch": -1, "step": 0, "steps": 9}}
    with pytest.raises(ResumeError, match="epoch"):
        PackedDataLoader(mixture(9)).load_state_dict(damaged)


def test_without_steps_a_state_is_as_it_was():
    assert "loop" not in PackedDataLoader(mixture(None)).state_dict()
    assert "loop" not in mixture(None).state_dict()


def test_a_copy_of_a_dataset_has_loops_of_its_own(alone):
    original, wanted = mixture(5), in_order(alone["random", "pad"])
    assert [digest_of(batch) for batch in original] == wanted[:5]
    twin = copy.copy(original)
    assert [digest_of(batch) for batch in twin] == wanted[5:10]
    assert [digest_of(batch) for batch in original] == wanted[5:10]


def test_another_loop_over_the_same_dataset_continues_where_the_first_is():
    dataset = dataset_of(0, 1, 50, steps=10)
    loader, other = PackedDataLoader(dataset), PackedDataLoader(dataset)
    seen = [
        int(batch["tokens"][0, 0]) for each in (loader, other, loader, dataset) for batch in each
    ]
    assert seen == list(range(40))


class FailsOnce(Unsized):
    has_failed = False

    def __iter__(self) -> Any:
        for number, row in enumerate(self.rows):
            if number == 13 and not self.has_failed:
                self.has_failed = True
                raise OSError("a disk is away")
            yield row


@pytest.mark.parametrize("threads", [0, 1])
def test_after_a_failure_the_next_loop_continues_behind_the_last_batch(threads):
    loader = PackedDataLoader(
        dataset_of(0, 1, 50, again=FailsOnce, steps=20), prefetch_threads=threads
    )
    seen: list[int] = []
    with pytest.raises(DataError, match="a disk is away"):
        seen.extend(int(batch["tokens"][0, 0]) for batch in loader)
    seen += [int(batch["tokens"][0, 0]) for batch in loader]
    assert seen == list(range(len(seen)))
    assert len(seen) > 20


def test_a_rank_without_a_batch_is_refused():
    for steps in (3, "equal"):
        dataset = dataset_of(0, 1, 1, steps=steps, batch_size=2, mixing=Mixing(epoch_end="drop"))
        with pytest.raises(DataError, match=r"no batch.*epoch_end='pad'"):
            list(dataset)
        # The way out.
        assert list(dataset_of(0, 1, 1, steps=steps, batch_size=2))


def test_buckets_have_steps_too():
    dataset = BucketedIterableDataset(
        [IterableStream(rows_of_packs(0, 7))], bucketing=Bucketing(max_tokens=8), steps=5
    )
    seen = [[int(batch["tokens"][0, 0]) for batch in dataset] for _ in range(3)]
    assert seen == [[0, 1, 2, 3, 4], [5, 6, 0, 1, 2], [3, 4, 5, 6, 0]]


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "even", [3]])
def test_other_steps_are_refused(steps):
    with pytest.raises(ConfigError, match="steps="):
        mixture(steps)


def test_steps_that_the_mixing_cannot_keep_are_refused():
    with pytest.raises(ConfigError, match="set steps to a number"):
        mixture("equal", stop="repeat")
    for steps in (5, "equal"):
        with pytest.raises(ConfigError, match="same stream at each step"):
            mixture(steps, "per_stream")
    # The ways out.
    assert len(list(mixture(5, "per_stream", stop="repeat"))) == 5
    assert len(list(mixture(5, "device_per_stream"))) == 5


@pytest.mark.processes
def test_workers_of_torch_are_refused():
    with pytest.raises(ConfigError, match=r"not in torch's workers; iterate with PackedDataLoader"):
        list(DataLoader(mixture(5), batch_size=None, num_workers=1))
    assert len(list(DataLoader(mixture(5), batch_size=None, num_workers=0))) == 5


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("persistent", [True, False])
def test_loops_of_workers_give_what_they_would_without(workers, persistent):
    plain = in_order(loops(loader_of(mixture(None), workers), 6))
    loader = loader_of(mixture(11), workers, persistent_workers=persistent)
    assert loops(loader, 2) == [plain[:11], plain[11:22]]
    assert [digest_of(batch) for batch in islice(loader, 4)] == plain[22:26]
    state = json.loads(json.dumps(loader.state_dict()))
    assert [digest_of(batch) for batch in loader] == plain[26:37]
    resumed = loader_of(mixture(11), workers)
    resumed.load_state_dict(state)
    assert loops(resumed, 2) == [plain[26:33], plain[33:44]]
    between = loader_of(mixture(11), workers)
    between.load_state_dict(resumed.state_dict())
    assert loops(between, 1) == loops(resumed, 1) == [plain[44:55]]


@pytest.mark.processes
def test_what_another_loaders_workers_hold_is_not_skipped():
    dataset = dataset_of(0, 1, 50, steps=10)
    loader = loader_of(dataset, 2)
    list(loader)
    with pytest.raises(ConfigError, match="iterate that loader again"):
        list(PackedDataLoader(dataset))
    assert len(list(loader)) == 10


# Ranks: real processes of a gloo group.


def report(loader: Any, number: int) -> dict[str, Any]:
    return {"loops": loops(loader, number), "state": loader.state_dict()}


def load_equal(rank: int, folder: Path, *, workers: int, direct: bool = False) -> Any:
    del folder
    num = len(STEPS_OF_RANKS)
    packs, keep = STEPS_OF_RANKS[rank], {"steps": "equal"}
    plain = loops(loader_of(dataset_of(rank, num, packs), workers, check_ranks=False), 5)
    dataset = dataset_of(rank, num, packs, **keep)
    loader = dataset if direct else loader_of(dataset, workers)
    seen = {"plain": plain, "loops": loops(loader, 2)}
    part = [digest_of(batch) for batch in islice(loader, 5)]
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


@pytest.mark.processes
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


@pytest.mark.processes
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


@pytest.mark.processes
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


@pytest.mark.processes
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
                seen.append(digest_of(batch))
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


@pytest.mark.processes
def test_a_killed_rank_is_noticed_by_the_others_and_all_resume_where_they_were(tmp_path):
    seen = on_ranks_that_die(tmp_path, load_until_killed, len(STEPS_OF_RANKS))
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


@pytest.mark.processes
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


@pytest.mark.processes
def test_ranks_at_different_steps_are_refused(tmp_path):
    for seen in on_ranks(tmp_path, load_with_one_resumed, 2):
        assert seen.startswith("ResumeError: ranks are at different steps")


def load_with_other_steps(rank: int, folder: Path) -> Any:
    del folder
    dataset = dataset_of(rank, 2, 20, steps="equal" if rank else None)
    return in_order(loops(PackedDataLoader(dataset), 1))


@pytest.mark.processes
def test_ranks_with_other_steps_are_named(tmp_path):
    for seen in on_ranks(tmp_path, load_with_other_steps, 2):
        assert seen.startswith("ConfigError: ranks have different steps: rank 0 has None, rank 1")


def load_without_a_batch(rank: int, folder: Path) -> Any:
    del folder
    dataset = dataset_of(
        rank, 2, 1 + rank, steps="equal", batch_size=2, mixing=Mixing(epoch_end="drop")
    )
    return in_order(loops(PackedDataLoader(dataset), 1))


@pytest.mark.processes
def test_a_loop_without_a_step_is_an_error_on_all_ranks(tmp_path):
    first, second = on_ranks(tmp_path, load_without_a_batch, 2)
    assert first.startswith("DataError: steps='equal': epoch 0 would have no step, since 1 of 2")
    assert "this one" in first
    assert second.startswith("DataError: steps='equal'")
    assert "this one" not in second


def test_ranks_without_a_process_group_are_told_the_ways_out():
    dataset = dataset_of(1, 4, 9, steps="equal")
    with pytest.raises(ConfigError, match=r"init_process_group in all .* such as steps=1000"):
        list(PackedDataLoader(dataset))
    assert len(list(PackedDataLoader(dataset_of(1, 4, 9, steps=5)))) == 5
