"""Exceptions that a signal handler raises at any moment of the loop: no hang, no wrong batch.

::

    opcode   LOAD  CALL  |  STORE  JUMP_BACKWARD  |  LOAD ...      |: where Python runs handlers
    moment               n                       n+1

A moment is counted by tracing opcodes, so each can be tried and a failure repeated. Real signals
come at random times beside that, as these reach what runs without Python's opcodes too.

Whatever was interrupted, the loader's state is that of the batch last delivered, the same loader
goes on from there, and processes, threads and files do not grow in number.
"""

from __future__ import annotations

import dis
import faulthandler
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack.config import Packing
from streampack.loader.loader import PackedDataLoader
from streampack.online.dataset import PackedIterableDataset
from streampack.planned.dataset import PackedStreamingDataset
from streampack.streams import IterableStream, Stream
from tests.helpers import conformance
from tests.helpers.conformance import Written, show

HANG_S = 90
NUM_QUICK, NUM_SLOW = 2, 40

CHECKED = tuple(
    number
    for name, number in dis.opmap.items()
    if name.startswith("CALL") or name in ("JUMP_BACKWARD", "RESUME", "PRECALL")
)


RESUME = dis.opmap["RESUME"]


class Interrupt(BaseException):
    """What a handler raises, as KeyboardInterrupt does."""


class Alarm(Exception):  # noqa: N818
    """What other handlers raise."""


KINDS = (KeyboardInterrupt, Interrupt, Alarm)


class Moments:
    """Counts the moments at which Python may run a signal handler, and raises at one of them."""

    def __init__(self, at: int | None = None, kind: type[BaseException] = Interrupt) -> None:
        self.at = at
        self.kind = kind
        self.count = 0
        self.where = ""
        self._entered: Any = None

    def __enter__(self) -> Moments:
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: Any, _event: str, _argument: object) -> Any:
        if frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        before = None
        self._entered = frame.f_back  # whose call is one of Python's, which looks as it begins

        def trace(frame: Any, event: str, _argument: object) -> Any:
            nonlocal before
            if event != "opcode":
                return trace
            entered, self._entered = self._entered, None
            if before in CHECKED and (entered is not frame or before == RESUME):
                self.count += 1
                if self.count - 1 == self.at:
                    self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    sys.settrace(None)
                    raise self.kind
            before = frame.f_code.co_code[frame.f_lasti]
            return trace

        return trace


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    rng = np.random.default_rng(6)
    lengths = [rng.integers(1, 50, 80).tolist(), rng.integers(1, 200, 40).tolist()]
    return conformance.write_streams(tmp_path_factory.mktemp("streams"), lengths)


def iterables() -> PackedIterableDataset:
    streams = [IterableStream([[n, k] * 20 for k in range(1, 60)]) for n in (1, 2)]
    return PackedIterableDataset(streams, packing=Packing(max_seq_len=64), batch_size=2)


def fetched(written: Written, folder: Path) -> PackedStreamingDataset:
    folder = folder / str(len(list(folder.iterdir())))
    streams = [
        Stream(remote=str(path), local=str(folder / str(n))) for n, path in enumerate(written.paths)
    ]
    return PackedStreamingDataset(streams, packing=Packing(max_seq_len=64), batch_size=2)


WAYS: dict[str, dict[str, Any]] = {
    "loop": {"prefetch_threads": 0},
    "thread": {"prefetch_threads": 1},
    "threads": {"prefetch_threads": 2},
    "workers": {"num_workers": 2},
    "workers of one epoch": {"num_workers": 2, "persistent_workers": False},
}
SOURCES = ("planned", "fetched", "iterables")
CONFIGS = [pytest.param(s, w, id=f"{s}-{w}") for s in SOURCES for w in WAYS]


