"""Loader, dataset and the next loop always agree on the position of the run.

::

    model     reached  the position that every state must have  (epoch, batches delivered of it)
              next     the position where the next loop must begin

They only differ during an iteration, or after leaving one early: a state is that of the last batch
delivered, and the next loop is the next epoch. A start that fails changes neither.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streampack import (
    ConfigError,
    DataError,
    Download,
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    ResumeError,
    Stream,
    World,
)
from streampack.write import write_stream
from tests.helpers import builders, conformance
from tests.helpers.examples import examples
from tests.helpers.iterables import Again, rows_of

Place = tuple[int, int]  # an epoch, and how many of its batches were delivered

LENGTHS = [7, 12, 30, 2, 9, 11, 50, 3, 5, 21, 40, 33, 8]


class BrokenError(Exception):
    """Raised by the user's function."""


class Way:
    """One way to iterate: how to make its datasets and read their states."""

    def __init__(self, kind: str, num_workers: int, prefetch_threads: int) -> None:
        self.kind = kind
        self.options = {"num_workers": num_workers, "prefetch_threads": prefetch_threads}
        self.failure: type[BaseException] | None = None

    def look(self, batch: Any) -> Any:
        """The user's batch function, which can be made to fail."""
        if self.failure is not None:
            raise self.failure("in batch_format")
        return batch

    def dataset(self) -> Any:
        if self.kind == "iterable":
            return PackedIterableDataset(
                [IterableStream(Again(rows_of(0, LENGTHS)), name="a")],
                packing=Packing(max_seq_len=32),
                batch_size=2,
                batch_format=self.look,
                world=World(),
            )
        return PackedStreamingDataset(
            written(),
            packing=Packing(max_seq_len=32, buffer_tokens=64),
            mixing=Mixing(epoch_end="carry" if self.kind == "carry" else "pad"),
            order=Order(seed=3),
            batch_size=2,
            batch_format=self.look,
            world=World(),
        )

    def loader(self, dataset: Any) -> PackedDataLoader:
        return PackedDataLoader(dataset, **self.options)

    def place_of(self, state: dict[str, Any]) -> Place:
        if self.kind != "iterable":
            positions = [0, *(batch["position"] for batch in epoch_of(self.kind, state["epoch"]))]
            return state["epoch"], positions.index(state["position"])
        states = state.get("workers", [state])
        counts = [each["flow"]["num_batches"] if each["flow"] else 0 for each in states]
        return max(each["epoch"] for each in states), sum(counts)


@cache
def written() -> list[Stream]:
    folder = Path(tempfile.mkdtemp(prefix="streampack-test-standing-"))
    return [builders.stream_of(folder / "a", LENGTHS)]


@cache
def epoch_of(kind: str, epoch: int) -> list[Any]:
    dataset = Way(kind, 0, 0).dataset()
    dataset.set_epoch(epoch)
    return list(dataset)


def teardown_module() -> None:
    if written.cache_info().currsize:
        shutil.rmtree(Path(written()[0].source.local).parent)


