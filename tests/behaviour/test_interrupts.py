"""Exceptions that a signal handler raises at any moment of the loop: no hang, no wrong batch.

::

    opcode   LOAD  CALL  |  STORE  JUMP_BACKWARD  |  LOAD ...      |: where Python runs handlers
    moment   n     n+1      n+2    n+3               n+4           : where the signal arrives

A moment is counted by tracing opcodes, so each can be tried and a failure repeated.

Whatever was interrupted, the loader's state is that of the last batch delivered, the same loader
can continue from it, and no processes, threads or files are leaked.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import Chapter
from streampack.config import Packing
from streampack.loader.loader import PackedDataLoader
from streampack.online.dataset import PackedIterableDataset
from streampack.planned.dataset import PackedStreamingDataset
from streampack.streams import IterableStream, Stream
from tests.helpers import conformance
from tests.helpers.conformance import Written, show
from tests.helpers.datasets import chapter_dataset, write_chapter_streams
from tests.helpers.examples import crossed

HANG_S = 90
NUM_QUICK, NUM_SLOW = 2, 40
NUM_LAST = 48  # opcodes that record a batch and return it to the loop


class Interrupt(BaseException):
    """A handler's exception that, like KeyboardInterrupt, is not an Exception."""


class Alarm(Exception):  # noqa: N818
    """A handler's exception of the usual kind."""


# An exception between open() and its `with` leaves the file to the garbage collector. It closes the
# file with a warning. Python looks for signals there, so no code can avoid it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

KINDS = (KeyboardInterrupt, Interrupt, Alarm)


# Mark a signal as arrived, as the C handler of a real one does. As a trace function it runs no
# opcode, so the Python handler waits until the traced code looks for signals. C ignores the last
# three arguments, a trace function's.
_mark_signal = ctypes.PYFUNCTYPE(None, ctypes.c_int, *[ctypes.py_object] * 3)(
    ("PyErr_SetInterruptEx", ctypes.pythonapi)
)
_arrive = functools.partial(_mark_signal, signal.SIGUSR1)


def _look() -> None:
    """Give Python a chance to run the handler of a pending signal: it checks when a call begins."""


class Moments:
    """Counts the opcodes of a piece of code, and makes a signal arrive before one of them.

    Python itself decides when to run the handler. It checks for signals when a function begins,
    when a loop jumps back, and after a call of a C function.
    """

    def __init__(self, at: int | None = None, kind: type[BaseException] = Interrupt) -> None:
        self.at = at
        self.kind = kind
        self.count = 0
        self.where = ""
        self.ends: dict[Any, int] = {}  # the last moment in each function
        self.num_ignored = 0

    def __enter__(self) -> Moments:
        self._handler = signal.signal(signal.SIGUSR1, self._handle)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._ignore
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.unraisablehook = self._hook
        signal.signal(signal.SIGUSR1, self._handler)

    def _handle(self, _number: int, frame: Any) -> None:
        if frame.f_code in (Moments._enter_frame.__code__, Moments._trace.__code__):
            return  # Python looked in the tracer, not in the traced code; the signal arrives again
        sys.settrace(None)
        self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        raise self.kind

    def _ignore(self, unraisable: Any) -> None:
        """Ignore the handler's exception in a `__del__`, as Python does.

        No exception ever leaves a `__del__`, so the loop does not see such an interrupt and the
        batch arrives. Other exceptions there are still reported.
        """
        if unraisable.exc_type is self.kind and self.where:
            self.num_ignored += 1
        else:
            self._hook(unraisable)

    def _enter_frame(self, frame: Any, _event: str, _argument: object) -> Any:
        if frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace

    def _trace(self, frame: Any, event: str, _argument: object) -> Any:
        if event == "opcode":
            self.count += 1
            self.ends[frame.f_code] = self.count
        # From the next opcode on, until the handler has run.
        return _arrive if self.at is not None and self.count > self.at else self._trace


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    rng = np.random.default_rng(6)
    lengths = [rng.integers(1, 50, 40).tolist(), rng.integers(1, 200, 20).tolist()]
    return conformance.write_streams(tmp_path_factory.mktemp("streams"), lengths)


