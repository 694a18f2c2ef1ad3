"""Reading ahead while the caller is away: in order, within the bound, by one reader at a time."""

from __future__ import annotations

import os
import threading
import time
from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.errors import WorkerError
from streampack.runtime import prefetch_thread
from streampack.runtime.prefetch_thread import prefetched

WAIT_S = 10


def reading_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("streampack-read")]


def wait_until(is_so) -> None:
    ended = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < ended
        time.sleep(0.001)


def begun(items):
    """Return the iterator of a caller that was away once, and so lets the thread start."""
    assert next(items) == 0
    time.sleep(5 * prefetch_thread.AWAY_S)
    assert next(items) == 1
    return items


class Source:
    """Counts, and notes which thread read each item. No two threads may read together."""

    def __init__(self) -> None:
        self.readers: list[int] = []
        self._reading = threading.Lock()

    def __iter__(self):
        for item in count():
            assert self._reading.acquire(blocking=False)
            self.readers.append(threading.get_ident())
            self._reading.release()
            yield item


@given(
    items=st.lists(st.none() | st.integers(), max_size=12),
    depth=st.integers(1, 4),
    pauses=st.lists(st.sampled_from([0, 0, 0.0005, 0.002]), max_size=12),
)
def test_items_come_in_order_and_none_is_lost(items, depth, pauses):
    received = []
    for item in prefetched(items, depth):
        received.append(item)
        if len(received) <= len(pauses):
            time.sleep(pauses[len(received) - 1])
    assert received == items
    assert not reading_threads()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_caller_that_is_away_finds_items_read_by_the_thread(depth):
    source = Source()
    items = begun(prefetched(source, depth))
    for taken in range(2, 20):
        wait_until(lambda: len(source.readers) == taken + depth)  # noqa: B023 - called at once
        time.sleep(0.001)
        assert len(source.readers) == taken + depth  # never more than `depth` wait
        assert next(items) == taken
    assert threading.get_ident() not in source.readers[2:]
    items.close()


def test_a_caller_that_is_never_away_reads_itself_and_starts_no_thread(monkeypatch):
    monkeypatch.setattr(prefetch_thread, "AWAY_S", 0.5)
    source = Source()
    items = prefetched(source, 2)
    assert list(islice(items, 500)) == list(range(500))
    assert set(source.readers) == {threading.get_ident()}
    assert not reading_threads()


def test_a_caller_that_is_no_longer_away_reads_itself(monkeypatch):
    source = Source()
    items = begun(prefetched(source, 2))
    wait_until(lambda: len(source.readers) == 4)
    monkeypatch.setattr(prefetch_thread, "AWAY_S", 0.5)
    assert list(islice(items, 500)) == list(range(2, 502))
    assert set(source.readers[-400:]) == {threading.get_ident()}


def test_a_caller_that_comes_while_the_thread_reads_gets_that_item():
    reads, goes = threading.Event(), threading.Event()

    def items():
        yield from range(2)
        reads.set()
        assert goes.wait(WAIT_S)
        yield 2
        yield 3

    ahead = begun(prefetched(items(), 2))
    assert reads.wait(WAIT_S)
    threading.Timer(0.05, goes.set).start()
    assert list(ahead) == [2, 3]


@pytest.mark.parametrize("away_s", [0, 0.05])
def test_a_failure_surfaces_at_its_own_item_and_ends_the_thread(away_s):
    def items():
        yield from range(3)
        raise ValueError("item 3 is bad")

    ahead = prefetched(items(), 4)
    for item in range(3):
        assert next(ahead) == item
        time.sleep(away_s)
    with pytest.raises(ValueError, match="item 3 is bad"):
        next(ahead)
    assert not reading_threads()


def test_nothing_is_read_and_no_thread_starts_before_the_first_item():
    before = threading.active_count()
    ahead = prefetched((1 // 0 for _ in range(1)), 2)
    assert threading.active_count() == before
    with pytest.raises(ZeroDivisionError):
        next(ahead)


@pytest.mark.parametrize("away_s", [0, 0.05])
def test_a_loop_that_is_left_ends_the_thread_immediately(away_s, monkeypatch):
    monkeypatch.setattr(prefetch_thread, "AWAY_S", 0.02)  # more than a busy machine takes away
    for _ in range(20):
        ahead = prefetched(count(), 2)
        for item in range(2):
            assert next(ahead) == item
            time.sleep(away_s)
        assert bool(reading_threads()) == bool(away_s)
        begin = time.monotonic()
        ahead.close()
        assert time.monotonic() - begin < prefetch_thread.LEAVE_S / 2
        assert not reading_threads()


@pytest.mark.parametrize("away_s", [0, 0.05])
def test_a_loop_that_is_dropped_ends_the_thread(away_s):
    ahead = prefetched(count(), 2)
    for item in range(2):
        assert next(ahead) == item
        time.sleep(away_s)
    del ahead
    wait_until(lambda: not reading_threads())


def test_leaving_does_not_wait_for_ever_for_an_item_that_does_not_come(monkeypatch):
    monkeypatch.setattr(prefetch_thread, "LEAVE_S", 0.2)
    reads, goes = threading.Event(), threading.Event()

    def items():
        yield from range(2)
        reads.set()
        goes.wait(WAIT_S)

    ahead = begun(prefetched(items(), 2))
    assert reads.wait(WAIT_S)
    begin = time.monotonic()
    ahead.close()
    assert time.monotonic() - begin < WAIT_S / 2
    goes.set()
    wait_until(lambda: not reading_threads())


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_the_thread_reads_is_refused(monkeypatch):
    monkeypatch.setattr(prefetch_thread, "ALIVE_S", 0.1)
    reads, goes = threading.Event(), threading.Event()

    def items():
        yield from range(2)
        reads.set()
        goes.wait(WAIT_S)
        yield 2

    ahead = begun(prefetched(items(), 2))
    assert reads.wait(WAIT_S)
    child = os.fork()
    if not child:
        try:
            next(ahead)
        except WorkerError as error:
            os._exit(0 if "iterate in the process that began" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    goes.set()
    assert list(ahead) == [2]
