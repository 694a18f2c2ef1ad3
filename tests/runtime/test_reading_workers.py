"""Workers that die or hang: an error that names them, and an exact resume."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from torch.utils.data import get_worker_info

from streampack.config import Packing
from streampack.errors import ConfigError, DataError, WorkerError
from streampack.loader.loader import PackedDataLoader
from streampack.online.dataset import PackedIterableDataset
from streampack.online.engine import OnlineEngine
from streampack.planned import loading as planned_loading
from streampack.planned.dataset import PackedStreamingDataset
from streampack.runtime.memory_budget import SharedMemory
from streampack.runtime.worker_pool import Pool
from streampack.runtime.worker_processes import WorkerOptions
from streampack.streams import IterableStream
from tests.helpers import conformance
from tests.helpers.conformance import Written, show

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Written:
    rng = np.random.default_rng(6)
    lengths = [rng.integers(1, 50, 120).tolist(), rng.integers(1, 200, 60).tolist()]
    return conformance.write_streams(tmp_path_factory.mktemp("streams"), lengths)


def worker_pids(loader: PackedDataLoader) -> list[int]:
    return [process.pid for process in workers_of(loader)]


def workers_of(loader: PackedDataLoader) -> list[Any]:
    return loader._loading._workers._session.kept.processes


def until_dead(pid: int) -> None:
    """Wait until a worker has exited, without reaping it if it is a child of this process."""
    if multiprocessing.get_start_method() == "forkserver":  # a child of the server, which reaps it
        [worker] = (child for child in multiprocessing.active_children() if child.pid == pid)
        assert multiprocessing.connection.wait([worker.sentinel], timeout=60)
    else:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_the_training_step_is_never_interrupted_by_a_workers_death(written):
    loader = PackedDataLoader(conformance.make(written), num_workers=1)
    batches = iter(loader)
    next(batches)
    pid = worker_pids(loader)[0]
    os.kill(pid, signal.SIGKILL)
    until_dead(pid)
    assert sum(range(100_000)) > 0  # a handler of SIGCHLD would raise here
    with pytest.raises(WorkerError, match=rf"pid {pid}\).*memory"):
        next(batches)


def test_what_was_read_before_an_error_is_delivered_before_it(written, tmp_path):
    copy = conformance.write_streams(tmp_path, written.lengths)
    path = copy.paths[1] / "shard.00002.mds"

    def make() -> PackedStreamingDataset:
        # In order of arrival, so that batches do not need the damaged shard from the first one on.
        return conformance.make(copy, packing={"method": "next_fit"}, order={"shuffle": False})

    def delivered(**options: Any) -> list[Any]:
        loader = PackedDataLoader(make(), **options)
        shown: list[Any] = []
        content = path.read_bytes()
        path.write_bytes(content[:-40])
        with pytest.raises(DataError, match=path.name):
            shown.extend(show(batch) for batch in loader)
        path.write_bytes(content)
        return shown

    wanted = delivered(prefetch_threads=0)
    assert 2 < len(wanted) < len(make()) - 2
    for num_workers in (1, 2):
        assert delivered(num_workers=num_workers) == wanted


def test_the_bytes_of_all_ranks_of_a_node_count(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    SharedMemory(1, tmp_path).check(free // 3)
    with pytest.raises(ConfigError, match=rf"{tmp_path} has \d+ bytes free"):
        SharedMemory(4, tmp_path).check(free // 3)
    SharedMemory(4, tmp_path / "not there").check(free // 3)


@pytest.mark.parametrize(("part_free", "at_once"), [(1.0, 8), (0.5, 4), (0.1, 1), (0.05, None)])
def test_fewer_batches_go_together_where_shared_memory_is_small(
    written, monkeypatch, part_free, at_once
):
    dataset = conformance.make(written)
    small = SharedMemory(1)
    eight = (2 * 2 + 2) * 8 * 2 * 64 * 4  # slots of two rows of 64 tokens of int32
    small.free = int(part_free * 2 * eight)
    monkeypatch.setattr(planned_loading, "SharedMemory", lambda _: small)
    if at_once is None:
        with pytest.raises(ConfigError, match=rf"has {small.free} bytes free"):
            PackedDataLoader(dataset, num_workers=2)
        return
    loader = PackedDataLoader(dataset, num_workers=2)
    assert loader._loading._group == at_once
    assert [show(batch) for batch in loader] == [show(batch) for batch in conformance.make(written)]


@pytest.mark.parametrize("persistent_workers", [True, False])
def test_workers_end_where_the_collector_finds_their_loader(written, persistent_workers):
    dataset = conformance.make(written)
    others = multiprocessing.active_children()
    loader = PackedDataLoader(dataset, num_workers=2, persistent_workers=persistent_workers)
    batches = iter(loader)
    next(batches)
    workers = [child for child in multiprocessing.active_children() if child not in others]
    assert len(workers) == 2
    cycle = [loader, batches]
    cycle.append(cycle)
    del loader, batches, cycle
    gc.collect()
    until_ended(workers)


def until_ended(workers: list[Any]) -> None:
    """Wait for processes that are about to end.

    The loader also waits for them. Between reaping a process in one thread and recording that,
    `is_alive` is still true in other threads, even right after `join`, so poll.
    """
    deadline_s = time.monotonic() + 60
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not any(worker.is_alive() for worker in workers)


def of_each(_given: None) -> Callable[[Any], list[Any]]:
    """Serve each task by returning the task itself."""
    return lambda task: [task]


def pool_of(num_workers: int, *, persistent_workers: bool = False) -> Pool:
    options = WorkerOptions(
        num_workers=num_workers, prefetch_factor=2, persistent_workers=persistent_workers
    )
    return Pool(of_each, options)


def test_workers_end_where_the_first_plan_is_an_error():
    def plans() -> Iterator[int]:
        yield 0
        raise DataError("no lengths")

    others, threads = multiprocessing.active_children(), set(threading.enumerate())
    pool = pool_of(2)
    with pytest.raises(DataError, match="no lengths") as kept:
        next(pool.results(plans()))
    assert kept.value is not None  # its traceback keeps the iteration alive
    assert multiprocessing.active_children() == others
    assert set(threading.enumerate()) == threads


def test_a_forked_child_does_not_end_its_parents_workers():
    held = [pool_of(1).results(range(8))]
    assert next(held[0]) == 0
    child = multiprocessing.get_context("fork").Process(target=held.clear)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert list(held[0]) == list(range(1, 8))


@pytest.mark.parametrize("persistent_workers", [True, False])
def test_workers_serve_the_latest_iteration_and_the_one_before_is_refused(
    written, persistent_workers
):
    dataset = conformance.make(written)
    wanted = [[show(batch) for batch in dataset] for _ in range(2)]
    loader = PackedDataLoader(
        conformance.make(written), num_workers=1, persistent_workers=persistent_workers
    )
    first, second = iter(loader), iter(loader)
    assert show(next(first)) == wanted[0][0]
    assert show(next(second)) == wanted[1][0]
    with pytest.raises(ConfigError, match="a later iteration of this loader has begun"):
        next(first)
    assert [show(batch) for batch in second] == wanted[1][1:]


def test_a_forked_child_reads_with_workers_of_its_own(written):
    wanted = [show(batch) for batch in conformance.make(written)]
    loader = PackedDataLoader(conformance.make(written), num_workers=1)
    batches = iter(loader)
    assert show(next(batches)) == wanted[0]
    state = loader.state_dict()

    def iterate() -> None:
        with pytest.raises(ConfigError, match=f"began in process {os.getppid()}"):
            next(batches)
        loader.load_state_dict(state)
        assert [show(batch) for batch in loader] == wanted[1:]

    child = multiprocessing.get_context("fork").Process(target=iterate)
    child.start()
    rest: list[Any] = []
    within(60, lambda: rest.extend(show(batch) for batch in batches))
    child.join(60)
    assert child.exitcode == 0
    assert rest == wanted[1:]


def children_since(before: set[Any]) -> list[Any]:
    """Children of this process started since then, in that order."""
    return sorted(set(multiprocessing.active_children()) - before, key=lambda child: child.pid)


def of_iterables() -> PackedIterableDataset:
    samples = [{"tokens": np.arange(50, dtype=np.int32)} for _ in range(300)]
    return PackedIterableDataset([IterableStream(samples)], packing=Packing(max_seq_len=64))


@pytest.mark.parametrize(
    ("way", "num_workers", "number"),
    [("planned", 2, 1), ("buffered", 1, 0)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("planned", 1, 0),
            ("planned", 2, 0),
            ("buffered", 2, 0),
            ("buffered", 2, 1),
        )
    ],
)
def test_a_worker_that_is_stopped_is_named_once_time_is_up_and_the_run_goes_on_exactly(
    written, way, num_workers, number
):
    def make() -> Any:
        return of_iterables() if way == "buffered" else conformance.make(written)

    wanted = [show(batch) for batch in PackedDataLoader(make(), num_workers=num_workers)]
    gc.collect()
    before = set(multiprocessing.active_children())
    loader = PackedDataLoader(make(), num_workers=num_workers, timeout=60)
    batches = iter(loader)
    shown = [show(next(batches)) for _ in range(2)]
    workers = children_since(before)
    session = loader._loading._workers._session
    assert session._timeout == 60.0
    session._timeout = 3.0  # the start of a worker may need longer on a busy machine
    os.kill(workers[number].pid, signal.SIGSTOP)
    message = rf"worker {number} \(pid {workers[number].pid}\) gave nothing for 3\.0 s \(timeout\)"

    def train() -> None:
        with pytest.raises(WorkerError, match=message + r".*; load the last state into the"):
            shown.extend(show(batch) for batch in batches)

    within(60, train)
    until_ended(workers)
    assert len(shown) < len(wanted)
    loader.load_state_dict(loader.state_dict())
    within(60, lambda: shown.extend(show(batch) for batch in loader))
    assert shown == wanted


def test_a_worker_that_missed_an_iteration_begins_the_next_with_the_others(monkeypatch):
    """A worker drops the tasks of an iteration that was left before it reached them."""
    begin = OnlineEngine.deliveries
    has_begun: list[bool] = []

    def late(self: Any, *task: Any) -> Any:
        if not has_begun and get_worker_info().id == 1:
            time.sleep(1)
        has_begun.append(True)
        return begin(self, *task)

    loader = PackedDataLoader(of_iterables(), num_workers=2)
    wanted = [show(batch) for _ in range(2) for batch in loader][len(list(loader)) :]
    monkeypatch.setattr(OnlineEngine, "deliveries", late)
    loader = PackedDataLoader(of_iterables(), num_workers=2)
    next(iter(loader))
    assert [show(batch) for batch in loader] == wanted


def test_a_worker_that_is_stopped_does_not_outlive_its_loader(written):
    before = set(multiprocessing.active_children())
    loader = PackedDataLoader(conformance.make(written), num_workers=2)
    batches = iter(loader)
    next(batches)
    workers = children_since(before)
    os.kill(workers[1].pid, signal.SIGSTOP)
    del batches, loader
    until_ended(workers)


def within(bound_s: float, work: Callable[[], None]) -> None:
    """Call something that may hang in a thread, which is abandoned in that case."""
    failures: list[BaseException] = []

    def do() -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    done = threading.Thread(target=do, daemon=True)
    done.start()
    done.join(bound_s)
    assert not done.is_alive(), f"not done after {bound_s} s"
    if failures:
        raise failures[0]
