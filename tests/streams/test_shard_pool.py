"""The pool of open shards closes the least recently used, and those that lost their files."""

from __future__ import annotations

import multiprocessing
import threading

import numpy as np
import pytest

from streampack.mds.columns import Spans
from streampack.streams.shard_pool import OpenShard, ShardPool, shard_pool


def shard_of(key: int | str, num_samples: int, is_gone=None) -> OpenShard:
    spans = Spans(
        begins=np.zeros(num_samples, np.int64),
        counts=np.ones(num_samples, np.int64),
        dtype="int32",
    )
    return OpenShard(
        key=key,
        uri=str(key),
        data=np.zeros(8, np.uint8),
        tokens=spans,
        labels=None,
        loss_mask=None,
        is_gone=is_gone,
    )


def test_the_oldest_used_is_let_go_when_there_are_too_many():
    shards = [shard_of(key, 4) for key in range(3)]
    pool = ShardPool(max_shards=2, max_samples=10**6)
    pool.put(shards[0])
    pool.put(shards[1])
    assert pool.get(0) is shards[0]
    pool.put(shards[2])
    assert pool.get(1) is None
    assert pool.get(0) is shards[0]
    assert len(pool) == 2


def test_touched_shards_are_most_recent_and_closed_ones_are_added_again():
    shards = [shard_of(key, 4) for key in range(4)]
    pool = ShardPool(max_shards=2, max_samples=10**6)
    for shard in shards[:3]:
        pool.put(shard)
    assert 0 not in pool
    pool.touch([shards[0], shards[1]])
    assert [key in pool for key in range(3)] == [True, True, False]
    pool.put(shards[3])
    assert [key in pool for key in range(4)] == [False, True, False, True]


def test_the_oldest_used_is_let_go_when_they_hold_too_many_samples():
    small = ShardPool(max_shards=10, max_samples=9)
    for number in range(3):
        small.put(shard_of(number, 4))
    assert small.get(0) is None
    assert small.get(2) is not None
    small.put(shard_of(3, 100))  # one is always kept
    assert len(small) == 1


def test_shards_whose_files_are_gone_are_let_go_at_the_next_opening_and_count_no_more():
    gone: set[int] = set()
    recent = ShardPool(max_shards=10, max_samples=12)
    for number in range(3):
        recent.put(shard_of(number, 4, lambda number=number: number in gone))
    gone.add(1)
    assert recent.get(1) is not None
    recent.put(shard_of(3, 4))
    assert [recent.get(number) is None for number in range(4)] == [False, True, False, False]


def _has_shard(_: int) -> bool:
    return shard_pool().get("a key of this test") is not None


@pytest.mark.processes
def test_a_fork_has_open_shards_of_its_own_even_if_a_thread_of_its_parent_looks_for_one():
    shard_pool().put(shard_of("a key of this test", 1))
    assert _has_shard(0)
    is_held, may_leave = threading.Event(), threading.Event()

    def look() -> None:
        with shard_pool()._lock:
            is_held.set()
            may_leave.wait(timeout=60)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        assert is_held.wait(timeout=60)
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.map_async(_has_shard, [0]).get(timeout=60) == [False]
    finally:
        may_leave.set()
        thread.join()
    assert _has_shard(0)
