"""A file over ranges reads as a local one does, with few requests."""

from __future__ import annotations

import io
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.write.inputs.range_file import RangeFile

DATA = bytes(range(256)) * 40


class Store:
    """Bytes that are fetched by range; notes the ranges and their threads."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.threads: set[str] = set()

    def fetch(self, start: int, stop: int) -> bytes:
        self.ranges.append((start, stop))
        self.threads.add(threading.current_thread().name)
        return DATA[start:stop]


@given(
    steps=st.lists(st.tuples(st.integers(0, len(DATA) + 9), st.integers(0, 3000)), max_size=20),
    block_bytes=st.integers(1, 5000),
    reads_ahead=st.booleans(),
)
def test_any_reads_give_the_bytes_of_the_object(steps, block_bytes, reads_ahead):
    with RangeFile(len(DATA), Store().fetch, block_bytes, reads_ahead=reads_ahead) as file:
        for position, num_bytes in steps:
            assert file.seek(position) == file.tell() == position
            piece = file.read(num_bytes)
            assert piece == DATA[position : position + len(piece)]
            assert piece or not num_bytes or position >= len(DATA)


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_reading_on_requests_each_byte_once(reads_ahead):
    store = Store()
    with RangeFile(len(DATA), store.fetch, 1000, reads_ahead=reads_ahead) as file:
        buffered = io.BufferedReader(file, 100)
        assert b"".join(iter(lambda: buffered.read(70), b"")) == DATA

    assert sorted(store.ranges)[:2] == [(0, 1000), (1000, 2000)]
    assert sum(stop - start for start, stop in store.ranges) == len(DATA)
    assert (len(store.threads) == 2) == reads_ahead


def test_a_large_read_is_one_request():
    store = Store()
    file = io.BufferedReader(RangeFile(len(DATA), store.fetch, 100), 100)
    file.seek(500)

    assert file.read(8000) == DATA[500:8500]
    assert store.ranges == [(500, 8500)]


def test_a_failure_to_read_ahead_is_raised_where_its_bytes_are_read():
    def fetch(start: int, stop: int) -> bytes:
        if start >= 2000:
            raise OSError("broken")
        return DATA[start:stop]

    with RangeFile(len(DATA), fetch, 1000, reads_ahead=True) as file:
        assert file.read(1000) == DATA[:1000]
        assert file.read(1000) == DATA[1000:2000]
        with pytest.raises(OSError, match="broken"):
            file.read(1)


def test_closing_does_not_wait_for_a_block_of_a_store_that_is_down():
    is_closed = threading.Event()

    def fetch(start: int, stop: int) -> bytes:
        if start:
            assert is_closed.wait(30)
        return DATA[start:stop]

    with RangeFile(len(DATA), fetch, 1000, reads_ahead=True) as file:
        assert file.read(10) == DATA[:10]
        [thread] = [t for t in threading.enumerate() if t.name == "streampack-input"]
        file.close()
        assert thread.is_alive()
    is_closed.set()
    thread.join(30)
    assert not thread.is_alive()
