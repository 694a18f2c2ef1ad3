"""The plan index gives the same answers after edits, and with any number of processes."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from streampack import (
    Chapter,
    ConfigError,
    PackedDataLoader,
    Ramp,
    World,
    at,
)
from streampack.lookback import PlanIndex, build_index, first_difference
from tests.helpers.datasets import chapter_dataset, write_chapter_streams

METHODS = ["random", "stratified", "device_per_stream", "per_stream"]
CHAPTERS = [
    Chapter(weights={"web": 3, "code": 1}, steps=12),
    Chapter(weights={"web": Ramp(1, 0.5), "math": Ramp(1, 1.5)}, steps=10),
    Chapter(weights={"web": 1, "code": 1}, steps=10),
]
EDITED = [*CHAPTERS[:1], Chapter(weights={"math": 1}, steps=14), CHAPTERS[2]]
WORLD = World(num_ranks=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_chapter_streams(tmp_path_factory.mktemp("streams"))


def rows(found):
    return [(row.ranks, row.batch, row.row, row.segments.tolist()) for row in found.rows]


@pytest.mark.parametrize("method", METHODS)
def test_an_index_answers_as_planning_from_the_start_also_after_an_edit(folders, tmp_path, method):
    def dataset(chapters):
        return chapter_dataset(folders, chapters, method=method, world=WORLD)

    indices = [
        build_index(dataset(CHAPTERS), tmp_path / f"{number}", every=3, num_processes=number)
        for number in (1, 2)
    ]
    for chapters in (CHAPTERS, EDITED):
        for step in (0, 7, 12, 20, 30):
            without = rows(at(dataset(chapters), step))
            assert [rows(at(dataset(chapters), step, index=index)) for index in indices] == [
                without,
                without,
            ]
    shown = [[rows(at(dataset(own), step)) for step in range(16)] for own in (CHAPTERS, EDITED)]
    differ = [step for step in range(16) if shown[0][step] != shown[1][step]]
    assert differ[0] >= 12
    assert first_difference(dataset(CHAPTERS), dataset(EDITED)) == differ[0]
    assert first_difference(dataset(CHAPTERS), dataset(CHAPTERS)) is None
    assert first_difference(dataset(CHAPTERS), dataset(EDITED), upto=11) is None


def test_two_runs_without_an_end_are_compared_up_to_a_step(folders):
    last = [Chapter(weights={"web": 1})]
    edge = [Chapter(weights={"web": 1}, steps=5)]  # changes no pack
    runs = [chapter_dataset(folders, chapters) for chapters in (last, edge + last)]
    with pytest.raises(ConfigError, match="has no end; name the last step"):
        first_difference(*runs)
    assert first_difference(*runs, upto=20) is None


def test_a_run_without_an_end_is_indexed_up_to_a_step(folders, tmp_path):
    def dataset():
        return chapter_dataset(folders, [Chapter(weights={"web": 1})], world=WORLD)

    with pytest.raises(ConfigError, match="such as upto=100000"):
        build_index(dataset(), tmp_path / "x")
    index = build_index(dataset(), tmp_path / "x", upto=40, every=8)
    assert rows(at(dataset(), 55, index=index)) == rows(at(dataset(), 55))
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]


def test_an_amended_run_is_looked_back_at_as_it_ran(folders):
    loader = PackedDataLoader(chapter_dataset(folders, CHAPTERS, world=World()))
    seen = []
    for batch in loader:
        seen.append(batch["segments"].tolist())
        if len(seen) == 40:
            loader.amend(weights={"math": 1})
        if len(seen) == 64:
            break
    dataset = chapter_dataset(folders, CHAPTERS, world=World())
    dataset.load_state_dict(loader.state_dict())
    for step in (3, 5, 6, 7):
        own = seen[8 * step : 8 * step + 8]  # batches of a step
        shown = [
            [row.row, *segment[:5]]
            for number in range(8)
            for row in at(dataset, step).rows
            if row.batch == number
            for segment in row.segments.tolist()
        ]
        assert shown == [segment for batch in own for segment in batch]


@pytest.mark.parametrize(
    ("table", "column"), [("snapshots", "snapshot"), ("walks", "walk"), ("starts", "walk")]
)
def test_a_damaged_index_is_refused(folders, tmp_path, table, column):
    long = Chapter(weights={"web": 1, "code": 1}, steps=150)  # more than one call plans

    def dataset():
        return chapter_dataset(folders, [CHAPTERS[0], long], method="per_stream", world=WORLD)

    path = tmp_path / "index"
    build_index(dataset(), path, every=3)
    with closing(sqlite3.connect(path)) as file, file:
        for number, value in file.execute(f"SELECT rowid, {column} FROM {table}").fetchall():
            middle = len(value) // 2
            letter = b"\0" if isinstance(value, bytes) else "x" if value[middle] != "x" else "y"
            damaged = value[:middle] + letter + value[middle + 1 :]
            file.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (damaged, number))
    with pytest.raises(ConfigError, match="is damaged"):
        at(dataset(), 160, index=PlanIndex(path))
