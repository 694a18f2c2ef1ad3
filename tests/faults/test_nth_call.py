"""No matter which call to the disk or the store fails: correct bytes or a typed error, then a clean
resume.

A small epoch is run in memory, once for each call: the n-th one fails, returns too little, or is
the last thing the process does. Then the fault is removed and the run resumes from its last saved
state; every batch must equal that of the unbroken run. About 15 s in total.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from streampack.errors import DataError
from streampack.gather.gather import Gatherer
from streampack.plan.device_plan import DeviceView
from streampack.plan.state import Progress
from streampack.storage.materialize import Downloader
from streampack.stores.failures import DamagedError
from streampack.streams import shard_pool as recent_module
from streampack.types import ByteArray
from streampack.world import World
from tests.helpers.caches import plain_name
from tests.helpers.faults.memorydisk import Killed, MemoryDisk
from tests.helpers.faults.setups import Planner, Setup, make_setups, open_remote
from tests.helpers.planning import decode_epochs, encode_epochs

FOLDER = Path("/node")
VIEW = DeviceView(batch_size=2)


@pytest.fixture(scope="module")
def setups(tmp_path_factory) -> list[Setup]:
    return make_setups(tmp_path_factory.mktemp("setups"))


@pytest.fixture(autouse=True)
def own_shards(monkeypatch) -> None:
    monkeypatch.setattr(recent_module, "_pools", {})


class FaultyDisk(MemoryDisk):
    """A disk on which the n-th call goes wrong."""

    def __init__(self, at: int, kind: str) -> None:
        super().__init__(self._count)
        self.left = at
        self._kind = kind
        self.was_short = False

    def _count(self, _: str, path: Path) -> None:
        self.left -= 1
        if self.left != 0:
            return
        if self._kind == "kill":
            raise self.stop(Killed())
        if self._kind in ("EIO", "ENOSPC"):
            raise OSError(getattr(errno, self._kind), "this one failed", str(path))

    def open(self, path: Path) -> BinaryIO:
        content = super().open(path).read()
        return BytesIO(content[: len(content) // 2] if self._is_short() else content)

    def map(self, path: Path) -> ByteArray:
        content = super().map(path)
        return content[: len(content) // 2] if self._is_short() else content

    def _is_short(self) -> bool:
        is_short = self._kind == "short" and self.left == 0
        self.was_short |= is_short
        return is_short


class FaultyStore:
    """A store where the n-th fetch goes wrong."""

    def __init__(self, setup: Setup, disk: MemoryDisk, at: int = 0, kind: str = "") -> None:
        self.left = at
        self._setup, self._disk, self._kind = setup, disk, kind

    def fetch(self, files: Any, basename: str, to: Path, *, check: Any = None, **_: Any) -> None:
        uri = f"{files.remote}/{basename}"
        for _attempt in range(4):  # like the real store
            try:
                self._send(uri, to)
                return check(to) if check is not None else None
            except DamagedError as error:
                damage = error
        raise DataError(f"{uri}: {damage}", uri=uri)

    def _send(self, uri: str, to: Path) -> None:
        content = self._setup.object_at(uri)
        self.left -= 1
        kind = self._kind if self.left == 0 else ""
        if kind in ("EIO", "ENOSPC"):
            raise OSError(getattr(errno, kind), "this one failed", str(to))
        if kind == "refused":
            raise DataError(f"{uri}: refused", uri=uri)
        self._disk.write(to, [content[: len(content) // 2] if kind else content])
        if kind == "kill":
            raise self._disk.stop(Killed())

    def fetch_if_there(self, *_: Any) -> bool:
        return False

    @property
    def store(self) -> Downloader:
        return Downloader(fetch=self.fetch, fetch_if_there=self.fetch_if_there)


def batches(
    setup: Setup, disk: MemoryDisk, store: Downloader, state: dict[str, Any] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Resume from a state; yield the slots done so far and the state after each correct batch."""
    recent_module._pools.clear()
    # Compressed files take space too: with half the limit, shards would be refetched constantly.
    limit = setup.limit_for(World(), VIEW.batch_size, 0) * (1 + setup.keep_zip)
    streams = open_remote(setup, FOLDER, disk, store, limit)
    recipe, digests = setup.recipe_for(streams), [stream.digest for stream in streams]
    start = Progress() if state is None else decode_epochs(state, recipe, digests)
    planner, gatherer = Planner(recipe, VIEW, start), Gatherer(streams, recipe.packing)
    while (planned := planner.next()) is not None:
        plan, slot, needs, snapshots = planned
        if needs is not None:
            for number, shard in needs.ahead.tolist():
                streams[number].mark_planned(np.array([shard]))
            for number, shard in needs.finished.tolist():
                streams[number].mark_finished(np.array([shard]))
        rows = gatherer.gather(plan.packs, plan.num_rows).tokens
        assert rows.tolist() == setup.tokens[0][slot : slot + plan.num_rows].tolist()
        progress = Progress(epoch=0, position=plan.position, snapshots=snapshots)
        yield slot + plan.num_rows, json.loads(json.dumps(encode_epochs(recipe, digests, progress)))
    planner.close()


