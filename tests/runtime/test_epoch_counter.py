"""The epoch counter: workers agree on the epoch although they only share a page of memory."""

from __future__ import annotations

import multiprocessing
from itertools import permutations
from multiprocessing.sharedctypes import RawArray
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.runtime.epoch_counter import SharedEpochCounter

NUM_TURNS = 1000


@pytest.mark.processes
@given(
    num_workers=st.integers(1, 4),
    first=st.integers(0, 5),
    orders=st.lists(st.randoms(use_true_random=False), min_size=1, max_size=5),
)
def test_all_workers_of_an_iteration_agree_in_whatever_order_they_come(num_workers, first, orders):
    ledger = SharedEpochCounter()
    ledger.words[:] = ledger.words_at(first)
    for number, random in enumerate(orders):
        workers = list(range(num_workers))
        random.shuffle(workers)
        epochs = {ledger.begin(worker, f"iteration {number}") for worker in workers}
        assert epochs == {first + number}
        assert ledger.next_epoch == first + number + 1


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_worker_that_never_came_to_an_epoch_is_counted_in_the_next(order):
    ledger = SharedEpochCounter()
    # The loop was left before worker 2 had begun.
    assert [ledger.begin(worker, "first") for worker in (0, 1)] == [0, 0]
    assert {ledger.begin(worker, "second") for worker in order} == {1}


def begin_in_step(ledger: SharedEpochCounter, worker: int, turns: Any, epochs: Any) -> None:
    for number in range(NUM_TURNS):
        turns[worker] = number + 1
        while turns[1 - worker] <= number:
            pass
        epochs[worker * NUM_TURNS + number] = ledger.begin(worker, f"iteration {number}")


@pytest.mark.processes
def test_workers_that_begin_at_the_same_moment_agree():
    # They ask within the same microsecond, so reading the words one by one would go wrong.
    ledger, turns, epochs = SharedEpochCounter(), RawArray("q", 2), RawArray("q", 2 * NUM_TURNS)
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=begin_in_step, args=(ledger, worker, turns, epochs))
        for worker in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert list(epochs) == 2 * list(range(NUM_TURNS))