class Standing(RuleBasedStateMachine):
    """One loader over one dataset, and the position that both must report."""

    way: ClassVar[Way]

    def __init__(self) -> None:
        super().__init__()
        self.way.failure = None
        self.dataset = self.way.dataset()
        self.loader = self.way.loader(self.dataset)
        self.live: Any = None  # the iteration under way
        self.live_at: Place = (0, 0)
        self.before: Any = None  # an earlier one, which no longer sets the position
        self.reached: Place = (0, 0)
        self.next: Place = (0, 0)
        self.states: list[tuple[Any, Place]] = []
        self.direct: list[tuple[Any, Place]] = []

    def size(self, epoch: int) -> int:
        return len(epoch_of(self.way.kind, epoch))

    def check(self, batch: Any, place: Place) -> None:
        epoch, done = place
        assert batch["epoch"] == epoch
        wanted = epoch_of(self.way.kind, epoch)[done - 1]
        assert conformance.show(batch) == conformance.show(wanted)

    def leave(self) -> None:
        if self.live is not None:
            self.before, self.live = self.live, None

    def begun(self) -> Place:
        epoch, done = self.next
        return (epoch, done + 1) if done < self.size(epoch) else (epoch + 1, 1)

    @rule()
    def begin(self) -> None:
        self.leave()
        self.live = iter(self.loader)
        place = self.begun()
        self.check(next(self.live), place)
        self.reached = self.live_at = place
        self.next = (place[0] + 1, 0)

    @precondition(lambda self: self.live is not None)
    @rule()
    def go_on(self) -> None:
        epoch, done = self.live_at
        batch = next(self.live, None)
        if done == self.size(epoch):
            assert batch is None
            self.reached = self.next
            self.leave()
        else:
            self.reached = self.live_at = (epoch, done + 1)
            self.check(batch, self.reached)

    @precondition(lambda self: self.live is not None)
    @rule()
    def exhaust(self) -> None:
        epoch, done = self.live_at
        assert len(list(self.live)) == self.size(epoch) - done
        self.reached = self.next
        self.leave()

    @precondition(lambda self: self.live is not None)
    @rule()
    def stop(self) -> None:
        self.live.close()
        self.live = None

    @precondition(lambda self: self.before is not None)
    @rule()
    def go_on_with_an_earlier_one(self) -> None:
        with suppress(ConfigError):  # if sources allow only one iteration at a time
            next(self.before, None)

    @rule()
    def ask(self) -> None:
        if self.way.kind == "iterable":
            self.leave()  # sources allow one iteration at a time
        iter(self.loader)
        self.reached = self.next

    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch: int) -> None:
        self.leave()
        self.dataset.set_epoch(epoch)
        self.reached = self.next = (epoch, 0)

    @rule()
    def save(self) -> None:
        self.states.append((json.loads(json.dumps(self.loader.state_dict())), self.reached))
        with suppress(ResumeError):
            own = json.loads(json.dumps(self.dataset.state_dict()))
            self.direct.append((own, self.reached))

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def load(self, data: Any) -> None:
        self.leave()
        state, self.reached = data.draw(st.sampled_from(self.states))
        self.next = self.reached
        self.loader.load_state_dict(state)

    @precondition(lambda self: self.direct and not self.way.options["num_workers"])
    @rule(data=st.data())
    def load_into_the_dataset(self, data: Any) -> None:
        self.leave()
        state, self.reached = data.draw(st.sampled_from(self.direct))
        self.next = self.reached
        self.dataset.load_state_dict(state)

    @precondition(lambda self: not self.way.options["num_workers"])
    @rule(count=st.integers(1, 2))
    def iterate_the_dataset(self, count: int) -> None:
        self.leave()
        batches = iter(self.dataset)
        for batch in islice(batches, count):
            self.reached = self.begun()
            self.check(batch, self.reached)
            self.next = self.reached
        self.next = (self.reached[0] + 1, 0)

    @precondition(lambda self: not self.way.options["num_workers"])
    @rule(failure=st.sampled_from([BrokenError, KeyboardInterrupt]), direct=st.booleans())
    def fail(self, failure: type[BaseException], *, direct: bool) -> None:
        """A start that fails changes nothing, except that earlier iterations are over."""
        for iteration in (self.live, self.before):
            if iteration is not None:
                iteration.close()
        self.live = self.before = None
        self.way.failure = failure
        try:
            with pytest.raises(failure):
                next(iter(self.dataset if direct else self.loader))
        finally:
            self.way.failure = None
        self.reached = self.next  # requesting the iteration came first

    @invariant()
    def agree(self) -> None:
        places = [self.way.place_of(self.loader.state_dict())]
        with suppress(ResumeError):
            places.append(self.way.place_of(self.dataset.state_dict()))
        if not self.way.options["num_workers"]:
            assert len(places) == 2
        assert places == [self.reached] * len(places)

    def teardown(self) -> None:
        """A fresh run resumes from the loader's state with the very next batch."""
        state = json.loads(json.dumps(self.loader.state_dict()))
        for iteration in (self.live, self.before):
            if iteration is not None:
                iteration.close()
        fresh = self.way.loader(self.way.dataset())
        fresh.load_state_dict(state)
        self.next = self.reached
        self.check(next(iter(fresh)), self.begun())


@pytest.mark.parametrize("prefetch_threads", [0, 1])
@pytest.mark.parametrize("kind", ["planned", "carry", "iterable"])
def test_loader_dataset_and_next_loop_agree_whatever_was_done_before(kind, prefetch_threads):
    way = Way(kind, 0, prefetch_threads)
    machine = type("Standing", (Standing,), {"way": way}).TestCase
    machine.settings = examples(8, many=25, stateful_step_count=14)
    machine().runTest()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["planned", "iterable"])
def test_loader_dataset_and_next_loop_agree_with_workers_too(kind):
    machine = type("Standing", (Standing,), {"way": Way(kind, 1, 1)}).TestCase
    machine.settings = examples(8, many=15, stateful_step_count=10)
    machine().runTest()


# Starts that fail.