def run_broken(setup: Setup, disk: MemoryDisk, store: FaultyStore) -> tuple[int, Any, bool]:
    """Run until the fault; return the slots done, the last state, and whether an error came."""
    last: tuple[int, Any] = (0, None)
    try:
        for last in batches(setup, disk, store.store, None):
            assert last[0]
    except (DataError, Killed):
        return *last, True
    return *last, False


def check_resumed(setup: Setup, disk: MemoryDisk, done: int, state: Any) -> None:
    """Resume without faults on the same disk; check that the rest arrives and no files are left."""
    disk.release([disk.actor])
    disk.begin("the next start")
    disk.now += 1  # earlier failures are not reported to those that begin later
    store = FaultyStore(setup, disk)
    for slots, _ in batches(setup, disk, store.store, state):
        assert slots > done
        done = slots
    assert done == len(setup.tokens[0])
    for name, content in disk.files_in(FOLDER).items():
        assert ".tmp" not in name
        assert not name.endswith(".failed")
        place, _, basename = name.rpartition("/")
        origin = f"{place.partition('/')[0]}/{plain_name(basename)}"
        whole = [text for own, text in setup.shards.items() if own.startswith(origin)]
        assert ".streampack" in name or content in whole


def for_every_use(setup: Setup, make: Callable[[int], tuple[MemoryDisk, FaultyStore, Any]]) -> int:
    """Make each use fail in turn; return how many runs ended early."""
    num_broken = 0
    for at in range(1, 10_000):
        disk, store, counter = make(at)
        done, state, is_broken = run_broken(setup, disk, store)
        if counter.left > 0:
            assert not is_broken
            assert at > 5
            return num_broken
        num_broken += is_broken
        check_resumed(setup, disk, done, state)
    raise AssertionError("the epoch never ended")


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        *((kind, 0) for kind in ("EIO", "short", "kill")),
        pytest.param("ENOSPC", 0, marks=pytest.mark.slow),
        *(
            pytest.param(each, 3, marks=pytest.mark.slow)
            for each in ("EIO", "ENOSPC", "short", "kill")
        ),
    ],
)
def test_whichever_use_of_the_disk_goes_wrong_the_run_goes_on_exactly(setups, number, kind):
    disks: list[FaultyDisk] = []

    def make(at: int) -> tuple[MemoryDisk, FaultyStore, Any]:
        disks.append(FaultyDisk(at, kind))
        return disks[-1], FaultyStore(setups[number], disks[-1]), disks[-1]

    num_broken = for_every_use(setups[number], make)
    num_short = sum(disk.was_short for disk in disks)
    assert (num_short if kind == "short" else num_broken) > 5


# Raw shards with length files, and compressed ones that are kept, without.
@pytest.mark.parametrize("number", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["ENOSPC", "short", "refused", "kill"])
def test_whichever_object_of_the_store_goes_wrong_the_run_goes_on_exactly(setups, number, kind):
    def make(at: int) -> tuple[MemoryDisk, FaultyStore, Any]:
        disk = MemoryDisk()
        store = FaultyStore(setups[number], disk, at, kind)
        return disk, store, store

    num_broken = for_every_use(setups[number], make)
    assert num_broken == 0 if kind == "short" else num_broken >= 3
