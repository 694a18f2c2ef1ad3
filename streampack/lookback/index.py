"""A plan index: snapshots of a run's plan in a file, from which any step is planned quickly.

::

    keys        what determines the packs up to each chapter
    starts      the walk where each chapter begins
    walks       the walk, about every 1,000 steps
    snapshots   of each queue of a lane, where it changed, about every 1,000 steps

These are the snapshots of saved states. A chapter that was edited since ends the index. It is an
SQLite file, written under another name and renamed once it is whole.

Cost: building plans the run, about 0.4 us a sample, divided by the processes that share its lanes.
"""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np

from streampack._paths import replaced
from streampack.errors import ConfigError
from streampack.lookback.steps import (
    OnStep,
    lane_views,
    last_step,
    num_parts,
    planned_engine,
    plans,
)
from streampack.mix.schedule import ScheduleState
from streampack.plan.slots import WalkState
from streampack.plan.state import Progress
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.engine import PlanEngine
from streampack.types import State

T = TypeVar("T")

EVERY = 1000
TABLES = """
CREATE TABLE keys (epoch INTEGER PRIMARY KEY, key TEXT);
CREATE TABLE starts (epoch INTEGER PRIMARY KEY, walk BLOB);
CREATE TABLE walks (epoch INTEGER, position INTEGER, walk BLOB, PRIMARY KEY (epoch, position));
CREATE TABLE snapshots (
    lane INTEGER, queue INTEGER, epoch INTEGER, position INTEGER, snapshot BLOB,
    PRIMARY KEY (lane, queue, epoch, position)
);
"""
BUILD = "build it with the options of this command: streampack at CONFIG --build"