def iterables(steps: int | None = None) -> PackedIterableDataset:
    streams = [IterableStream([[n, k] * 20 for k in range(1, 35)]) for n in (1, 2)]
    packing = Packing(max_seq_len=64)
    return PackedIterableDataset(streams, packing=packing, batch_size=2, steps=steps)


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
SOURCES = ("planned", "fetched", "iterables", "steps")
STEPS = 14  # of a loop; an epoch has more
CONFIGS = [(source, way) for source in SOURCES for way in WAYS]
# Each source and each way once, and both kinds of dataset with workers.
QUICK_CONFIGS = [
    ("planned", "loop"),
    ("planned", "workers of one epoch"),
    ("fetched", "threads"),
    ("iterables", "workers"),
    ("steps", "thread"),
]


class Case:
    """A loader of one configuration, and what it should deliver."""

    def __init__(self, source: str, way: str, written: Written, folder: Path) -> None:
        self._make: dict[str, Callable[[], Any]] = {
            "planned": lambda: conformance.make(written),
            "fetched": lambda: fetched(written, folder),
            "iterables": iterables,
            "steps": lambda: iterables(STEPS),
        }
        self._source, self._options = source, WAYS[way]
        with hanging():
            loader = self.loader()
            self.wanted = [show(batch) for _ in range(2) for batch in loader]
            self.num_batches = len(self.wanted) // 2

    def loader(self) -> PackedDataLoader:
        return PackedDataLoader(self._make[self._source](), **self._options)

    def count(self, num_before: int) -> int:
        batches = iter(self.loader())
        for _ in range(num_before):
            next(batches)
        with hanging(), Moments() as moments:
            for _ in batches:
                break
        return moments.count

    def check(self, at: int, kind: type[BaseException], num_before: int) -> bool:
        """Interrupt a batch at a moment, then continue; return whether the interrupt was raised."""
        loader, wanted = self.loader(), self.wanted[: self.num_batches]
        with hanging():
            state = loader.state_dict()
            batches = iter(loader)
            shown = [show(next(batches)) for _ in range(num_before)]
            batch, was_raised = None, False
            with Moments(at, kind) as moments:
                try:
                    # Not next(): Python looks for signals after its return, before the assignment,
                    # and an interrupt there loses the batch. A `for` loop has no such moment.
                    for batch in batches:  # noqa: B007
                        break
                    _look()
                except kind:
                    was_raised = True
            shown += [] if batch is None else [show(batch)]
            batches = None
            if shown:
                state = loader.state_dict()
                # As after a break: the next epoch, or the next batches of a number of steps.
                rest, first = [show(batch) for batch in loader], self.num_batches
                first = len(shown) if self._source == "steps" else first
                assert rest == self.wanted[first : first + self.num_batches], moments.where
            loader.load_state_dict(state)
            assert shown + [show(batch) for batch in loader] == wanted, moments.where
        return was_raised


@contextmanager
def hanging() -> Iterator[None]:
    """If something hangs, end the process with a traceback of all threads."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def resources() -> tuple[int, int, int]:
    """Count child processes (zombies included), our threads, and pipes and shared memory.

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
    """Check that no resources were leaked, allowing a moment for those that are about to end."""
    sys.last_traceback = None
    deadline_s = time.monotonic() + 60
    while True:
        gc.collect()
        now = resources()
        if all(n <= b for n, b in zip(now, before, strict=True)) or time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
    assert all(n <= b for n, b in zip(now, before, strict=True)), (before, now)


def try_moments(case: Case, seed: int, num_moments: int, num_last: int = 0) -> int:
    """Interrupt the first batch and a later one at some moments; return how many interrupts came.

    The later one is also interrupted at each of its last opcodes.
    """
    chance = random.Random(seed)
    num_raised = 0
    for num_before in (0, 5):
        # On a busy machine, a run may look again at the sizes of files.
        count = min(case.count(num_before) for _ in range(3))
        # Take some from each part, so that every phase of a start is covered.
        stretches = np.linspace(0, count, num_moments + 1).astype(int).tolist()
        for first, last in pairwise(stretches):
            at = chance.randrange(first, max(last, first + 1))
            num_raised += case.check(at, chance.choice(KINDS), num_before)
    for at in range(count - num_last, count):
        num_raised += case.check(at, chance.choice(KINDS), num_before)
    return num_raised


