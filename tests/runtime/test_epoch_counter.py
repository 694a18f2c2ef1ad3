"""The epoch counter: workers agree on the epoch although they only share a page of memory."""

from __future__ import annotations

import multiprocessing
import pickle
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
    ledger.set_epoch(first)
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


def test_a_start_that_failed_can_be_taken_back():
    ledger = SharedEpochCounter()
    ledger.begin(0, "first")
    word = ledger.word(0)
    assert ledger.begin(0, "second") == 1
    ledger.put_back(0, word)
    assert ledger.next_epoch == 1
    assert ledger.begin(0, "third") == 1


def test_a_copy_counts_for_itself():
    ledger = SharedEpochCounter()
    ledger.run = [1, 2, 3, 4, 5, 6, 7]
    ledger.begin(0, "a")
    copy = pickle.loads(pickle.dumps(ledger))
    assert copy.run == [1, 2, 3, 4, 5, 6, 7]
    assert copy.begin(0, "b") == 1
    assert ledger.next_epoch == 1
    assert copy.next_epoch == 2


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


def count_on(ledger: SharedEpochCounter, worker: int) -> None:
    ledger.begin(worker, "in a child")


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_child_process_shares_the_page(method):
    ledger = SharedEpochCounter()
    child = multiprocessing.get_context(method).Process(target=count_on, args=(ledger, 1))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert ledger.next_epoch == 1
