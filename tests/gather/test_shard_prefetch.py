"""Shards are prefetched in order, once, within the limit; failures surface immediately."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from streampack.errors import DataError
from streampack.gather.shard_prefetch import FetchLimits, ShardPrefetcher, fetch_all
from streampack.plan.shard_tracker import ShardDelta
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.locks import FileLocks
from streampack.streams import Stream, TokenStream, open_streams
from streampack.types import NO_PACKS, SAMPLE, STREAM, Packs
from tests.helpers import builders

LENGTHS = [40] * 200  # about 8 shards of 4 KB


class Gate(TokenStream):
    """A stream that records the shards it is asked to fetch, and can be made to wait."""

    __slots__ = ("__dict__",)

    asked: list[int]
    gate: threading.Event
    notes: list[tuple[str, list[int]]]

    def fetch(self, shard: int, *, is_waiting: bool = True) -> int | None:
        self.asked.append(shard)
        assert self.gate.wait(30)
        return super().fetch(shard, is_waiting=is_waiting)

    def mark_planned(self, shards: np.ndarray) -> None:
        self.notes.append(("planned", shards.tolist()))

    def mark_finished(self, shards: np.ndarray) -> None:
        self.notes.append(("finished", shards.tolist()))


class Gates(Gate):
    """A stream with a gate for each shard; another process fetches the first shard."""

    gates: dict[int, threading.Event]

    def fetch(self, shard: int, *, is_waiting: bool = True) -> int | None:
        self.asked.append(shard)
        assert self.gates[shard].wait(30)
        return TokenStream.fetch(self, shard) if shard > 0 or is_waiting else None


@pytest.fixture
def remote(tmp_path):
    return builders.write_stream_files(tmp_path / "remote", LENGTHS, compression="zstd")[0]


@pytest.fixture
def stream(remote, tmp_path):
    gate = gated(Gate, remote, tmp_path / "local", gate=threading.Event())
    gate.gate.set()
    return gate


@pytest.fixture
def gates(remote, tmp_path):
    events = {shard: threading.Event() for shard in range(8)}
    return gated(Gates, remote, tmp_path / "local", gates=events)


def gated(kind: type[Gate], remote: Path, local: Path, **values: object) -> Gate:
    opened = open_streams([Stream(remote=str(remote), local=str(local))])[0]
    stream = kind(**{each.name: getattr(opened, each.name) for each in fields(opened) if each.init})
    for name, value in {"asked": [], "notes": [], **values}.items():
        object.__setattr__(stream, name, value)
    return stream


def rows(*shards: int) -> np.ndarray:
    return np.array([(0, shard) for shard in shards], np.int64).reshape(-1, 2)


def planned(ahead: np.ndarray) -> ShardDelta:
    return ShardDelta(ahead=ahead, num_first=0, finished=rows())


def until(condition, timeout_s: float = 30) -> None:
    """Wait until another thread makes the condition true."""
    tick = threading.Event()
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError("it did not come to hold in time")


def fetch_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("streampack-fetch")]


def test_shards_are_brought_in_the_order_of_need_each_once(stream):
    until(lambda: not fetch_threads())  # those of earlier tests
    fetcher = ShardPrefetcher([stream], FetchLimits(num_threads=1))
    assert not fetch_threads(), "threads start with the first plan"
    fetcher.update_plan(planned(rows(3, 1, 5)))
    fetcher.wait_for([(0, 3), (0, 1), (0, 5)])
    fetcher.update_plan(planned(rows(1, 5, 2)))
    fetcher.wait_for([(0, 2)])
    assert stream.asked == [3, 1, 5, 2]
    assert all(stream.is_here(shard) for shard in (1, 2, 3, 5))
    stats = fetcher.stats()
    assert stats["fetched"] == 4
    assert stats["fetched_bytes"] == sum(
        stream.shards.index.shards[shard].packed.num_bytes for shard in (1, 2, 3, 5)
    )
    fetcher.close()
    assert not fetch_threads()


def test_what_a_reader_waits_for_goes_before_all_others(stream):
    begin_s = time.monotonic()
    stream.gate.clear()
    fetcher = ShardPrefetcher([stream], FetchLimits(num_threads=1))
    fetcher.update_plan(planned(rows(0, 1, 2, 3)))
    until(lambda: stream.asked == [0])
    reader = threading.Thread(target=fetcher.wait_for, args=([(0, 3)],))
    reader.start()
    until(lambda: (0, 3) in fetcher._urgent)
    stream.gate.set()
    reader.join(30)
    assert stream.asked[:2] == [0, 3]
    assert fetcher.stats()["waited_for"] == 1
    assert 0 < fetcher.stats()["waited_s"] <= time.monotonic() - begin_s
    fetcher.close()


def test_what_a_reader_waits_for_stays_first_while_another_process_brings_it(gates):
    fetcher = ShardPrefetcher([gates], FetchLimits(num_threads=2))
    fetcher.update_plan(planned(rows(*range(8))))
    until(lambda: sorted(gates.asked) == [0, 1])
    reader = threading.Thread(target=fetcher.wait_for, args=([(0, 0)],))
    reader.start()
    until(lambda: fetcher._urgent)
    gates.gates[1].set()  # its thread finds that the other process is fetching 0
    until(lambda: 2 in gates.asked)
    gates.gates[0].set()
    reader.join(30)
    assert not reader.is_alive()
    assert gates.asked[2:4] == [2, 0]
    for gate in gates.gates.values():
        gate.set()
    fetcher.close()


def test_what_a_reader_waits_for_is_not_forgotten_when_the_plan_goes_on(gates):
    gates.gates[1].set()
    fetcher = ShardPrefetcher([gates], FetchLimits(num_threads=2))
    readers = [
        threading.Thread(target=fetcher.wait_for, args=([(0, 1), (0, last)],), daemon=True)
        for last in (5, 6)
    ]
    for reader in readers:
        reader.start()
    until(lambda: sorted(gates.asked) == [1, 5, 6])
    for reader, last in zip(readers, (5, 6), strict=True):
        fetcher.update_plan(planned(rows(7)))
        gates.gates[last].set()
        reader.join(30)
        assert not reader.is_alive()
    gates.gates[7].set()
    until(lambda: (0, 7) in fetcher._here)
    fetcher.update_plan(planned(rows(7)))
    assert fetcher._here == {(0, 7)}
    fetcher.close()


def test_what_another_process_brings_is_let_go_once_the_plan_needs_it_no_more(gates):
    fetcher = ShardPrefetcher([gates], FetchLimits(num_threads=1))
    fetcher.update_plan(planned(rows(0)))
    until(lambda: gates.asked == [0])
    fetcher.update_plan(planned(rows(1, 2)))
    for gate in gates.gates.values():
        gate.set()
    fetcher.wait_for([(0, 1), (0, 2)])
    fetcher.update_plan(planned(rows(3)))
    fetcher.wait_for([(0, 3)])
    fetcher.close()
    assert gates.asked == [0, 1, 2, 3]


def test_it_fetches_no_further_ahead_than_the_limit(stream):
    size = int(stream.raw_bytes[0])
    fetcher = ShardPrefetcher([stream], FetchLimits(cache_bytes=3 * size + size // 2))
    fetcher.update_plan(planned(rows(*range(7))))
    fetcher.wait_for([(0, 0), (0, 1), (0, 2)])
    until(lambda: not fetcher._busy and not fetcher._ahead)
    assert sorted(stream.asked) == [0, 1, 2]
    assert fetcher.stats()["waiting"] == 4
    fetcher.wait_for([(0, 6)])  # a reader still gets what it needs
    assert stream.is_here(6)
    assert fetcher.stats()["waiting"] == 3
    fetcher.close()


def test_processes_beside_each_other_begin_with_other_shards(stream):
    firsts = []
    for turn in range(2):
        stream.asked.clear()
        limits = FetchLimits(num_threads=1, turn=turn, num_turns=2)
        fetcher = ShardPrefetcher([stream], limits)
        fetcher.update_plan(planned(rows(*range(8))))
        until(lambda own=fetcher: len(own._here) == 8)
        fetcher.close()
        firsts.append(list(stream.asked))
        for path in stream.cache.folder.glob("*.mds.*"):
            path.unlink()
    assert sorted(firsts[0]) == sorted(firsts[1]) == list(range(8))
    assert firsts[0][0] != firsts[1][0]


def test_plans_and_finished_shards_are_noted_in_order(stream):
    fetcher = ShardPrefetcher([stream])
    fetcher.update_plan(planned(rows(0, 1)))
    fetcher.finish(rows(0))
    fetcher.update_plan(planned(rows(1, 0)))
    until(lambda: len(stream.notes) == 3)
    assert stream.notes == [("planned", [0, 1]), ("finished", [0]), ("planned", [1, 0])]
    fetcher.close()


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_failure_is_raised_by_whoever_asks_next_and_ends_the_threads(stream, remote, num_threads):
    (remote / stream.shards.index.shards[5].packed.basename).unlink()
    fetcher = ShardPrefetcher([stream], FetchLimits(num_threads=num_threads))
    fetcher.update_plan(planned(rows(5, 6)))
    with pytest.raises(DataError, match=r"shard\.00005"):
        fetcher.wait_for([(0, 5)])
    with pytest.raises(DataError, match=r"shard\.00005"):
        fetcher.check()
    until(lambda: not fetch_threads())
    fetcher.close()


def test_leaving_does_not_wait_for_a_store_that_hangs(stream):
    stream.gate.clear()
    fetcher = ShardPrefetcher([stream], FetchLimits(num_threads=1))
    fetcher.update_plan(planned(rows(0)))
    until(lambda: stream.asked == [0])
    fetcher.close()  # does not wait forever; the thread ends with its fetch
    stream.gate.set()
    until(lambda: not fetch_threads())


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_waits_for_the_shards_of_its_samples_in_every_stream_and_no_others(
    remote, tmp_path, seed
):
    path = str(remote)
    raw = builders.stream_of(tmp_path / "raw", LENGTHS)
    kept = [Stream(remote=path, local=str(tmp_path / name)) for name in ("a", "b")]
    streams = open_streams([kept[0], raw, kept[1]])
    fetcher = ShardPrefetcher(streams)
    expected: set[tuple[int, int]] = set()
    for samples in np.random.default_rng(seed).integers(0, len(LENGTHS), (3, 2)).tolist():
        segments = np.zeros((4, 6), np.int64)
        segments[:, STREAM] = [0, 2, 1, 2]
        segments[:, SAMPLE] = [*samples, 3, 7]
        fetcher.wait_for_packs(Packs(segments=segments, ends=np.array([4])))
        for number, sample in zip([0, 2, 2], [*samples, 7], strict=True):
            first = streams[number].first_sample
            expected.add((number, int(np.flatnonzero(first <= sample)[-1])))
    here = {(n, i) for n in (0, 2) for i in range(streams[n].num_shards) if streams[n].is_here(i)}
    assert here == expected
    assert fetcher.stats()["fetched"] == len(expected)
    fetcher.wait_for_packs(NO_PACKS)
    fetcher.close()


def test_a_cache_that_was_emptied_in_between_is_filled_again(stream):
    fetcher = ShardPrefetcher([stream])
    fetcher.update_plan(planned(rows(0)))
    fetcher.wait_for([(0, 0)])
    fetcher.update_plan(planned(rows(1)))
    fetcher.wait_for([(0, 1)])
    shutil.rmtree(stream.cache.folder)
    fetcher.wait_for([(0, 0)])
    assert stream.is_here(0)
    fetcher.close()


def test_a_shard_that_another_process_brings_is_left_to_it_while_there_are_others(stream):
    fetcher = ShardPrefetcher([stream], FetchLimits(num_threads=1))
    name = stream.cache._name_of(stream.shards.index.shards[0])
    with FileLocks(stream.cache.folder, LocalFilesystem()).hold(name, 60):
        fetcher.update_plan(planned(rows(0, 1, 2)))
        fetcher.wait_for([(0, 1), (0, 2)])
        assert not stream.is_here(0)
    until(lambda: stream.is_here(0))
    fetcher.close()


def test_a_shard_that_two_threads_ask_for_counts_once(stream):
    stream.gate.clear()
    ahead = ShardPrefetcher([stream], FetchLimits(num_threads=1))
    ahead.update_plan(planned(rows(0, 1, 2, 3)))
    until(lambda: stream.asked)
    # Meanwhile the planner asks for the lengths of all shards that the fetcher has begun to fetch.
    fetched: list[int] = []
    planner = threading.Thread(
        target=lambda: fetched.extend(fetch_all(stream, np.arange(4, dtype=np.int64)))
    )
    planner.start()
    until(lambda: len(stream.asked) == 5)
    stream.gate.set()
    ahead.wait_for([(0, shard) for shard in range(4)])
    planner.join(30)
    ahead.close()
    assert len(fetched) + ahead.stats()["fetched"] == 4
    sizes = [shard.packed.num_bytes for shard in stream.shards.index.shards[:4]]
    assert sum(fetched) + ahead.stats()["fetched_bytes"] == sum(sizes)