@pytest.mark.parametrize(("source", "way"), QUICK_CONFIGS)
def test_a_loader_goes_on_after_an_interrupt_at_any_moment(written, tmp_path, source, way):
    case = Case(source, way, written, tmp_path)
    gc.collect()
    before = resources()
    assert try_moments(case, 3, NUM_QUICK) > 0
    check_no_more(before)


@pytest.mark.parametrize("source", ["planned", "iterables", "steps"])
def test_no_interrupt_loses_a_batch_as_it_is_delivered(written, tmp_path, source):
    assert try_moments(Case(source, "loop", written, tmp_path), 5, 0, NUM_LAST) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("source", "way"), CONFIGS)
def test_a_loader_goes_on_after_an_interrupt_at_any_of_many_moments(written, tmp_path, source, way):
    case = Case(source, way, written, tmp_path)
    gc.collect()
    before = resources()
    assert try_moments(case, 4, NUM_SLOW, NUM_LAST // 3) > 0
    check_no_more(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_chapter_streams(tmp_path_factory.mktemp("chapters"))


CHANGES: dict[str, Callable[[PackedDataLoader], None]] = {
    "amend": lambda loader: loader.amend(weights={"math": 1, "web": 1}),
    "amend now": lambda loader: loader.amend(weights={"math": 1}),
    "skip": lambda loader: loader.skip(2),
}
NUM_BEFORE = {"amend": 5, "amend now": 8, "skip": 6}  # of 8 batches in a step


class Change:
    """A change of a run of chapters, and the batches of the run with and without it."""

    def __init__(self, folders: dict[str, str], name: str, way: str) -> None:
        self._folders, self._change, self._options = folders, CHANGES[name], WAYS[way]
        self._num_before = NUM_BEFORE[name]
        batches, loader = self.begun()
        self.old = [show(batch) for batch in batches]
        batches, loader = self.begun()
        with hanging(), Moments() as moments:
            self._change(loader)
        self.count = moments.count
        self.new = [show(batch) for batch in batches]
        assert self.new != self.old

    def _loader(self, **options: Any) -> PackedDataLoader:
        # Eight batches per step, and then another chapter with another shape.
        chapters = [
            Chapter(weights={"web": 3, "code": 1}, steps=4),
            Chapter(weights={"math": 1, "web": 1}, steps=2, batch_size=4),
        ]
        return PackedDataLoader(chapter_dataset(self._folders, chapters), **options)

    def begun(self, num_before: int | None = None) -> tuple[Iterator[Any], PackedDataLoader]:
        loader = self._loader(**self._options)
        batches = iter(loader)
        for _ in range(num_before or self._num_before):
            next(batches)
        return batches, loader

    def check(self, at: int, kind: type[BaseException]) -> bool:
        """Interrupt the change at a moment, then continue; return whether it was raised."""
        was_raised = False
        with hanging():
            batches, loader = self.begun()
            with Moments(at, kind) as moments:
                try:
                    self._change(loader)
                    _look()
                except kind:
                    was_raised = True
            state = loader.state_dict()
            rest = [show(batch) for batch in batches]
            assert rest in ((self.old, self.new) if was_raised else (self.new,)), moments.where
            resumed = self._loader(prefetch_threads=0)
            resumed.load_state_dict(state)
            assert [show(batch) for batch in resumed] == rest, moments.where
        return was_raised


# Functions of a load around its change of the engine, and the last opcodes of the one that changes.
LOADING = {"loaded_epochs", "loaded_chapters", "worlds_in", "_in", "words_at", "_resume_from"}
CHANGING, NUM_CHANGING = "go_to", 20


class Load:
    """A state that a loader loads in the middle of a loop; what it delivers with and without it."""

    def __init__(self, begun: Callable[[], tuple[Any, PackedDataLoader]], state: Any) -> None:
        self._begun, self._state = begun, json.loads(json.dumps(state))
        self.old = self._left(begun()[1])
        loader = begun()[1]
        with Moments() as moments:
            loader.load_state_dict(self._state)
        self.new = self._left(loader)
        assert self.new != self.old
        ends = {code.co_name: at for code, at in moments.ends.items()}
        self.moments = [at for name, at in ends.items() if name in LOADING]
        self.moments += range(ends[CHANGING] - NUM_CHANGING, ends[CHANGING], 2)

    def _left(self, loader: PackedDataLoader) -> tuple[Any, list[Any]]:
        return loader.state_dict(), [show(batch) for batch in loader]

    def check(self, at: int, kind: type[BaseException]) -> bool:
        """Interrupt the load at a moment, then continue; return whether it was raised."""
        was_raised = False
        with hanging():
            batches, loader = self._begun()
            with Moments(at, kind) as moments:
                try:
                    loader.load_state_dict(self._state)
                    _look()
                except kind:
                    was_raised = True
            del batches
            left = self._left(loader)
            assert left in ((self.old, self.new) if was_raised else (self.new,)), moments.where
        return was_raised


def load_of_chapters(folders: dict[str, str], way: str) -> Load:
    """Load the state of an amended run."""
    change = Change(folders, "amend", way)
    batches, loader = change.begun(13)
    loader.amend(weights={"math": 1, "code": 1})
    loader.skip(1)
    del batches
    return Load(change.begun, loader.state_dict())


def load_of_epochs(written: Written, way: str) -> Load:
    """Load the state of a run that takes more packs in a row from a lane, in a later epoch."""

    def begun(num_before: int = 5, batch_size: int = 2) -> tuple[Any, PackedDataLoader]:
        dataset = conformance.make(written, batch_size=batch_size, order={"num_lanes": 2})
        loader = PackedDataLoader(dataset, **WAYS[way])
        batches = iter(loader)
        for _ in range(num_before):
            next(batches)
        return batches, loader

    batches, loader = begun(3, 4)
    loader.dataset.set_epoch(2)
    batches = iter(loader)
    next(batches)
    return Load(begun, loader.state_dict())


def load_of_iterables(steps: int | None, way: str) -> Load:
    """Load the state of a later batch, and with `steps` of a later loop."""

    def begun(num_before: int = 5) -> tuple[Any, PackedDataLoader]:
        loader = PackedDataLoader(iterables(steps), **WAYS[way])
        batches = iter(loader)
        for _ in range(num_before):
            next(batches)
        return batches, loader

    batches, loader = begun(9)
    if steps is not None:
        loader.dataset.set_epoch(2)
        batches = iter(loader)
        next(batches)
    return Load(begun, loader.state_dict())


def try_changes(change: Change, num_moments: int, num_last: int) -> None:
    """Interrupt a change at some moments, and at each of its last opcodes."""
    chance = random.Random(5)
    moments = [chance.randrange(change.count) for _ in range(num_moments)]
    moments += range(change.count - num_last, change.count)
    assert sum(change.check(at, chance.choice(KINDS)) for at in moments) > 0


@pytest.mark.parametrize(("way", "name"), crossed(["workers", "loop", "threads"], list(CHANGES)))
def test_an_interrupted_change_of_a_run_is_made_or_not_as_its_state_says(folders, name, way):
    try_changes(Change(folders, name, way), NUM_QUICK, 2 * NUM_QUICK)


@pytest.mark.parametrize(("kind", "way"), crossed(["chapters", "epochs"], ["loop", "threads"]))
def test_an_interrupted_load_of_a_run_is_made_or_not_as_its_state_says(folders, written, kind, way):
    load = load_of_epochs(written, way) if kind == "epochs" else load_of_chapters(folders, way)
    assert sum(load.check(at, kind) for at, kind in zip(load.moments, cycle(KINDS))) > 0


@pytest.mark.parametrize("steps", [None, STEPS])
def test_an_interrupted_load_of_iterables_is_made_or_not_as_its_state_says(steps):
    load = load_of_iterables(steps, "loop")
    assert sum(load.check(at, kind) for at, kind in zip(load.moments, cycle(KINDS))) > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["loop", "threads", "workers"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_interrupted_at_any_of_many_moments_is_made_or_not(folders, name, way):
    try_changes(Change(folders, name, way), NUM_SLOW, NUM_LAST)