class Case:
    """A loader of one configuration, and what it should deliver."""

    def __init__(self, source: str, way: str, written: Written, folder: Path) -> None:
        self._make: dict[str, Callable[[], Any]] = {
            "planned": lambda: conformance.make(written),
            "fetched": lambda: fetched(written, folder),
            "iterables": iterables,
        }
        self._source, self._options = source, WAYS[way]
        with hanging():
            loader = self.loader()
            self.wanted = [show(batch) for _ in range(2) for batch in loader]
            self.num_batches = len(self.wanted) // 2

    def loader(self) -> PackedDataLoader:
        return PackedDataLoader(self._make[self._source](), **self._options)

    def count(self, num_before: int) -> int:
        """Return how many moments the batch after so many has."""
        batches = iter(self.loader())
        for _ in range(num_before):
            next(batches)
        with hanging(), Moments() as moments:
            next(batches)
        return moments.count

    def check(self, at: int, kind: type[BaseException], num_before: int) -> bool:
        """Interrupt a batch at a moment, then go on; return whether the interrupt came."""
        loader, wanted = self.loader(), self.wanted[: self.num_batches]
        with hanging():
            state = loader.state_dict()
            batches = iter(loader)
            shown = [show(next(batches)) for _ in range(num_before)]
            with Moments(at, kind) as moments:
                batch, was_raised = None, False
                try:
                    batch = next(batches)
                except kind:
                    was_raised = True
            shown += [] if was_raised else [show(batch)]
            batches = None
            if shown:
                state = loader.state_dict()
                # As after a break: the next epoch.
                rest = [show(batch) for batch in loader]
                assert rest == self.wanted[self.num_batches :], moments.where
            loader.load_state_dict(state)
            assert shown + [show(batch) for batch in loader] == wanted, moments.where
        return was_raised


@contextmanager
def hanging() -> Iterator[None]:
    """End the whole process with a traceback of all threads where something hangs."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def resources() -> tuple[int, int, int]:
    """Count children, also those that nobody waited for, threads of ours, and pipes and memory.

    Shards stay open for as long as the process has room for them.
    """
    children = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended since
            children += len((task / "children").read_text().split())
    threads = sum(thread.name.startswith("streampack") for thread in threading.enumerate())
    num_open = 0
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{each}")
            num_open += name.startswith(("socket:", "pipe:", "/dev/shm/torch"))
    return children, threads, num_open


def check_no_more(before: tuple[int, int, int]) -> None:
    """Check that no more is held than before; what is about to end may need a moment."""
    sys.last_traceback = None
    deadline_s = time.monotonic() + 20
    while True:
        gc.collect()
        now = resources()
        if all(n <= b for n, b in zip(now, before, strict=True)) or time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
    assert all(n <= b for n, b in zip(now, before, strict=True)), (before, now)


def try_moments(case: Case, seed: int, num_moments: int) -> int:
    """Interrupt the first batch, and a later one, at some moments; return how many came."""
    chance = random.Random(seed)
    num_raised = 0
    for num_before in (0, 5):
        count = case.count(num_before)
        # A part from each stretch, so that none of the phases of a start is left out.
        stretches = np.linspace(0, count, num_moments + 1).astype(int).tolist()
        for first, last in pairwise(stretches):
            at = chance.randrange(first, max(last, first + 1))
            num_raised += case.check(at, chance.choice(KINDS), num_before)
    return num_raised


@pytest.mark.parametrize(("source", "way"), CONFIGS)
def test_a_loader_goes_on_after_an_interrupt_at_any_moment(written, tmp_path, source, way):
    case = Case(source, way, written, tmp_path)
    gc.collect()
    before = resources()
    assert try_moments(case, 3, NUM_QUICK) > 0
    check_no_more(before)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "way"), CONFIGS)
def test_a_loader_goes_on_after_an_interrupt_at_any_of_many_moments(written, tmp_path, source, way):
    case = Case(source, way, written, tmp_path)
    gc.collect()
    before = resources()
    assert try_moments(case, 4, NUM_SLOW) > 0
    check_no_more(before)
