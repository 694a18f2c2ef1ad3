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
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from streampack.errors import ConfigError
from streampack.lookback.steps import Report, lane_views, num_parts, plans, step_of
from streampack.plan import Progress
from streampack.plan.slots import WalkState
from streampack.plan.snapshots import text_as_walk, walk_as_text
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.engine import PlanEngine
from streampack.runtime.resumable import engine_of
from streampack.types import State

EVERY = 1000
TABLES = """
CREATE TABLE keys (epoch INTEGER PRIMARY KEY, key TEXT);
CREATE TABLE starts (epoch INTEGER PRIMARY KEY, walk TEXT);
CREATE TABLE walks (epoch INTEGER, position INTEGER, walk TEXT, PRIMARY KEY (epoch, position));
CREATE TABLE snapshots (
    lane INTEGER, queue INTEGER, epoch INTEGER, position INTEGER, snapshot BLOB,
    PRIMARY KEY (lane, queue, epoch, position)
);
"""
BUILD = "build it: streampack at CONFIG --build"


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
        self._keys = [key for (key,) in self._rows("SELECT key FROM keys ORDER BY epoch")]

    def _rows(self, query: str, *values: int) -> list[Any]:
        try:
            return self._table.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise ConfigError(f"index={self._path} is damaged ({error}); {BUILD}") from error

    def _num_chapters(self, engine: PlanEngine) -> int:
        """Return the chapters that are as they were; 1 for a run of epochs."""
        pairs = zip(engine.plan_keys(), self._keys, strict=False)
        num = 0
        for own, saved in pairs:
            if own != saved:
                break
            num += 1
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
        walk = None
        if run.chapters:
            if number > last:
                number, position = last, run.spans[last].num_slots or 0
            names = engine.recipe.names
            query = "SELECT epoch, walk FROM starts WHERE epoch <= ?"
            for chapter, text in self._rows(query, number):
                run.know_start(chapter, text_as_walk(text, engine.recipe, len(names)))
            query = "SELECT max(position), walk FROM walks WHERE epoch = ? AND position <= ?"
            for _, text in self._rows(query, number, position):
                walk = text_as_walk(text, engine.recipe, len(names)) if text else None
        recipe = run.recipes[run.index(number)]
        first = 0 if recipe.is_endless else number
        snapshots = []
        for lane in range(recipe.num_lanes):
            for queue in range(recipe.num_queues):
                rows = self._rows(
                    "SELECT snapshot FROM snapshots WHERE lane = ? AND queue = ? AND epoch >= ? "
                    "AND (epoch, position) <= (?, ?) ORDER BY epoch DESC, position DESC LIMIT 1",
                    *(lane, queue, first, number, position),
                )
                snapshots += [_state(packed) for (packed,) in rows]
        return Progress(epoch=number, position=position, snapshots=snapshots), walk

    def snapshots_of(
        self, engine: PlanEngine, lane: int, queue: int
    ) -> list[tuple[int, int, State]]:
        """Return the snapshots of a queue in order: epoch or chapter, position, and snapshot."""
        last = self._num_chapters(engine) - 1 if engine.run.chapters else 1 << 62
        rows = self._rows(
            "SELECT epoch, position, snapshot FROM snapshots WHERE lane = ? AND queue = ? "
            "AND epoch <= ? ORDER BY epoch, position",
            *(lane, queue, last),
        )
        return [(epoch, position, _state(packed)) for epoch, position, packed in rows]


def _state(packed: bytes) -> State:
    state: State = json.loads(zlib.decompress(packed))
    return state


def build_index(
    dataset: PackedStreamingDataset,
    path: str | os.PathLike[str],
    *,
    upto: int | None = None,
    every: int = EVERY,
    num_processes: int | None = None,
    report: Report | None = None,
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
    engine = engine_of(dataset)
    if upto is None:
        spans = engine.run.spans
        if not spans or spans[-1].stop_step is None:
            raise ConfigError(
                f"upto={upto}: the run has no end, so that its index needs one; name the last "
                "step, such as upto=100000",
                option="upto",
            )
        upto = spans[-1].stop_step - 1
    parts = num_parts(engine.run, num_processes or len(os.sched_getaffinity(0)))
    with TemporaryDirectory(dir=Path(path).absolute().parent, prefix=f"{Path(path).name}.") as some:
        files = [str(Path(some) / f"{part}") for part in range(parts)]
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
        os.replace(files[0], path)
    return PlanIndex(path)


def _plan_part(
    engine: PlanEngine,
    part: int,
    parts: int,
    upto: int,
    file: str,
    every: int,
    report: Report | None = None,
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
                    start = walk_as_text(engine.run.start(plan.epoch))
                    table.execute("INSERT INTO starts VALUES (?, ?)", (plan.epoch, start))
                epoch, step = plan.epoch, step_of(engine, plan.epoch, slot)
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
                    table.execute(
                        "INSERT INTO walks VALUES (?, ?, ?)", (*place, walk_as_text(walk))
                    )
