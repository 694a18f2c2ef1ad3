"""Loops of `steps`: equally many on all ranks, in order, with nothing lost."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    DataError,
    IterableStream,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
    ResumeError,
)
from tests.helpers.batches import digest
from tests.helpers.even_steps import (
    Unsized,
    dataset_of,
    in_order,
    loader_of,
    loops,
    mixture,
)
from tests.helpers.examples import crossed

METHODS = ("random", "stratified", "device_per_stream")


@pytest.fixture(scope="module")
def alone():
    """Twelve epochs of a rank without `steps`."""
    return {
        (method, end): loops(mixture(None, method, epoch_end=end), 12)
        for method in METHODS
        for end in ("pad", "drop")
    }


# One process.


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
        got = [digest(batch) for batch in islice(loader, stop)]
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


@pytest.mark.parametrize("end", ["pad", "drop"])
def test_equal_steps_of_one_rank_are_its_epochs(alone, end):
    loader = PackedDataLoader(mixture("equal", epoch_end=end))
    assert loops(loader, 2) == alone["random", end][:2]


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
        assert [digest(batch) for batch in loader] == wanted[9 * epoch : 9 * epoch + 9]
    loader.dataset.set_epoch(1)
    assert loader.state_dict()["loop"] == {"epoch": 1, "step": 0, "steps": 9}
    assert [digest(batch) for batch in loader] == alone["random", "pad"][1][:9]


def test_a_state_without_steps_is_in_the_loop_of_its_epoch(alone):
    loader = PackedDataLoader(mixture(None))
    list(loader)
    list(islice(loader, 4))
    resumed = PackedDataLoader(mixture(9))
    resumed.load_state_dict(loader.state_dict())
    epoch = alone["random", "pad"][1]
    assert [digest(batch) for batch in resumed] == epoch[4:9]


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


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "persistent"), crossed([3, 1], [False, True]))
def test_loops_of_workers_give_what_they_would_without(workers, persistent):
    plain = in_order(loops(loader_of(mixture(None), workers), 6))
    loader = loader_of(mixture(11), workers, persistent_workers=persistent)
    assert loops(loader, 2) == [plain[:11], plain[11:22]]
    assert [digest(batch) for batch in islice(loader, 4)] == plain[22:26]
    state = json.loads(json.dumps(loader.state_dict()))
    assert [digest(batch) for batch in loader] == plain[26:37]
    resumed = loader_of(mixture(11), workers)
    resumed.load_state_dict(state)
    assert loops(resumed, 2) == [plain[26:33], plain[33:44]]
    between = loader_of(mixture(11), workers)
    between.load_state_dict(resumed.state_dict())
    assert loops(between, 1) == loops(resumed, 1) == [plain[44:55]]


def test_another_loop_over_the_same_dataset_continues_where_the_first_is():
    dataset = dataset_of(0, 1, 50, steps=10)
    loader, other = PackedDataLoader(dataset), PackedDataLoader(dataset)
    seen = [
        int(batch["tokens"][0, 0]) for each in (loader, other, loader, dataset) for batch in each
    ]
    assert seen == list(range(40))


@pytest.mark.processes
def test_what_another_loaders_workers_hold_is_not_skipped():
    dataset = dataset_of(0, 1, 50, steps=10)
    loader = loader_of(dataset, 2)
    list(loader)
    with pytest.raises(ResumeError, match=r"of worker 0 of 2, but is loaded in 0 of 1; .* as many"):
        list(PackedDataLoader(dataset))
    assert len(list(loader)) == 10
