"""Working ahead in threads: in order, bounded, and failures raised at their item."""

from __future__ import annotations

import queue
import threading
import time
from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import _threads as threads
from streampack._threads import ordered_thread_map, prefetched


@given(
    items=st.lists(st.integers(), max_size=20),
    depth=st.integers(1, 5),
    num_threads=st.integers(1, 4),
)
def test_results_come_in_order_and_none_is_lost(items, depth, num_threads):
    assert list(ordered_thread_map(items, lambda i: (i, i * i), depth, num_threads)) == [
        (item, item * item) for item in items
    ]


@given(
    depth=st.integers(1, 6),
    taken=st.integers(1, 12),
    num_threads=st.integers(1, 3),
    at_hand=st.integers(1, 4),
)
def test_never_more_than_depth_results_are_alive(depth, taken, num_threads, at_hand):
    asked = worked = 0

    def items():
        nonlocal asked
        for item in count():
            asked += 1
            yield item

    def work(item: int) -> int:
        nonlocal worked
        with counting:
            worked += 1
        return item

    counting = threading.Lock()
    ahead = ordered_thread_map(items(), work, depth, num_threads, at_hand)
    for delivered in range(taken):
        assert next(ahead) == delivered
        assert worked <= delivered + depth
        assert asked <= delivered + depth + at_hand
    ahead.close()


def test_items_at_hand_are_worked_on_while_the_next_one_does_not_come():
    """As when a thread plans a window, while the others and the caller read planned batches."""
    comes, made = threading.Event(), []

    def items():
        yield from range(4)
        assert comes.wait(60)
        yield 4

    def work(item: int) -> int:
        made.append(item)
        return item

    results = ordered_thread_map(items(), work, depth=2, num_threads=2, at_hand=4)
    assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
    assert sorted(made) == [0, 1, 2, 3]
    comes.set()
    assert list(results) == [4]


def test_nothing_is_asked_for_and_no_thread_starts_before_the_first_item():
    before = threading.active_count()
    ahead = ordered_thread_map((1 // 0 for _ in range(1)), lambda item: item, 2)
    assert threading.active_count() == before
    with pytest.raises(ZeroDivisionError):
        next(ahead)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_failure_surfaces_at_its_own_item_and_ends_the_threads(num_threads):
    def work(item: int) -> int:
        if item == 3:
            raise ValueError(f"item {item} is bad")
        return item

    ahead = ordered_thread_map(range(10), work, 3, num_threads)
    assert list(islice(ahead, 3)) == [0, 1, 2]
    with pytest.raises(ValueError, match="item 3 is bad"):
        next(ahead)
    assert not reading_threads()


@pytest.mark.parametrize("num_threads", [1, 4])
def test_threads_end_with_the_iteration_also_when_it_is_left_early(num_threads):
    ahead = ordered_thread_map(count(), lambda item: item, 2, num_threads)
    next(ahead)
    assert len(reading_threads()) == num_threads
    ahead.close()
    assert not reading_threads()


def test_a_callers_own_failure_surfaces_at_its_item():
    helped = threading.Event()

    def work(item: int) -> int:
        if threading.get_ident() == caller:
            helped.set()
            raise ValueError(f"item {item} is bad")
        assert helped.wait(60)
        return item

    caller, delivered = threading.get_ident(), []
    with pytest.raises(ValueError, match=r"item \d is bad") as caught:  # noqa: PT012 - a loop
        for item in ordered_thread_map(count(), work, 4):
            delivered.append(item)
    assert str(caught.value) == f"item {len(delivered)} is bad"
    assert delivered == list(range(len(delivered)))


def test_several_threads_work_at_the_same_time_on_items_asked_for_one_by_one():
    # A barrier for every three items would not do: while the caller works on the fourth item, it
    # does not take the three results that keep the threads from the fifth.
    at_work: queue.SimpleQueue[int] = queue.SimpleQueue()
    three_are = threading.Event()
    asking = threading.Lock()

    def items():
        for item in range(6):
            assert asking.acquire(blocking=False)
            asking.release()
            yield item

    def work(item: int) -> int:
        at_work.put(item)
        if at_work.qsize() == 3:
            three_are.set()
        assert three_are.wait(timeout=60)
        return item

    assert list(ordered_thread_map(items(), work, 4, 3)) == list(range(6))


def reading_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("streampack-read")]


def wait_for_the_end() -> None:
    ended = time.monotonic() + 60
    while reading_threads():
        assert time.monotonic() < ended
        time.sleep(0.01)


def test_leaving_does_not_wait_for_ever_for_items_that_do_not_come(monkeypatch):
    monkeypatch.setattr(threads, "LEAVE_S", 0.2)
    comes = threading.Event()

    def items():
        yield 1
        comes.wait(120)

    results = ordered_thread_map(items(), lambda item: item, depth=4)
    assert next(results) == 1
    begun = time.monotonic()
    results.close()
    assert 0.1 < time.monotonic() - begun < 60
    comes.set()
    wait_for_the_end()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_thread_may_be_the_one_that_leaves(num_threads, monkeypatch):
    """As happens when the garbage collector finds an abandoned iteration."""
    monkeypatch.setattr(threads, "LEAVE_S", 0.2)
    left = []

    def items():
        yield 1
        may_leave.wait(60)
        try:
            results.close()
        except BaseException as failure:
            left.append(failure)
        else:
            left.append(None)
        yield 2

    may_leave = threading.Event()
    results = ordered_thread_map(items(), lambda item: item, depth=4, num_threads=num_threads)
    assert next(results) == 1
    may_leave.set()
    wait_for_the_end()
    assert left == [None]
    assert list(results) == []


@given(
    items=st.lists(st.none() | st.integers(), max_size=12),
    depth=st.integers(1, 4),
    pauses=st.lists(st.sampled_from([0, 0.001]), max_size=12),
)
def test_prefetched_items_come_in_order_whether_or_not_the_caller_is_away(items, depth, pauses):
    received = []
    for item in prefetched(items, depth):
        received.append(item)
        if len(received) <= len(pauses):
            time.sleep(pauses[len(received) - 1])
    assert received == items


def test_a_caller_that_is_away_finds_prefetched_items_within_the_depth():
    readers = []

    def items():
        for item in count():
            readers.append(threading.get_ident())
            yield item

    ahead = prefetched(items(), 3)
    for taken in range(1, 20):
        assert next(ahead) == taken - 1
        time.sleep(0.01)
        assert len(readers) <= taken + 3
    assert threading.get_ident() not in readers[threads.NUM_AWAY :]
    ahead.close()


def test_a_caller_that_is_never_away_reads_itself_and_starts_no_thread(monkeypatch):
    monkeypatch.setattr(threads, "AWAY_S", 60)
    before = threading.active_count()
    for item in islice(prefetched(count(), 2), 500):
        assert threading.active_count() == before, item


@pytest.mark.parametrize("away_s", [0, 0.005])
def test_a_failure_surfaces_at_its_own_prefetched_item(away_s):
    def items():
        yield from range(6)
        raise ValueError("item 6 is bad")

    ahead = prefetched(items(), 4)
    for item in range(6):
        assert next(ahead) == item
        time.sleep(away_s)
    with pytest.raises(ValueError, match="item 6 is bad"):
        next(ahead)