class PlanIndex:
    """A plan index that was built.

    Raises:
        ConfigError: If the file is missing or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        if not self._path.is_file():
            raise ConfigError(f"index={path} is not a file; {BUILD}")
        self._table = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)
        self._keys = self._rows("SELECT key FROM keys ORDER BY epoch", read=str)

    def _rows(self, query: str, *values: int, read: Callable[..., T]) -> list[T]:
        try:
            return [read(*row) for row in self._table.execute(query, values)]
        except (sqlite3.Error, zlib.error, ValueError) as error:
            raise ConfigError(f"index={self._path} is damaged ({error}); {BUILD}") from error

    def _num_chapters(self, engine: PlanEngine) -> int:
        """Return the chapters that are as they were; 1 for a run of epochs."""
        pairs = zip(engine.plan_keys(), self._keys, strict=False)
        num = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if not num:
            raise ConfigError(
                f"index={self._path} is of another run: streams, options or the first chapter are "
                f"not as they were; {BUILD}"
            )
        return num

    def nearest(
        self, engine: PlanEngine, number: int, position: int
    ) -> tuple[Progress, WalkState | None]:
        """Return a place from which planning reaches a position, and a known walk there.

        It is the position itself, unless a chapter before was edited.
        """
        run, last = engine.run, self._num_chapters(engine) - 1
        walks: list[WalkState | None] = []
        if run.chapters:
            if number > last:
                number, position = last, run.spans[last].num_slots or 0

            query = "SELECT epoch, walk FROM starts WHERE epoch <= ?"
            for start in self._rows(query, number, read=lambda at, packed: (at, _walk(packed))):
                run.know_start(*start)
            query = (
                "SELECT walk FROM walks WHERE epoch = ? AND position <= ? "
                "ORDER BY position DESC LIMIT 1"
            )
            walks += self._rows(query, number, position, read=_walk)
        recipe = run.recipes[run.index(number)]
        first = 0 if recipe.is_endless else number
        snapshots = []
        for lane in range(recipe.num_lanes):
            for queue in range(recipe.num_queues):
                snapshots += self._rows(
                    "SELECT snapshot FROM snapshots WHERE lane = ? AND queue = ? AND epoch >= ? "
                    "AND (epoch, position) <= (?, ?) ORDER BY epoch DESC, position DESC LIMIT 1",
                    *(lane, queue, first, number, position),
                    read=_state,
                )
        progress = Progress(epoch=number, position=position, snapshots=snapshots)
        return progress, next(iter(walks), None)

    def snapshots_of(
        self, engine: PlanEngine, lane: int, queue: int
    ) -> list[tuple[int, int, State]]:
        """Return the snapshots of a queue in order: epoch or chapter, position, and snapshot."""
        last = self._num_chapters(engine) - 1 if engine.run.chapters else 1 << 62
        return self._rows(
            "SELECT epoch, position, snapshot FROM snapshots WHERE lane = ? AND queue = ? "
            "AND epoch <= ? ORDER BY epoch, position",
            *(lane, queue, last),
            read=lambda epoch, position, packed: (epoch, position, _state(packed)),
        )


def _state(packed: bytes) -> State:
    state: State = json.loads(zlib.decompress(packed))
    return state


def _packed_walk(walk: WalkState) -> bytes:
    text = json.dumps(asdict(walk), default=np.ndarray.tolist)
    return zlib.compress(text.encode(), 9)


def _walk(packed: bytes) -> WalkState:
    slot, served, turn, schedule, limits = _state(packed).values()
    if schedule is not None:
        lags, owed = np.array(schedule["lags"]), np.array(schedule["owed"])
        schedule = ScheduleState(slot=schedule["slot"], lags=lags, owed=owed)
    return WalkState(
        slot=slot,
        served=np.array(served),
        turn=np.array(turn),
        schedule=schedule,
        limits=np.array(limits),
    )


def build_index(
    dataset: PackedStreamingDataset,
    path: str | os.PathLike[str],
    *,
    upto: int | None = None,
    every: int = EVERY,
    num_processes: int | None = None,
    report: OnStep | None = None,
) -> PlanIndex:
    """Write a plan index of a run, and return it.

    Args:
        dataset: The dataset of the run, or of the part that is known. It stays as it is.
        path: The file; one that exists is replaced.
        upto: The last step of the run to plan; None: its last, for a run of chapters with an end.
        every: Steps between snapshots.
        num_processes: Processes that share the lanes, where lanes cannot run dry; None: one for
            each core that this process may use.
        report: Called with the step that was reached, from time to time.

    Raises:
        ConfigError: If `upto` is missing and the run has no end.
    """
    engine = planned_engine(dataset)
    upto = last_step(engine, upto)
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"index={path}: folder {folder} does not exist; make it", option="index")
    parts = num_parts(engine.run, num_processes or len(os.sched_getaffinity(0)))
    with replaced(Path(path)) as whole, TemporaryDirectory() as some:
        files = [str(whole), *(str(Path(some, f"{part}")) for part in range(1, parts))]
        with ProcessPoolExecutor(max(parts - 1, 1)) as others:
            jobs = [
                others.submit(_plan_part, engine, part, parts, upto, files[part], every)
                for part in range(1, parts)
            ]
            _plan_part(engine, 0, parts, upto, files[0], every, report)
            for job in jobs:
                job.result()
        with closing(sqlite3.connect(files[0])) as table, table:
            for file in files[1:]:
                with closing(sqlite3.connect(file)) as other:
                    rows = other.execute("SELECT * FROM snapshots")
                    table.executemany("INSERT INTO snapshots VALUES (?, ?, ?, ?, ?)", rows)
    return PlanIndex(path)


def _plan_part(
    engine: PlanEngine,
    part: int,
    parts: int,
    upto: int,
    file: str,
    every: int,
    report: OnStep | None = None,
) -> None:
    """Plan some of the lanes up to a step, and write what an index has of them."""
    with closing(sqlite3.connect(file)) as table, table:
        table.executescript(TABLES)
        table.executemany("INSERT INTO keys VALUES (?, ?)", enumerate(engine.plan_keys()))
        saved: dict[tuple[int, int], str] = {}
        views, due, epoch = lane_views(engine, part, parts), 0, 0
        with closing(plans(engine, views, Progress())) as all_plans:
            for sequence, plan, slot in all_plans:
                if plan.epoch != epoch and not engine.recipe.is_endless:
                    saved = {}  # lanes begin again
                if plan.epoch != epoch and engine.run.chapters and not part:
                    start = _packed_walk(engine.run.start(plan.epoch))
                    table.execute("INSERT INTO starts VALUES (?, ?)", (plan.epoch, start))
                epoch, step = plan.epoch, engine.step_of(plan.epoch, slot)
                if step > upto:
                    break
                if report is not None:
                    report(step)
                if step < due:
                    continue
                due = step + every
                place = epoch, sequence.position
                for snapshot in sequence.snapshots():
                    key, text = (snapshot["lane"], snapshot["queue"]), json.dumps(snapshot)
                    if saved.get(key) != text:
                        saved[key], packed = text, zlib.compress(text.encode())
                        values = (*key, *place, packed)
                        table.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?, ?)", values)
                walk = sequence.walk_state(*place)
                if walk is not None and not part:
                    packed = _packed_walk(walk)
                    table.execute("INSERT INTO walks VALUES (?, ?, ?)", (*place, packed))