@pytest.fixture
def origin(tmp_path) -> Path:
    """A stream of many small shards without length files: planning fetches them."""
    write_stream(([i + 1] * 16 for i in range(400)), tmp_path / "origin", size_limit=2048)
    (tmp_path / "origin" / "lengths.bin").unlink()
    return tmp_path / "origin"


@contextmanager
def hidden(origin: Path, keep: int) -> Iterator[None]:
    """Move a stream's shards away, except some, and put them back at the end."""
    away = sorted(origin.glob("shard.*"))[keep:]
    for path in away:
        path.rename(origin.parent / path.name)
    yield
    for path in away:
        (origin.parent / path.name).rename(path)


def remote_dataset(origin: Path, **packing: Any) -> PackedStreamingDataset:
    cache = origin.parent / "cache"
    stream = Stream(remote=str(origin), local=str(cache), download=Download(retry=0, timeout=60))
    packing = Packing(max_seq_len=64, **packing)
    return PackedStreamingDataset([stream], packing=packing, batch_size=2, world=World())


def place(state: dict[str, Any]) -> tuple[int, int]:
    return state["epoch"], state["position"]


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("packing", [{}, {"overflow": "drop"}])
def test_a_start_without_its_shards_changes_nothing(origin, packing, resumed):
    start, following = (0, 0), (0, 2)
    loader = PackedDataLoader(remote_dataset(origin, **packing))
    state = loader.state_dict()
    if resumed:
        batches = iter(loader)
        for _ in range(20):
            next(batches)
        state, start, following = loader.state_dict(), (0, 40), (0, 42)
        del batches
        shutil.rmtree(origin.parent / "cache")
        loader = PackedDataLoader(remote_dataset(origin, **packing))
        loader.load_state_dict(state)
    for _ in range(2):
        with hidden(origin, keep=2), pytest.raises(DataError, match="cannot be fetched"):
            next(iter(loader))
        assert loader.state_dict() == loader.dataset.state_dict() == state
        assert place(state) == start
    assert place(next(iter(loader))) == following


class Unsteady:
    """A source that fails to start while a sign exists, in any process."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __iter__(self) -> Iterator[list[int]]:
        if self.sign.exists():
            raise OSError("the source is away")
        yield from rows_of(0, LENGTHS)


@pytest.mark.parametrize(("num_workers", "persistent_workers"), [(0, False), (2, True), (2, False)])
def test_a_start_without_its_source_changes_nothing(tmp_path, num_workers, persistent_workers):
    sign = tmp_path / "away"

    def make() -> PackedDataLoader:
        stream = IterableStream(Unsteady(sign), name="a")
        dataset = PackedIterableDataset(
            [stream], packing=Packing(max_seq_len=32), batch_size=1, world=World()
        )
        options = {"num_workers": num_workers, "persistent_workers": persistent_workers}
        return PackedDataLoader(dataset, **options if num_workers else {})

    def fail(loader: PackedDataLoader) -> None:
        sign.touch()
        with pytest.raises(DataError, match="the source is away"):
            list(loader)
        sign.unlink()

    whole = [conformance.show(batch) for batch in make()]
    loader = make()
    state = loader.state_dict()
    fail(loader)
    assert loader.state_dict() == state
    batches = iter(loader)
    assert [conformance.show(next(batches)) for _ in range(2)] == whole[:2]
    state = loader.state_dict()
    del batches

    loader = make()
    loader.load_state_dict(state)
    for _ in range(2):
        fail(loader)
        assert loader.state_dict() == state
    assert [conformance.show(batch) for batch in loader] == whole[2:]
    fail(loader)
    assert {batch["epoch"] for batch in loader} == {1}


@pytest.mark.parametrize("num_workers", [None, 0, 1])
@pytest.mark.parametrize("kind", ["planned", "iterable"])
@pytest.mark.parametrize("change", ["set_epoch", "load_state_dict"])
def test_an_iterator_that_began_before_the_dataset_was_moved_ends_with_an_error(
    kind, change, num_workers
):
    dataset = Way(kind, 0, 1).dataset()
    value = 3 if change == "set_epoch" else dataset.state_dict()
    loader = dataset if num_workers is None else Way(kind, num_workers, 1).loader(dataset)
    if kind == "iterable" and num_workers and change == "load_state_dict":
        pytest.skip("a dataset cannot load a state of workers")
    before = iter(loader)
    next(before)
    getattr(dataset, change)(value)
    with pytest.raises(ConfigError, match="since this iterator began, a state was loaded"):
        next(before)
    assert next(iter(loader))["epoch"] == (3 if change == "set_epoch" else 0)
